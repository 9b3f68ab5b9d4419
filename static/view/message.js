// SPDX-License-Identifier: Apache-2.0
/**
 * One message on the page: its text, what became of it in words, and what can be done about it.
 *
 * Invariant: it is drawn again only when the message or its place changed. It must never show a text of anybody's
 * other than as text, or through the Markdown that makes it so.
 */
import { MarkdownView } from "../markdown/render.js";
import { element, iconButton } from "./dom.js";
import { guessLanguage } from "./language.js";

const LANGUAGE_CHARS = 400; // a longer text has shown its language
const RUNNING = new Set(["waiting", "streaming"]);

export class MessageView {
  constructor(document, message, { words, pageLanguage }) {
    this._document = document;
    this._words = words;
    this._pageLanguage = pageLanguage;
    this._seen = "";
    this._actionsSeen = "";
    const isUser = message.role === "user";
    this._text = element(document, "div", { class: isUser ? "text plain" : "text", dir: "auto" });
    this._markdown = isUser ? null : new MarkdownView(this._text, words);
    const heading = element(document, "h2", { class: "visually-hidden" }, isUser ? words.youSaid : words.answer);
    this._dots = element(document, "span", { class: "dots", "aria-hidden": "true" });
    this._dots.append(...[1, 2, 3].map(() => element(document, "i")));
    this._note = element(document, "p", { class: "note" });
    this._actions = element(document, "div", { class: "actions" });
    const attributes = { class: `message ${message.role}`, "data-key": message.key };
    this.element = element(document, "div", attributes, heading, this._text, this._dots, this._note, this._actions);
  }

  /**
   * `place`: {isLast, isQueued, canAsk, now}: where it stands, whether the last question still waits for a
   * connection, and whether an answer may be asked for.
   */
  update(message, place) {
    const seconds = secondsUntil(message.error?.retryAt, place.now);
    const seen = [message.version, message.status, place.isLast, place.isQueued, place.canAsk, seconds].join();
    if (seen === this._seen) return;
    this._seen = seen;
    const isRunning = RUNNING.has(message.status);
    if (this._markdown) this._markdown.update(message.text, { isOpen: isRunning });
    else if (this._text.textContent !== message.text) this._text.textContent = message.text;
    this._setLanguage(message.text, isRunning);
    this.element.classList.toggle("is-running", isRunning);
    this._dots.hidden = !(isRunning && message.text === "");
    this.element.hidden = message.status === "waiting" && place.isQueued;
    this._setNote(noteOf(message, place, this._words), message.error ? seconds : 0);
    this._setActions(actionsOf(message, place), this._words);
  }

  _setLanguage(text, isRunning) {
    if (isRunning && text.length > LANGUAGE_CHARS) return;
    const language = guessLanguage(text, this._pageLanguage);
    if (language === null) this._text.removeAttribute("lang");
    else if (this._text.getAttribute("lang") !== language) this._text.setAttribute("lang", language);
  }

  _setNote(note, seconds) {
    const wait = seconds > 0 ? ` ${this._words.retryIn.replace("{seconds}", seconds)}` : "";
    this._note.textContent = note + wait;
    this._note.hidden = note === "";
  }

  _setActions(actions, words) {
    const seen = actions.join();
    if (seen === this._actionsSeen) return;
    this._actionsSeen = seen;
    const make = (action) =>
      ICON_ACTIONS[action]
        ? iconButton(this._document, ICON_ACTIONS[action], words[action], action)
        : element(this._document, "button", { type: "button", class: "text-button", "data-action": action }, words[action]);
    this._actions.replaceChildren(...actions.map(make));
    this._actions.hidden = actions.length === 0;
  }
}

const ICON_ACTIONS = { copy: "copy", regenerate: "again" };

/** What a message's state is in words; empty when its text says all. */
export function noteOf(message, { isLast, canAsk }, words) {
  if (message.error) return errorWords(message.error, words);
  if (message.role === "user") {
    if (message.status === "queued") return words.queued;
    return isLast && canAsk ? words.unanswered : "";
  }
  if (message.status === "done") return message.text.trim() === "" ? words.emptyAnswer : "";
  return words[message.status] ?? "";
}

/** What a reader may do about a message. */
export function actionsOf(message, { isLast, canAsk }) {
  const mayAsk = isLast && canAsk;
  if (message.role === "user") return mayAsk ? ["retry"] : [];
  const copy = message.text === "" || RUNNING.has(message.status) ? [] : ["copy"];
  if (!mayAsk) return copy;
  if (message.status === "failed") return [...copy, "retry"];
  if (message.status === "cut" || message.status === "limit") return [...copy, "regenerate", "continue"];
  return [...copy, "regenerate"];
}

/** An error as a person may understand it; the server's own message where we have no words. */
export function errorWords(error, words) {
  return words.errors[error.code] ?? words.errors.other.replace("{message}", error.message || error.code);
}

export function secondsUntil(time, now) {
  return time ? Math.max(0, Math.ceil((time - now) / 1000)) : 0;
}
