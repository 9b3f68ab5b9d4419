// SPDX-License-Identifier: Apache-2.0
/** Server events become messages: in order, once, and whole, whatever is lost or doubled on the way. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { Transcript, errorOf } from "../../../static/transcript.js";
import { response } from "./events.mjs";

/** A transcript that waits for an answer under the key "a". */
function waiting() {
  const transcript = new Transcript();
  transcript.add({ key: "a", role: "assistant", status: "waiting", at: 0 });
  transcript.expect("a");
  return transcript;
}

function applied(transcript, events) {
  for (const event of events) transcript.apply(event);
  return transcript.find("a");
}

const EVENTS = () => response(null, ["Hel", "lo ", "you"]);

test("an answer grows and ends", () => {
  const transcript = waiting();
  const events = EVENTS();
  assert.equal(applied(transcript, events.slice(0, 5)).text, "Hello ");
  assert.equal(transcript.last.status, "streaming");
  const message = applied(transcript, events.slice(5));
  assert.deepEqual([message.text, message.status, message.itemId], ["Hello you", "done", "srv_1"]);
  assert.equal(transcript.numRepairs, 0);
});

test("an event that comes twice counts once", () => {
  for (const [index, event] of EVENTS().entries()) {
    const transcript = waiting();
    const events = EVENTS();
    events.splice(index, 1, event, event);
    assert.equal(applied(transcript, events).text, "Hello you");
    assert.equal(transcript.numRepairs, 0);
  }
});

test("a piece that is lost, doubled or out of order is mended by the whole", () => {
  for (const change of [
    (events) => events.splice(4, 1),
    (events) => events.splice(4, 0, { ...events[4], event_id: "other" }),
    (events) => events.splice(3, 2, events[4], events[3]),
  ]) {
    const transcript = waiting();
    const events = EVENTS();
    change(events);
    const message = applied(transcript, events);
    assert.deepEqual([message.text, message.status, transcript.numRepairs], ["Hello you", "done", 1]);
  }
});

test("a piece after the whole is no part of it", () => {
  const transcript = waiting();
  const events = EVENTS();
  applied(transcript, events.slice(0, 7));
  assert.equal(applied(transcript, [{ ...events[4], event_id: "late" }]).text, "Hello you");
});

test("events of a response that nobody here asked for change nothing", () => {
  const transcript = waiting();
  applied(transcript, EVENTS());
  const before = structuredClone(transcript.messages);
  applied(transcript, response(null, ["ghost"], { id: "resp_2" }));
  applied(transcript, response({ response: { metadata: { message: "z" } } }, ["ghost"], { id: "resp_3" }));
  assert.deepEqual(transcript.messages, before);
});

test("metadata names the message, and without it the next response is the expected one", () => {
  const transcript = waiting();
  transcript.expect(null);
  const message = applied(transcript, response({ response: { metadata: { message: "a" } } }, ["x"]));
  assert.equal(message.text, "x");
});

test("how a response ended is how the message did", () => {
  for (const [ending, status] of [
    [{ status: "cancelled", reason: "client_cancelled" }, "stopped"],
    [{ status: "cancelled", reason: "turn_detected" }, "stopped"],
    [{ status: "incomplete", reason: "max_output_tokens" }, "limit"],
    [{ status: "incomplete", reason: "content_filter" }, "filtered"],
    [{ status: "failed", error: { code: "engine_error", message: "no" } }, "failed"],
    [{ status: "sideways" }, "failed"],
  ]) {
    const message = applied(waiting(), response(null, ["x"], ending));
    assert.equal(message.status, status);
    assert.equal(message.error?.code ?? null, status === "failed" ? (ending.error?.code ?? "internal_error") : null);
  }
});

test("several parts are paragraphs of one answer, in the order they came", () => {
  const transcript = waiting();
  const events = EVENTS();
  const second = { ...events[3], event_id: "p2", content_index: 1, delta: "more" };
  const message = applied(transcript, [...events.slice(0, 6), second, ...events.slice(6)]);
  assert.equal(message.text, "Hello you\n\nmore");
});

test("an answer ended from our side hears no more", () => {
  const transcript = waiting();
  const events = EVENTS();
  applied(transcript, events.slice(0, 5));
  transcript.end("a", "cut");
  const message = applied(transcript, events.slice(5));
  assert.deepEqual([message.text, message.status], ["Hello ", "cut"]);
  transcript.end("a", "failed");
  assert.equal(message.status, "cut");
});

test("after a lost session its response is over, and its ids may come again", () => {
  const transcript = waiting();
  const events = EVENTS();
  applied(transcript, events.slice(0, 4));
  transcript.forgetResponses();
  transcript.expect("a");
  assert.equal(applied(transcript, events).text, "Hello you");
});

test("each change shows in the version, and nothing else does", () => {
  const transcript = waiting();
  const events = EVENTS();
  const versions = events.map((event) => (transcript.apply(event), transcript.last.version));
  assert.deepEqual(versions, [0, 1, 1, 2, 3, 4, 5, 5, 5, 6]);
});

test("an error keeps its wait as a time", () => {
  assert.deepEqual(errorOf({ code: "queue_full", message: "m", retry_after_ms: 500 }, 1_000), {
    code: "queue_full",
    message: "m",
    retryAt: 1_500,
  });
  assert.deepEqual(errorOf(undefined), { code: "internal_error", message: "", retryAt: null });
});
