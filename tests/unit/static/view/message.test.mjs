// SPDX-License-Identifier: Apache-2.0
/** What became of a message in words, and what can be done about it. */
import assert from "node:assert/strict";
import { test } from "node:test";

import en from "../../../../static/strings/en.js";
import { actionsOf, errorWords, noteOf, secondsUntil } from "../../../../static/view/message.js";

const LAST = { isLast: true, canAsk: true };
const OLDER = { isLast: false, canAsk: true };
const BUSY = { isLast: true, canAsk: false };

function message(role, status, text = "x", error = null) {
  return { role, status, text, error };
}

for (const [name, given, place, actions, note] of [
  ["a finished answer", message("assistant", "done"), LAST, ["copy", "regenerate"], ""],
  ["one before the last", message("assistant", "done"), OLDER, ["copy"], ""],
  ["while another runs", message("assistant", "done"), BUSY, ["copy"], ""],
  ["a running answer", message("assistant", "streaming"), BUSY, [], ""],
  ["an empty answer", message("assistant", "done", ""), LAST, ["regenerate"], en.emptyAnswer],
  ["a cut answer", message("assistant", "cut"), LAST, ["copy", "regenerate", "continue"], en.cut],
  ["one at its greatest length", message("assistant", "limit"), LAST, ["copy", "regenerate", "continue"], en.limit],
  ["a stopped answer", message("assistant", "stopped"), LAST, ["copy", "regenerate"], en.stopped],
  ["a failed one", message("assistant", "failed", "", { code: "queue_full" }), LAST, ["retry"], en.errors.queue_full],
  ["a question that waits", message("user", "queued"), { isLast: false, canAsk: false }, [], en.queued],
  ["a question without an answer", message("user", "sent"), LAST, ["retry"], en.unanswered],
  ["a question with one", message("user", "sent"), OLDER, [], ""],
  ["a refused question", message("user", "failed", "x", { code: "expired" }), LAST, ["retry"], en.errors.expired],
]) {
  test(name, () => assert.deepEqual([actionsOf(given, place), noteOf(given, place, en)], [actions, note]));
}

test("an error we have no words for says the server's own", () => {
  assert.equal(errorWords({ code: "odd", message: "the moon is full" }, en), "That did not work: the moon is full");
  assert.equal(errorWords({ code: "odd", message: "" }, en), "That did not work: odd");
});

test("seconds are told whole and never below none", () => {
  assert.deepEqual([secondsUntil(1_001, 0), secondsUntil(500, 1_000), secondsUntil(null, 0)], [2, 0, 0]);
});
