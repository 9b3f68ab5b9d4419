// SPDX-License-Identifier: Apache-2.0
/**
 * Which language a text is in, for its fonts and its voice: Han characters look different in each country.
 *
 * Invariant: null rather than a guess. It must never send the text anywhere to find out.
 */

const SAMPLE_CHARS = 400;
const HAN = /\p{Script=Han}/gu;
const KANA = /[\p{Script=Hiragana}\p{Script=Katakana}]/gu;
const LETTER = /\p{L}/gu;
/** Common characters that exist in one of the two scripts only. */
const SIMPLIFIED = /[们这国说时会来对没吗过还见书东车马门问间长个为无从发经点实话开关欢语让请谢现学样后气电爱讲写给边听]/g;
const TRADITIONAL = /[們這國說時會來對沒嗎過還見書東車馬門問間長個為無從發經點實話開關歡語讓請謝現學樣後氣電愛講寫給邊聽]/g;
const ENGLISH = /\b(?:the|and|is|are|of|to|in|you|that|it|for|with|this|what|how|can|my|me)\b/gi;

/** A language tag or null; `pageLanguage` decides between scripts that the text leaves open. */
export function guessLanguage(text, pageLanguage = "en") {
  const sample = text.slice(0, SAMPLE_CHARS);
  const letters = count(sample, LETTER);
  const han = count(sample, HAN);
  const kana = count(sample, KANA);
  if (letters === 0) return null;
  if (kana >= 1 && (han + kana) / letters > 0.2 && kana / (han + kana) > 0.1) return "ja";
  if (han / letters > 0.2) return chineseOf(sample, pageLanguage);
  return count(sample, ENGLISH) >= 2 && han === 0 ? "en" : null;
}

function chineseOf(sample, pageLanguage) {
  const difference = count(sample, SIMPLIFIED) - count(sample, TRADITIONAL);
  if (difference !== 0) return difference > 0 ? "zh-Hans" : "zh-Hant";
  return /^zh|^ja/.test(pageLanguage) ? pageLanguage : null;
}

function count(text, pattern) {
  return text.match(pattern)?.length ?? 0;
}
