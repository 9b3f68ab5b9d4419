// SPDX-License-Identifier: Apache-2.0
/** What a browser keeps comes back as it was, or not at all. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { LIMITS, Store } from "../../../../static/page/store.js";

class FakeStorage {
  constructor() {
    this.items = new Map();
  }
  getItem(name) {
    return this.items.get(name) ?? null;
  }
  setItem(name, value) {
    this.items.set(name, value);
  }
  removeItem(name) {
    this.items.delete(name);
  }
}

function said(number, text = "x") {
  return { key: `k${number}`, itemId: `i${number}`, role: "user", text, status: "sent", at: number };
}

test("a conversation comes back without its errors and versions", () => {
  const store = new Store(new FakeStorage(), new FakeStorage());
  store.saveMessages([{ ...said(1), error: { code: "x" }, version: 7 }]);
  assert.deepEqual(store.loadMessages(), [said(1)]);
});

test("a tab keeps its own, and a new tab begins with the newest", () => {
  const local = new FakeStorage();
  const [first, second] = [new Store(local, new FakeStorage()), new Store(local, new FakeStorage())];
  first.saveMessages([said(1)]);
  second.saveMessages([said(2)]);
  assert.equal(first.loadMessages()[0].key, "k1");
  assert.equal(new Store(local, new FakeStorage()).loadMessages()[0].key, "k2");
});

test("an empty conversation leaves nothing behind", () => {
  const local = new FakeStorage();
  const store = new Store(local, new FakeStorage());
  store.saveMessages([said(1)]);
  store.saveMessages([]);
  assert.equal(local.items.size, 0);
});

test("no more than the limits is kept, the newest first", () => {
  const store = new Store(new FakeStorage(), new FakeStorage());
  store.saveMessages(Array.from({ length: 500 }, (_, number) => said(number)));
  assert.deepEqual([store.loadMessages().length, store.loadMessages().at(-1).key], [LIMITS.messagesMax, "k499"]);
  store.saveMessages([said(1, "x".repeat(LIMITS.charsMax)), said(2)]);
  assert.deepEqual(store.loadMessages().map((message) => message.key), ["k2"]);
});

test("what somebody else wrote there is nothing", () => {
  const local = new FakeStorage();
  for (const kept of ["{", "null", "[]", '{"messages":1}', '{"messages":[null,{},{"key":"a"}]}', '{"messages":[{"role":"system"}]}']) {
    local.setItem("sampan.chat.1", kept);
    assert.deepEqual(new Store(local, new FakeStorage()).loadMessages(), []);
  }
  local.setItem("sampan.settings.1", '{"instructions":1,"temperature":"hot","language":[]}');
  assert.deepEqual(new Store(local, null).loadSettings(), { instructions: null, temperature: null, language: null });
});

test("a browser that keeps nothing is no error", () => {
  const refusing = new Proxy({}, { get: () => () => { throw new Error("refused"); } });
  for (const storage of [null, refusing]) {
    const store = new Store(storage, storage);
    store.saveMessages([said(1)]);
    store.saveSettings({ temperature: 1 });
    assert.deepEqual(store.loadMessages(), []);
    assert.equal(store.loadSettings().temperature, null);
  }
});

test("settings come back", () => {
  const store = new Store(new FakeStorage(), null);
  const settings = { instructions: "Be kind.", temperature: 0, language: "ja" };
  store.saveSettings(settings);
  assert.deepEqual(store.loadSettings(), settings);
});
