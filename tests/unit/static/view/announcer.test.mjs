// SPDX-License-Identifier: Apache-2.0
/** What is read out: whole sentences, each once, without marks. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { Announcer, sentenceEnd, speech } from "../../../../static/view/announcer.js";

const WORDS = { codeBlock: "Code" };

for (const [text, from, end] of [
  ["One. Two", 0, 4],
  ["One.", 0, 0],
  ["3.14 is pi", 0, 0],
  ["好。再来", 0, 2],
  ["ja!? no", 0, 4],
  ["line\nnext", 0, 5],
  ["One. Two. Three", 5, 9],
  ["a.\n```js\nlet a = 1;\nlet b", 0, 3],
  ["a.\n```js\nlet a;\n```\nso. b", 0, 23],
]) {
  test(`the last whole sentence of ${JSON.stringify(text)} from ${from}`, () => {
    assert.equal(sentenceEnd(text, from), end);
  });
}

test("speech has the words and not the marks", () => {
  assert.equal(speech("**Hi**, see [this](https://x.example).", WORDS), "Hi, see thisx.example.");
  assert.equal(speech("- one\n- two\n\n> three", WORDS), "one two three");
  assert.equal(speech("So:\n\n```js\nlet a = 1;\n```", WORDS), "So: Code.");
});

/** A document and a clock, as far as an announcer needs them. */
function announcer() {
  const environment = { time: 0, timers: [], performance: { now: () => environment.time } };
  environment.setTimeout = (run) => environment.timers.push(run);
  const made = (tag) => ({
    tag,
    kids: [],
    ownerDocument: document,
    setAttribute() {},
    append(...kids) {
      for (const kid of kids) this.kids.push(kid);
      for (const kid of kids) if (kid.tag) kid.remove = () => this.kids.splice(this.kids.indexOf(kid), 1);
    },
  });
  const document = { createElement: made };
  const reader = new Announcer(document, environment);
  reader.words = WORDS;
  return { reader, environment, heard: () => reader.element.kids.map((line) => line.kids[0]) };
}

test("an answer is read sentence by sentence, with a pause, and its end at once", () => {
  const { reader, environment, heard } = announcer();
  reader.start("a");
  reader.follow("a", "One. Tw", false);
  reader.follow("a", "One. Two. Th", false);
  assert.deepEqual(heard(), ["One."]);
  environment.time = 2_000;
  reader.follow("a", "One. Two. Th", false);
  reader.follow("a", "One. Two. Three", true);
  assert.deepEqual(heard(), ["One.", "Two.", "Three"]);
  reader.follow("a", "One. Two. Three", true);
  assert.equal(heard().length, 3);
});

test("what was read leaves the region", () => {
  const { reader, environment, heard } = announcer();
  reader.say("hello");
  reader.say("");
  assert.deepEqual(heard(), ["hello"]);
  for (const run of environment.timers) run();
  assert.deepEqual(heard(), []);
});

test("only the answer that began is read, and not what it held before", () => {
  const { reader, heard } = announcer();
  reader.follow("old", "Long ago.", true);
  reader.start("a", "Known. ");
  reader.follow("a", "Known. New.", true);
  assert.deepEqual(heard(), ["New."]);
});
