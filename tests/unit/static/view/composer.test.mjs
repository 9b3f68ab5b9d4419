// SPDX-License-Identifier: Apache-2.0
/** Only a plain Enter outside a composition sends, in every browser's order of events. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { keyAction } from "../../../../static/view/composer.js";

const PLAIN = { key: "Enter", keyCode: 13, isComposing: false, shiftKey: false, altKey: false, repeat: false };

for (const [name, event, action] of [
  ["a plain Enter sends", {}, "send"],
  ["the number pad's too", { code: "NumpadEnter" }, "send"],
  ["with Control or Command as well", { ctrlKey: true, metaKey: true }, "send"],
  ["Shift and Enter is a new line", { shiftKey: true }, "ignore"],
  ["Alt and Enter is the browser's", { altKey: true }, "ignore"],
  ["an Enter that is held down sends once", { repeat: true }, "swallow"],
  ["Chromium's order: the Enter that confirms is composing", { isComposing: true, keyCode: 229 }, "ignore"],
  ["Safari's order: it comes after the composition, with 229", { isComposing: false, keyCode: 229 }, "ignore"],
  ["composing with the plain code", { isComposing: true }, "ignore"],
  ["a Process key", { key: "Process", keyCode: 229 }, "ignore"],
  ["Shift and a composing Enter", { shiftKey: true, isComposing: true, keyCode: 229 }, "ignore"],
  ["any other key", { key: "a", keyCode: 65 }, "ignore"],
]) {
  test(name, () => assert.equal(keyAction({ ...PLAIN, ...event }), action));
}
