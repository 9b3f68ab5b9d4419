// SPDX-License-Identifier: Apache-2.0
/**
 * One conversation over sessions that come and go: decides which frames to send. Pure.
 *
 * Owns the turn that is under way and what the server's present session knows. Invariant: at most one turn runs,
 * each question is asked once in each session, and a new session is told what it must know before it is asked. It
 * must never touch a socket, a clock or the page.
 *
 *     idle → queued (no session yet) → asked (response.create is sent) → answering → idle
 *                                          asked, answering → stopping → idle
 *     a lost session:  asked, or answering without a word → queued;  answering → idle, the answer is `cut`
 */
import { ENDED, Transcript, errorOf } from "./transcript.js";

export const LIMITS = Object.freeze({
  /** A longer message would not fit the server's frame of 64 KiB in every script. */
  messageCharsMax: 16_000,
  /** What a new session is told of the past: more than a small model reads. */
  replayItemsMax: 40,
  replayCharsMax: 32_000,
  /** A question that waited longer is not asked behind the person's back. */
  queuedMsMax: 300_000,
  /** A question whose sessions die under it is not asked for ever. */
  asksMax: 3,
});

/** Refusals after which the same question is asked again: in the next session, or when the way is free. */
const REQUEUE_CODES = new Set([
  "server_draining",
  "conversation_full",
  "conversation_already_has_active_response",
]);

export class Conversation {
  /** `newId(prefix)` draws an id; `messages` and `settings` are what a store kept. */
  constructor({ newId, messages = [], settings = {} }) {
    this.phase = "idle";
    this.settings = settings;
    this.session = null; // the server's description of the present session
    this.notice = null; // an error that belongs to no message
    this._newId = newId;
    this._transcript = new Transcript(messages.map(restored).filter((message) => message.text !== ""));
    this._defaults = null;
    this._known = new Set(); // ids of items the session has
    this._pending = new Map(); // event id → {kind, key}
    this._numEvents = 0;
    this._numAsks = 0;
    this._answerKey = null;
    this._wantsRestart = false;
  }

  get messages() {
    return this._transcript.messages;
  }

  /** The server's own settings, as the newest session began with them; null before the first. */
  get defaults() {
    return this._defaults;
  }

  /** Whether a question can be taken now; one may wait for a connection. */
  get canSend() {
    return this.phase === "idle";
  }

  /** Whether the session is to be given up for a new one; asked once, after any other call. */
  takeRestart() {
    const wanted = this._wantsRestart;
    this._wantsRestart = false;
    return wanted;
  }

  /** Say something. Returns frames. */
  send(text, now) {
    if (!this.canSend || text.trim() === "") return [];
    this._dropFailures();
    this._transcript.add({ key: this._newId("item"), role: "user", text, status: "queued", at: now });
    return this._ask(now);
  }

  /** Ask for the last answer again: after an error, a cut, a stop, or because the reader wants another. */
  regenerate(now) {
    if (!this.canSend) return [];
    const last = this._transcript.last;
    if (last?.role === "assistant") this._transcript.remove(last.key);
    const question = this._transcript.last;
    if (question?.role !== "user") return [];
    this._transcript.change(question, { at: now, error: null, status: "queued" });
    return this._ask(now);
  }

  /** Stop the answer. A question that was not asked yet is taken back; its text is returned in `takenBack`. */
  stop() {
    if (this.phase === "queued") {
      const question = this._question();
      this._transcript.remove(this._answerKey);
      this._transcript.remove(question.key);
      this._turnOver();
      return { frames: [], takenBack: question.text };
    }
    if (this.phase !== "asked" && this.phase !== "answering") return { frames: [], takenBack: null };
    this.phase = "stopping";
    const responseId = this._transcript.responseOf(this._answerKey);
    const named = responseId === undefined ? {} : { response_id: responseId };
    return { frames: [this._frame("cancel", null, { type: "response.cancel", ...named })], takenBack: null };
  }

  /** Change the instructions or the temperature; null is the server's own. */
  configure(settings) {
    this.settings = { ...this.settings, ...settings };
    return this.session === null ? [] : this._settingsFrames();
  }

  /** Forget everything, and let the server forget it. */
  clear() {
    this._wantsRestart = this._known.size > 0;
    this._transcript = new Transcript();
    this.notice = null;
    this._turnOver();
  }

  /** Any frame the server answers, to see whether it is there. */
  probe() {
    return [this._frame("probe", null, { type: "session.update", session: { type: "realtime" } })];
  }

  /** The session is lost. */
  disconnected(now) {
    if (this.session === null && this._pending.size === 0) return;
    this.session = null;
    this._known.clear();
    this._pending.clear();
    this._transcript.forgetResponses();
    if (this.phase === "queued" || this.phase === "idle") return;
    const { text } = this._transcript.find(this._answerKey);
    if (this.phase === "stopping") this._end("stopped");
    else if (text !== "") this._end("cut");
    else this._requeue({ code: "connection_lost" }, now);
  }

  /** Take one server event; returns frames. */
  receive(event, now) {
    if (event.type === "session.created") return this._connected(event.session, now);
    if (event.type === "session.updated") this.session = event.session ?? this.session;
    if (event.type === "error") return this._failed(event.error ?? {}, now);
    const ended = this._transcript.apply(event);
    if (this.phase === "asked" && this._transcript.responseOf(this._answerKey) !== undefined) {
      this.phase = "answering";
    }
    if (ended) this._ended(ended, event.response.status_details?.error, now);
    else if (event.type === "response.done" && this.phase === "queued") return this._turnFrames();
    return [];
  }

  _connected(session, now) {
    this.session = session;
    this.notice = null;
    this._defaults = session;
    const frames = this._settingsFrames();
    if (this.phase !== "queued") return frames;
    const question = this._question();
    if (now - question.at <= LIMITS.queuedMsMax) return [...frames, ...this._turnFrames()];
    this._transcript.change(question, { status: "failed", error: errorOf({ code: "expired" }) });
    this._end("stopped");
    return frames;
  }

  /** What differs from the server's own settings. */
  _settingsFrames() {
    const { instructions, temperature } = this.settings;
    const session = { type: "realtime", output_modalities: ["text"] };
    session.instructions = instructions ?? this._defaults?.instructions ?? "";
    const wanted = temperature ?? this._defaults?.temperature;
    if (Number.isFinite(wanted)) session.temperature = wanted;
    const isSame = ["instructions", "temperature"].every(
      (name) => session[name] === undefined || session[name] === (this.session[name] ?? ""),
    );
    return isSame ? [] : [this._frame("settings", null, { type: "session.update", session })];
  }

  _ask(now) {
    this._answerKey = this._newId("item");
    this._transcript.add({ key: this._answerKey, role: "assistant", status: "waiting", at: now });
    this.phase = "queued";
    this._numAsks = 0;
    return this.session === null ? [] : this._turnFrames();
  }

  /** Tell the session what it lacks, unsay what is no longer there, and ask. */
  _turnFrames() {
    const question = this._question();
    this._transcript.change(question, { status: "sent" });
    const items = this.messages.filter(isContext);
    const ids = new Set(items.map((message) => message.itemId));
    const frames = [];
    for (const id of [...this._known].filter((known) => !ids.has(known))) {
      frames.push(this._frame("delete", null, { type: "conversation.item.delete", item_id: id }));
      this._known.delete(id);
    }
    for (const message of this._missing(items)) {
      const kind = message.role === "user" ? "input_text" : "output_text";
      const content = [{ type: kind, text: message.text }];
      const item = { id: message.itemId, type: "message", role: message.role, content };
      frames.push(this._frame("item", message.key, { type: "conversation.item.create", item }));
      this._known.add(message.itemId);
    }
    this.phase = "asked";
    this._numAsks += 1;
    this._transcript.expect(this._answerKey);
    const response = { metadata: { message: this._answerKey } };
    frames.push(this._frame("response", this._answerKey, { type: "response.create", response }));
    return frames;
  }

  /** The newest items the session does not have, within the limits, oldest first; the question always. */
  _missing(items) {
    const found = [];
    let chars = 0;
    for (const message of [...items].reverse()) {
      chars += message.text.length;
      const isOver = found.length >= LIMITS.replayItemsMax || chars > LIMITS.replayCharsMax;
      if (this._known.has(message.itemId) || (isOver && found.length > 0)) break;
      found.push(message);
    }
    return found.reverse();
  }

  _question() {
    const at = this.messages.findIndex((message) => message.key === this._answerKey);
    return this.messages[at - 1];
  }

  _ended(message, error, now) {
    // The server keeps an answer however it ended; an empty one is unsaid with the next question.
    if (message.itemId !== message.key || message.text !== "") this._known.add(message.itemId);
    if (message.status === "failed") this._transcript.change(message, { error: errorOf(error, now) });
    if (message.status === "stopped" && message.text === "") this._transcript.remove(message.key);
    if (message.key === this._answerKey) this._turnOver();
  }

  _failed(error, now) {
    const { kind, key } = this._pending.get(error.event_id) ?? { kind: "none", key: null };
    this._pending.delete(error.event_id);
    if (kind === "item" && error.code !== "item_already_exists") return this._itemRefused(key, error, now);
    const isOurs = kind === "response" && key === this._answerKey && this.phase !== "idle";
    // A server that names no event leaves us to think: while a question hangs, it is about that.
    const mayBeOurs = kind === "none" && this.phase === "asked" && error.code !== "server_draining";
    if (isOurs || mayBeOurs) this._refused(error, now);
    else if (kind === "none" || kind === "settings") this.notice = errorOf(error, now);
    return [];
  }

  _refused(error, now) {
    if (this.phase === "stopping") this._end("stopped");
    else if (REQUEUE_CODES.has(error.code)) this._requeue(error, now);
    else this._end("failed", errorOf(error, now));
  }

  /** The question itself was refused, so what is answered now is not it. */
  _itemRefused(key, error, now) {
    const message = this._transcript.find(key);
    if (!message) return [];
    this._known.delete(message.itemId);
    if (this._question()?.key !== key) return []; // an old message the session lacks is no reason to stop
    if (error.code === "conversation_full") {
      this._requeue(error, now);
      return [];
    }
    this._transcript.change(message, { status: "failed", error: errorOf(error, now) });
    this._end("stopped");
    return [this._frame("cancel", null, { type: "response.cancel" })];
  }

  /** Wait with the same question for a session that takes it. */
  _requeue(error, now) {
    if (this._numAsks >= LIMITS.asksMax) {
      this._end("failed", errorOf(error, now));
      return;
    }
    this._transcript.expect(null);
    this._transcript.change(this._question(), { status: "queued" });
    this.phase = "queued";
    this._wantsRestart ||= error.code === "conversation_full";
  }

  /** End the turn from our side; an answer without a word and without a reason leaves nothing. */
  _end(status, error = null) {
    const { text } = this._transcript.find(this._answerKey);
    if (text === "" && error === null) this._transcript.remove(this._answerKey);
    else this._transcript.end(this._answerKey, status, error);
    this._turnOver();
  }

  _turnOver() {
    this.phase = "idle";
    this._answerKey = null;
  }

  /** An answer that failed before its first word is gone once the conversation goes on. */
  _dropFailures() {
    const isEmptyFailure = (message) => message.status === "failed" && message.text === "";
    for (const message of this.messages.filter(isEmptyFailure)) this._transcript.remove(message.key);
  }

  _frame(kind, key, body) {
    this._numEvents += 1;
    const eventId = `page_${this._numEvents}`;
    this._pending.set(eventId, { kind, key });
    if (this._pending.size > 256) this._pending.delete(this._pending.keys().next().value);
    return { event_id: eventId, ...body };
  }
}

/** What a session is told: not a question it refused, nor an answer without a word. */
function isContext(message) {
  return message.text !== "" && !(message.role === "user" && message.status === "failed");
}

/** A message from a store: nothing in it is under way any more. */
function restored(message) {
  if (message.role === "assistant") return ENDED.has(message.status) ? message : { ...message, status: "cut" };
  return message.status === "queued" ? { ...message, status: "failed", error: errorOf({ code: "expired" }) } : message;
}
