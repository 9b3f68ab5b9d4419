// SPDX-License-Identifier: Apache-2.0
/** One drawing a frame, and one without frames. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { FrameClock } from "../../../../static/view/frames.js";

function clock() {
  const pending = { frame: null, timer: null };
  let numDrawings = 0;
  const environment = {
    requestAnimationFrame: (run) => ((pending.frame = run), 1),
    cancelAnimationFrame: () => (pending.frame = null),
    setTimeout: (run) => ((pending.timer = run), 2),
    clearTimeout: () => (pending.timer = null),
  };
  const made = new FrameClock(() => (numDrawings += 1), environment);
  return { made, pending, drawn: () => numDrawings };
}

test("many tokens are one drawing, at the frame", () => {
  const { made, pending, drawn } = clock();
  for (let token = 0; token < 100; token += 1) made.schedule();
  assert.equal(drawn(), 0);
  pending.frame();
  assert.deepEqual([drawn(), pending.timer], [1, null]);
  made.schedule();
  pending.frame();
  assert.equal(drawn(), 2);
});

test("where no frame comes, the timer draws", () => {
  const { made, pending, drawn } = clock();
  made.schedule();
  pending.timer();
  assert.deepEqual([drawn(), pending.frame], [1, null]);
});
