// SPDX-License-Identifier: Apache-2.0
/** A language where it shows, and none where it does not. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { guessLanguage } from "../../../../static/view/language.js";

for (const [text, page, language] of [
  ["天空为什么是蓝色的？", "en", "zh-Hans"],
  ["天空為什麼是藍色的？", "zh-Hans", "zh-Hant"],
  ["空はなぜ青いのですか", "zh-Hant", "ja"],
  ["コンピューター", "en", "ja"],
  ["山水", "zh-Hant", "zh-Hant"],
  ["山水", "ja", "ja"],
  ["山水", "en", null],
  ["Why is the sky blue?", "zh-Hans", "en"],
  ["The word 水 is what it is", "en", null],
  ["Pourquoi le ciel est-il bleu ?", "en", null],
  ["하늘은 왜 파란가요?", "en", null],
  ["用 Python 写一个函数 def f(x): return x", "en", "zh-Hans"],
  ["42", "en", null],
  ["", "en", null],
]) {
  test(`${JSON.stringify(text)} on a page in ${page}`, () => assert.equal(guessLanguage(text, page), language));
}
