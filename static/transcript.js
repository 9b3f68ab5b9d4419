// SPDX-License-Identifier: Apache-2.0
/**
 * Server events → messages. Pure.
 *
 * Owns the messages in their order, and which response writes into which. Invariant: an event seen twice changes
 * nothing the second time, text only grows until the server says what the whole is, and that whole wins: a lost
 * or doubled delta never stays on the page. It must never decide what to send.
 *
 * A message: `key` (ours, stable, also the item's id until the server gives another), `itemId`, `role`, `text`,
 * `status`, `at` (when it began, ms), `error` ({code, message, retryAt} or null), `version` (grows with each change).
 *
 *     user       queued → sent | failed
 *     assistant  waiting → streaming → done | stopped | limit | filtered | cut | failed
 */

/** An answer in one of these is over. */
export const ENDED = new Set(["done", "stopped", "limit", "filtered", "cut", "failed"]);

/** How many event ids are remembered: a server's largest burst of repeats, far more than one answer's tail. */
const SEEN_MAX = 512;

const REASONS = { max_output_tokens: "limit", content_filter: "filtered", client_cancelled: "stopped" };
const STATUSES = { completed: "done", cancelled: "stopped", failed: "failed", incomplete: "limit" };

export class Transcript {
  constructor(messages = []) {
    this.messages = messages.map((message) => ({ error: null, ...message, version: 0 }));
    /** How often the server's whole text differed from what had come: lost or doubled deltas, mended. */
    this.numRepairs = 0;
    this._responses = new Map(); // response id → {key, parts: Map(place → {text, isWhole})}
    this._expected = null;
    this._seen = new Set();
  }

  find(key) {
    return this.messages.find((message) => message.key === key);
  }

  get last() {
    return this.messages.at(-1);
  }

  add(message) {
    this.messages.push({ itemId: message.key, text: "", error: null, ...message, version: 0 });
    return this.last;
  }

  remove(key) {
    this.messages = this.messages.filter((message) => message.key !== key);
    this._forget(key);
  }

  change(message, changes) {
    Object.assign(message, changes);
    message.version += 1;
  }

  /** The next response the server starts is this message's answer. */
  expect(key) {
    this._expected = key;
  }

  /** End an answer from our side; what its response still brings is not heard. */
  end(key, status, error = null) {
    const message = this.find(key);
    this._forget(key);
    if (message && !ENDED.has(message.status)) this.change(message, { status, error });
  }

  /** A session is lost: its responses are over, and the next may give the same ids again. */
  forgetResponses() {
    this._responses.clear();
    this._seen.clear();
    this._expected = null;
  }

  /** Which response writes a message, or undefined. */
  responseOf(key) {
    for (const [id, response] of this._responses) if (response.key === key) return id;
    return undefined;
  }

  /** Take one server event; returns the message it ended, if it ended one. */
  apply(event) {
    if (this._isRepeat(event.event_id)) return null;
    if (event.type === "response.created") return this._created(event.response);
    const response = this._responses.get(event.response_id ?? event.response?.id);
    const message = response && this.find(response.key);
    if (!message) return null;
    const writer = WRITERS[event.type];
    return writer ? writer.call(this, message, response, event) : null;
  }

  _isRepeat(id) {
    if (typeof id !== "string") return false;
    if (this._seen.has(id)) return true;
    this._seen.add(id);
    if (this._seen.size > SEEN_MAX) this._seen.delete(this._seen.values().next().value);
    return false;
  }

  _created({ id, metadata }) {
    const key = metadata?.message ?? this._expected;
    const message = this.find(key);
    if (!message || ENDED.has(message.status) || this.responseOf(key) !== undefined) return null;
    this._expected = null;
    this._responses.set(id, { key, parts: new Map() });
    return null;
  }

  _forget(key) {
    if (this._expected === key) this._expected = null;
    for (const [id, response] of this._responses) if (response.key === key) this._responses.delete(id);
  }

  _write(message, response) {
    const text = [...response.parts.values()].map((part) => part.text).filter(Boolean).join("\n\n");
    if (text !== "" || message.status === "streaming") this.change(message, { text, status: "streaming" });
    return null;
  }
}

/** What each event of a running response does; a method of the transcript. */
const WRITERS = {
  "response.output_item.added"(message, _response, { item }) {
    if (item?.id) this.change(message, { itemId: item.id });
    return null;
  },

  "response.output_text.delta"(message, response, event) {
    const part = partOf(response, event);
    if (part.isWhole) return null;
    part.text += event.delta;
    return this._write(message, response);
  },

  "response.output_text.done"(message, response, event) {
    const part = partOf(response, event);
    if (part.text !== event.text) this.numRepairs += 1;
    part.text = event.text;
    part.isWhole = true;
    return this._write(message, response);
  },

  "response.done"(message, response, event) {
    const { status, status_details: details } = event.response;
    this._responses.delete(event.response.id);
    const ended = REASONS[details?.reason] ?? STATUSES[status] ?? "failed";
    const error = ended === "failed" ? errorOf(details?.error) : null;
    this.change(message, { status: ended, error });
    return message;
  },
};

function partOf(response, event) {
  const place = `${event.output_index ?? 0}/${event.content_index ?? 0}`;
  if (!response.parts.has(place)) response.parts.set(place, { text: "", isWhole: false });
  return response.parts.get(place);
}

/** A server's error as a message keeps it; `now` makes a wait into a time. */
export function errorOf(error, now = null) {
  const wait = error?.retry_after_ms;
  return {
    code: String(error?.code ?? error?.type ?? "internal_error"),
    message: String(error?.message ?? ""),
    retryAt: Number.isFinite(wait) && now !== null ? now + wait : null,
  };
}
