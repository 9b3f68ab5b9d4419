// SPDX-License-Identifier: Apache-2.0
/** A reader who moved up is never moved; one at the end stays there. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { FollowRule } from "../../../../static/view/follow.js";

const CLIENT = 500;

/** A rule over `height` pixels, at the end. */
function atEnd(height = 2_000) {
  const rule = new FollowRule();
  rule.jumped();
  rule.place({ top: 0, height, client: CLIENT }, null);
  rule.scrolled({ top: height - CLIENT, height, client: CLIENT });
  return rule;
}

test("at the end it stays at the end, as content and window change", () => {
  const rule = atEnd();
  assert.equal(rule.place({ top: 1_500, height: 2_100, client: CLIENT }, null), 1_600);
  rule.scrolled({ top: 1_600, height: 2_100, client: CLIENT });
  assert.equal(rule.place({ top: 1_600, height: 2_100, client: 300 }, null), 1_800);
});

test("it begins where it is", () => {
  assert.equal(new FollowRule().place({ top: 0, height: 2_000, client: CLIENT }, null), null);
});

test("where it is already, it does not scroll", () => {
  assert.equal(atEnd().place({ top: 1_500, height: 2_000, client: CLIENT }, null), null);
});

test("a wheel or finger upwards stops it before anything has moved", () => {
  const rule = atEnd();
  rule.movedUp();
  assert.equal(rule.place({ top: 1_500, height: 2_100, client: CLIENT }, null), null);
});

test("up by a few pixels is up, though the end is still near", () => {
  const rule = atEnd();
  rule.movedUp();
  rule.scrolled({ top: 1_490, height: 2_000, client: CLIENT });
  assert.equal(rule.mode, "free");
  assert.equal(rule.place({ top: 1_490, height: 2_050, client: CLIENT }, null), null);
});

test("a scroll bar drawn up stops it", () => {
  const rule = atEnd();
  rule.scrolled({ top: 1_200, height: 2_000, client: CLIENT });
  assert.equal(rule.mode, "free");
});

test("a smaller top from a taller window or content is nobody's will", () => {
  for (const size of [
    { top: 1_300, height: 2_000, client: 700 },
    { top: 1_400, height: 2_100, client: CLIENT },
  ]) {
    const rule = atEnd();
    rule.scrolled(size);
    assert.equal(rule.mode, "pinned");
  }
});

test("scrolled down to the end again, it follows again", () => {
  const rule = atEnd();
  rule.scrolled({ top: 800, height: 2_000, client: CLIENT });
  rule.scrolled({ top: 1_000, height: 2_000, client: CLIENT });
  assert.equal(rule.mode, "free");
  rule.scrolled({ top: 1_490, height: 2_000, client: CLIENT });
  assert.equal(rule.place({ top: 1_490, height: 2_200, client: CLIENT }, null), 1_700);
});

test("what the reader sent is followed until the answer's first line is at the top", () => {
  const rule = atEnd();
  rule.movedUp();
  rule.sent();
  assert.equal(rule.place({ top: 1_000, height: 2_100, client: CLIENT }, 1_800), 1_600);
  rule.scrolled({ top: 1_600, height: 2_100, client: CLIENT });
  assert.equal(rule.place({ top: 1_600, height: 2_400, client: CLIENT }, 1_800), 1_788);
  rule.scrolled({ top: 1_788, height: 2_400, client: CLIENT });
  assert.equal(rule.mode, "free");
  assert.equal(rule.place({ top: 1_788, height: 3_000, client: CLIENT }, 1_800), null);
  assert.equal(rule.isNearEnd, false);
});

test("asked for, the end stays in view however long the answer grows", () => {
  const rule = atEnd();
  rule.jumped();
  assert.equal(rule.place({ top: 1_788, height: 3_000, client: CLIENT }, 1_800), 2_500);
  assert.equal(rule.place({ top: 2_500, height: 3_100, client: CLIENT }, 1_800), 2_600);
});

test("where all is in view there is no up", () => {
  const rule = new FollowRule();
  rule.jumped();
  rule.place({ top: 0, height: 400, client: CLIENT }, null);
  rule.movedUp();
  assert.equal(rule.mode, "pinned");
});
