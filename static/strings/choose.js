// SPDX-License-Identifier: Apache-2.0
/**
 * Which language the page speaks.
 *
 * Invariant: always one of LANGUAGES. Chinese without a script is read by its region, never by a guess from the
 * text. Only the chosen language is loaded.
 */

export const LANGUAGES = Object.freeze({
  en: "English",
  "zh-Hans": "简体中文",
  "zh-Hant": "繁體中文",
  ja: "日本語",
});

const HANT_REGIONS = /^zh-(?:hk|mo|tw)\b/i;

/** The first of a browser's languages that we speak. */
export function chooseLanguage(wanted) {
  for (const tag of wanted) {
    const found = languageOf(tag);
    if (found) return found;
  }
  return "en";
}

export async function loadWords(language) {
  return (await import(`./${language}.js`)).default;
}

function languageOf(tag) {
  if (/^zh-hant\b/i.test(tag) || HANT_REGIONS.test(tag)) return "zh-Hant";
  // Cantonese is written in the Traditional script wherever a browser names it.
  if (/^yue\b/i.test(tag)) return /hans|cn/i.test(tag) ? "zh-Hans" : "zh-Hant";
  if (/^zh\b/i.test(tag)) return "zh-Hans";
  return Object.keys(LANGUAGES).find((known) => tag.toLowerCase().split("-")[0] === known);
}
