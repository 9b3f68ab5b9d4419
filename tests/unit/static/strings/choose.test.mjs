// SPDX-License-Identifier: Apache-2.0
/** Every language says everything, and the browser's wishes choose one. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { LANGUAGES, chooseLanguage, loadWords } from "../../../../static/strings/choose.js";

/** Every text of a language by its place, with the names that are filled in. */
function places(words, prefix = "") {
  return Object.entries(words).flatMap(([key, value]) =>
    typeof value === "string" ? [[`${prefix}${key}`, value]] : places(value, `${prefix}${key}.`),
  );
}

test("all languages have the same texts, none empty, with the same places to fill", async () => {
  const shape = (words) => places(words).map(([key, text]) => [key, (text.match(/\{\w+\}/g) ?? []).sort().join()]);
  const english = shape(await loadWords("en"));
  for (const [tag, name] of Object.entries(LANGUAGES)) {
    const words = await loadWords(tag);
    assert.deepEqual(shape(words), english, tag);
    assert.equal(words.name, name);
    for (const [key, text] of places(words)) assert.ok(text.trim(), `${tag} ${key}`);
  }
});

test("no language has another's text by mistake", async () => {
  const [english, simplified, traditional] = await Promise.all(["en", "zh-Hans", "zh-Hant"].map(loadWords));
  const same = (first, second) => places(first).filter(([key, text]) => new Map(places(second)).get(key) === text).map(([key]) => key);
  assert.deepEqual(same(english, simplified), []);
  for (const [key, text] of places(simplified)) assert.doesNotMatch(text, /[們這國說時會來對沒訊傳設網]/, key);
  for (const [key, text] of places(traditional)) assert.doesNotMatch(text, /[们这国说时会来对没讯传设网]/, key);
});

for (const [wanted, language] of [
  [["en-GB", "zh-CN"], "en"],
  [["zh-CN"], "zh-Hans"],
  [["zh"], "zh-Hans"],
  [["zh-SG"], "zh-Hans"],
  [["zh-Hans-HK"], "zh-Hans"],
  [["zh-TW"], "zh-Hant"],
  [["zh-HK", "en"], "zh-Hant"],
  [["zh-Hant-CN"], "zh-Hant"],
  [["yue-HK"], "zh-Hant"],
  [["ja-JP"], "ja"],
  [["fr", "ja"], "ja"],
  [["fr", "de"], "en"],
  [["enq"], "en"],
  [[], "en"],
]) {
  test(`${wanted} is ${language}`, () => assert.equal(chooseLanguage(wanted), language));
}
