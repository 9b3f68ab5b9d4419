// SPDX-License-Identifier: Apache-2.0
/** What is sent to a session, and what becomes of a turn when sessions come and go. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { Conversation, LIMITS } from "../../../static/conversation.js";
import { SESSION, failure, response, sessionCreated } from "./events.mjs";

function conversation(options = {}) {
  let numIds = 0;
  return new Conversation({ newId: (prefix) => `${prefix}_${(numIds += 1)}`, ...options });
}

function connected(options) {
  const made = conversation(options);
  made.receive(sessionCreated(), 0);
  return made;
}

function receive(made, events, now = 0) {
  return events.flatMap((event) => made.receive(event, now));
}

/** Answer the last frame of a turn. */
function answer(made, frames, pieces, ending) {
  return receive(made, response(frames.at(-1), pieces, ending));
}

function types(frames) {
  return frames.map((frame) => frame.type.replace("conversation.", ""));
}

function shown(made) {
  return made.messages.map(({ role, text, status }) => [role, text, status]);
}

function said(text, role, status, extra = {}) {
  return { key: `k_${text}`, itemId: `k_${text}`, role, text, status, at: 0, ...extra };
}

const PAST = [said("q1", "user", "sent"), said("a1", "assistant", "done", { itemId: "srv_a1" })];

test("a question is an item and a request, each with an id of its own", () => {
  const made = connected();
  const frames = made.send("Hi", 1);
  assert.deepEqual(types(frames), ["item.create", "response.create"]);
  assert.deepEqual(frames[0].item, {
    id: "item_1",
    type: "message",
    role: "user",
    content: [{ type: "input_text", text: "Hi" }],
  });
  assert.deepEqual(frames[1].response, { metadata: { message: "item_2" } });
  assert.equal(new Set(frames.map((frame) => frame.event_id)).size, 2);
  assert.equal(made.phase, "asked");
  assert.equal(made.canSend, false);
  assert.deepEqual(made.send("and?", 2), []);
});

test("the second question goes alone: the session knows the rest", () => {
  const made = connected();
  answer(made, made.send("one", 0), ["first"]);
  assert.equal(made.phase, "idle");
  assert.deepEqual(types(made.send("two", 1)), ["item.create", "response.create"]);
});

test("a question without a session waits for one, alone, and is asked there after the past", () => {
  const made = conversation({ messages: PAST });
  assert.deepEqual(made.send("q2", 1_000), []);
  assert.equal(made.phase, "queued");
  assert.equal(made.canSend, false);
  const frames = made.receive(sessionCreated(), 2_000);
  assert.deepEqual(
    frames.slice(0, -1).map(({ item }) => [item.id, item.role, item.content[0].type, item.content[0].text]),
    [
      ["k_q1", "user", "input_text", "q1"],
      ["srv_a1", "assistant", "output_text", "a1"],
      ["item_1", "user", "input_text", "q2"],
    ],
  );
  assert.equal(frames.at(-1).type, "response.create");
});

test("a session that is only there is told nothing", () => {
  assert.deepEqual(conversation({ messages: PAST }).receive(sessionCreated(), 0), []);
});

test("a question that waited too long is not asked behind one's back", () => {
  const made = conversation();
  made.send("old", 0);
  assert.deepEqual(made.receive(sessionCreated(), LIMITS.queuedMsMax + 1), []);
  assert.deepEqual(shown(made), [["user", "old", "failed"]]);
  assert.equal(made.messages[0].error.code, "expired");
  assert.deepEqual(types(made.regenerate(LIMITS.queuedMsMax + 2)), ["item.create", "response.create"]);
  assert.equal(made.messages[0].error, null);
});

test("of a long past the newest is told, and the question always", () => {
  const many = Array.from({ length: 100 }, (_, n) => said(`q${n}`, n % 2 ? "assistant" : "user", n % 2 ? "done" : "sent"));
  const made = connected({ messages: many });
  const frames = made.send("now", 0);
  assert.equal(frames.length, LIMITS.replayItemsMax + 1);
  assert.equal(frames[0].item.content[0].text, `q${100 - LIMITS.replayItemsMax + 1}`);
  const large = connected({ messages: [said("x".repeat(30_000), "user", "sent")] });
  assert.deepEqual(types(large.send("y".repeat(15_000), 0)), ["item.create", "response.create"]);
});

test("cut at every frame, there is one answer in the end, and no piece of it twice", () => {
  const pieces = Array.from({ length: 60 }, (_, n) => `w${n} `);
  for (let cut = 0; cut <= pieces.length + 6; cut += 1) {
    const made = connected();
    const frames = made.send("q", 0);
    receive(made, response(frames.at(-1), pieces).slice(0, cut));
    made.disconnected(1);
    const text = made.messages[1].text;
    assert.ok(pieces.join("").startsWith(text));
    let next = made.receive(sessionCreated(), 2);
    if (text === "") {
      assert.deepEqual(types(next), ["item.create", "response.create"], "unheard, it is asked again by itself");
    } else {
      assert.deepEqual([made.messages[1].status, next], ["cut", []], "heard, the reader decides");
      next = made.regenerate(3);
    }
    answer(made, next, pieces, { id: "resp_2", itemId: "srv_2" });
    assert.deepEqual(shown(made), [
      ["user", "q", "sent"],
      ["assistant", pieces.join(""), "done"],
    ]);
  }
});

test("a question under which sessions die is not asked for ever", () => {
  const made = connected();
  made.send("poison", 0);
  for (let ask = 1; ask < LIMITS.asksMax; ask += 1) {
    made.disconnected(ask);
    assert.equal(made.receive(sessionCreated(), ask).at(-1).type, "response.create");
  }
  made.disconnected(9);
  assert.equal(made.phase, "idle");
  assert.equal(made.messages[1].error.code, "connection_lost");
});

test("stop asks the server, and the answer keeps what came", () => {
  const made = connected();
  const frames = made.send("q", 0);
  const events = response(frames.at(-1), ["par", "tial"], { status: "cancelled", reason: "client_cancelled" });
  receive(made, events.slice(0, 4));
  const { frames: stop, takenBack } = made.stop();
  assert.deepEqual([types(stop), stop[0].response_id, takenBack], [["response.cancel"], "resp_1", null]);
  assert.equal(made.phase, "stopping");
  assert.deepEqual(made.stop().frames, []);
  receive(made, events.slice(4));
  assert.deepEqual(shown(made)[1], ["assistant", "partial", "stopped"]);
  assert.equal(made.phase, "idle");
});

test("stop before the response began names none, and an answer without a word leaves nothing", () => {
  const made = connected();
  const frames = made.send("q", 0);
  assert.equal("response_id" in made.stop().frames[0], false);
  answer(made, frames, [], { status: "cancelled", reason: "client_cancelled" });
  assert.deepEqual(shown(made), [["user", "q", "sent"]]);
  const next = made.send("q2", 1);
  assert.deepEqual(types(next), ["item.delete", "item.create", "response.create"]);
  assert.equal(next[0].item_id, "srv_1");
});

test("stop of a question that only waited gives it back", () => {
  const made = conversation();
  made.send("q", 0);
  assert.deepEqual(made.stop(), { frames: [], takenBack: "q" });
  assert.deepEqual([made.messages, made.phase], [[], "idle"]);
});

test("a session lost while stopping counts as stopped", () => {
  const made = connected();
  const frames = made.send("q", 0);
  receive(made, response(frames.at(-1), ["a", "b"]).slice(0, 5));
  made.stop();
  made.disconnected(1);
  assert.deepEqual(shown(made)[1], ["assistant", "ab", "stopped"]);
});

test("another answer unsays the last one first", () => {
  const made = connected();
  answer(made, made.send("q", 0), ["bad"]);
  const frames = made.regenerate(1);
  assert.deepEqual(types(frames), ["item.delete", "response.create"]);
  assert.equal(frames[0].item_id, "srv_1");
  answer(made, frames, ["good"], { id: "resp_2", itemId: "srv_2" });
  assert.deepEqual(shown(made)[1], ["assistant", "good", "done"]);
  assert.equal(made.messages.length, 2);
  const again = made.regenerate(2);
  assert.deepEqual(again.map((frame) => frame.item_id), ["srv_2", undefined], "each is unsaid once");
});

test("there is no other answer without a question, nor while one runs", () => {
  assert.deepEqual(connected().regenerate(0), []);
  const made = connected();
  made.send("q", 0);
  assert.deepEqual(made.regenerate(1), []);
});

test("a refused request fails the answer, with its wait; it may be asked again", () => {
  const made = connected();
  const frames = made.send("q", 0);
  made.receive(failure({ code: "queue_full", retry_after_ms: 3_000 }, frames.at(-1).event_id), 1_000);
  assert.deepEqual(shown(made)[1], ["assistant", "", "failed"]);
  assert.equal(made.messages[1].error.retryAt, 4_000);
  assert.deepEqual(types(made.regenerate(5_000)), ["response.create"]);
});

test("an answer that failed before its first word goes when the talk goes on", () => {
  const made = connected();
  const frames = made.send("q", 0);
  answer(made, frames, [], { status: "failed", error: { code: "engine_error", message: "no" } });
  assert.equal(made.messages[1].error.code, "engine_error");
  made.send("other", 1);
  assert.deepEqual(shown(made).map(([, text]) => text), ["q", "other", ""]);
});

test("a refused question is marked, its answer is called off, and it is not told again", () => {
  const made = connected();
  const frames = made.send("too long", 0);
  assert.deepEqual(types(made.receive(failure({ code: "payload_too_large" }, frames[0].event_id), 1)), ["response.cancel"]);
  assert.deepEqual(shown(made), [["user", "too long", "failed"]]);
  answer(made, frames, ["nobody asked"]);
  assert.equal(made.messages.length, 1);
  const next = made.send("short", 2);
  assert.deepEqual(next.filter(({ item }) => item).map(({ item }) => item.content[0].text), ["short"]);
});

test("an old message that a session refuses does not stop the question", () => {
  const made = connected({ messages: PAST });
  const frames = made.send("q2", 0);
  assert.deepEqual(made.receive(failure({ code: "payload_too_large" }, frames[0].event_id), 1), []);
  answer(made, frames, ["fine"]);
  assert.deepEqual(shown(made).slice(2), [
    ["user", "q2", "sent"],
    ["assistant", "fine", "done"],
  ]);
});

test("a request that comes while a response runs is asked once that is over", () => {
  const made = connected();
  const frames = made.send("q", 0);
  made.receive(failure({ code: "conversation_already_has_active_response" }, frames.at(-1).event_id), 1);
  assert.equal(made.phase, "queued");
  const next = receive(made, response(null, ["foreign"], { id: "resp_0" }));
  assert.deepEqual(types(next), ["response.create"]);
  answer(made, next, ["ours"]);
  assert.deepEqual(shown(made)[1], ["assistant", "ours", "done"]);
});

test("a server about to restart leaves the question for the next session", () => {
  const made = connected();
  const frames = made.send("q", 0);
  made.receive(failure({ code: "server_draining" }, frames.at(-1).event_id), 1);
  made.receive(failure({ code: "server_draining" }), 2);
  made.disconnected(3);
  assert.deepEqual(types(made.receive(sessionCreated(), 4)), ["item.create", "response.create"]);
});

test("a full conversation begins a new session, once", () => {
  const made = connected();
  const frames = made.send("q", 0);
  made.receive(failure({ code: "conversation_full" }, frames[0].event_id), 1);
  assert.deepEqual([made.takeRestart(), made.takeRestart()], [true, false]);
  assert.equal(made.phase, "queued");
});

test("an error that names no event is about the question that hangs, else a notice", () => {
  const made = connected();
  made.send("q", 0);
  made.receive(failure({ code: "engine_unavailable" }), 1);
  assert.equal(made.messages[1].error.code, "engine_unavailable");
  assert.equal(made.notice, null);
  made.receive(failure({ code: "model_not_found" }), 2);
  assert.equal(made.notice.code, "model_not_found");
  made.receive(sessionCreated(), 3);
  assert.equal(made.notice, null);
});

test("errors of little frames change nothing", () => {
  const made = connected();
  answer(made, made.send("q", 0), ["a"]);
  const [gone] = made.regenerate(1);
  const before = structuredClone(made.messages);
  made.receive(failure({ code: "item_not_found" }, gone.event_id), 2);
  made.receive(failure({ code: "response_cancel_not_active" }, made.probe()[0].event_id), 3);
  assert.deepEqual([made.messages, made.phase, made.notice], [before, "asked", null]);
});

test("settings are sent where they differ from the server's own, and back to those", () => {
  const made = conversation({ settings: { instructions: "Be kind.", temperature: null } });
  const [update] = made.receive(sessionCreated(), 0);
  assert.deepEqual(update.session, {
    type: "realtime",
    output_modalities: ["text"],
    instructions: "Be kind.",
    temperature: SESSION.temperature,
  });
  made.receive({ type: "session.updated", session: { ...SESSION, instructions: "Be kind." } }, 0);
  assert.deepEqual(made.configure({ instructions: "Be kind." }), []);
  assert.equal(made.configure({ instructions: null })[0].session.instructions, "");
  assert.deepEqual(conversation().configure({ temperature: 0.1 }), []);
});

test("a server without a temperature is not told one unless it is chosen", () => {
  const { temperature: _, ...plain } = SESSION;
  const made = conversation({ settings: { instructions: "x" } });
  const [update] = made.receive(sessionCreated(plain), 0);
  assert.equal("temperature" in update.session, false);
});

test("cleared, it is empty, and a session that knew something is given up", () => {
  const made = connected();
  made.clear();
  assert.equal(made.takeRestart(), false);
  const frames = made.send("q", 0);
  made.clear();
  assert.deepEqual([made.messages, made.phase, made.takeRestart()], [[], "idle", true]);
  answer(made, frames, ["late"]);
  assert.deepEqual(made.messages, []);
});

test("what a store kept under way is not under way any more", () => {
  const made = conversation({
    messages: [
      ...PAST,
      said("q2", "user", "sent"),
      said("half", "assistant", "streaming"),
      said("q3", "user", "queued"),
      { ...said("", "assistant", "waiting"), key: "w" },
    ],
  });
  assert.deepEqual(shown(made).slice(2), [
    ["user", "q2", "sent"],
    ["assistant", "half", "cut"],
    ["user", "q3", "failed"],
  ]);
});

test("blank messages are none", () => {
  assert.deepEqual(connected().send(" \n ", 0), []);
});
