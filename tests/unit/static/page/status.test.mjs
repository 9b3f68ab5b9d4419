// SPDX-License-Identifier: Apache-2.0
/** The connection in words: a word always, a banner only for trouble that lasts. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { PATIENCE_MS, describe } from "../../../../static/page/status.js";
import en from "../../../../static/strings/en.js";

const LOST = { state: "waiting", closeCode: 1006, retryAt: 13_000, troubledSince: 10_000 };

test("connected, there is a word and no more", () => {
  const open = { state: "open", closeCode: null, retryAt: null, troubledSince: null };
  assert.deepEqual(describe(open, null, 0, en), { word: en.online, banner: null, changesAt: null });
});

test("trouble that mends itself soon is not mentioned", () => {
  const early = describe(LOST, null, 10_000 + PATIENCE_MS - 1, en);
  assert.deepEqual(early, { word: en.reconnecting, banner: null, changesAt: 10_000 + PATIENCE_MS });
});

test("trouble that lasts says why and when, and is asked for again", () => {
  const late = describe(LOST, null, 12_000, en);
  assert.deepEqual(late.banner, { text: `${en.lost} Next try in 1 s.`, action: en.tryNow });
  assert.equal(late.changesAt, 12_500);
  assert.equal(describe({ ...LOST, state: "connecting", retryAt: null }, null, 13_000, en).banner.text, `${en.lost} ${en.connecting}`);
});

test("a restart and a full house have words of their own", () => {
  for (const [closeCode, words] of [[1012, en.restarting], [1013, en.busy]]) {
    assert.ok(describe({ ...LOST, closeCode }, null, 12_500, en).banner.text.startsWith(words));
  }
});

test("the very first connection is only on its way", () => {
  const first = { state: "connecting", closeCode: null, retryAt: null, troubledSince: 0 };
  assert.deepEqual(describe(first, null, 9_000, en), { word: en.connecting, banner: null, changesAt: null });
});

test("offline is said after a while, with a way to try", () => {
  const offline = { state: "offline", closeCode: 1006, retryAt: null, troubledSince: 0 };
  assert.equal(describe(offline, null, 1, en).banner, null);
  assert.deepEqual(describe(offline, null, 5_000, en).banner, { text: en.youAreOffline, action: en.tryNow });
});

test("an end is said at once, with the server's reason where it gave one", () => {
  const stopped = { state: "stopped", closeCode: 4500, retryAt: null, troubledSince: 0 };
  assert.equal(describe(stopped, null, 0, en).banner.text, en.closed);
  assert.equal(describe({ ...stopped, closeCode: 4505 }, null, 0, en).banner.text, en.closedOrigin);
  const notice = { code: "model_not_found", message: "" };
  assert.equal(describe(stopped, notice, 0, en).banner.text, en.errors.model_not_found);
});
