// SPDX-License-Identifier: Apache-2.0
/**
 * A conversation on the page: messages, composer, and what a screen reader hears. For a page or a widget alike.
 *
 * Invariant: it shows exactly the state it was last given. It must never keep a state of its own that is worth
 * saving, and never talk to a server.
 */
import { Announcer } from "./announcer.js";
import { Composer } from "./composer.js";
import { copyText, element, icon } from "./dom.js";
import { Follower } from "./follow.js";
import { MessageView } from "./message.js";

const COPIED_MS = 2_000;

export class ChatView {
  /**
   * @param root where everything goes; its document may be a page's or a shadow root's owner.
   * @param on {send(text), stop(), regenerate(), retry(), continue()}: what the reader did.
   */
  constructor(root, { on, charsMax, document = root.ownerDocument }) {
    this._document = document;
    this._on = on;
    this._views = new Map(); // key → MessageView
    this._state = { messages: [], phase: "idle", now: 0 };
    this._announcer = new Announcer(document);
    this._status = element(document, "div", { class: "visually-hidden", role: "status" });
    this._composer = new Composer(document, {
      onSend: (text) => this._send(text),
      onStop: () => on.stop(),
      charsMax,
    });
    this._build(root);
    this._follower = new Follower(this._scroller, {
      onChange: () => this._showPill(),
      answerTop: () => this._answerTop(),
    });
  }

  /** Take the words of a language; everything is drawn anew. */
  setWords(words, pageLanguage) {
    this._words = words;
    this._pageLanguage = pageLanguage;
    this._announcer.words = words;
    this._scroller.setAttribute("aria-label", words.conversation);
    this._pill.setAttribute("aria-label", words.newest);
    this._pill.setAttribute("title", words.newest);
    this._composer.setWords(words);
    this._showWelcome();
    for (const view of this._views.values()) view.element.remove();
    this._views.clear();
    this.render(this._state);
  }

  /** Show a state: {messages, phase, now}. */
  render(state) {
    const before = this._state;
    const wasEmpty = this._views.size === 0;
    this._state = state;
    const keys = new Set(state.messages.map((message) => message.key));
    for (const [key, view] of this._views) if (!keys.has(key)) this._remove(key, view);
    const canAsk = state.phase === "idle";
    const isQueued = state.phase === "queued";
    const lastIndex = state.messages.length - 1;
    state.messages.forEach((message, index) => {
      const isNew = !this._views.has(message.key);
      if (isNew) this._add(message);
      this._views.get(message.key).update(message, { isLast: index === lastIndex, isQueued, canAsk, now: state.now });
      this._tell(message, isNew);
    });
    this._welcome.hidden = state.messages.length > 0;
    this._composer.update({ canSend: canAsk, canStop: state.phase !== "idle" && state.phase !== "stopping" });
    if (before.phase !== state.phase) this._status.textContent = canAsk ? "" : this._words.answering;
    if (state.messages.length === 0) this._follower.rest();
    else if (wasEmpty) this._follower.enter();
    this._follower.place();
  }

  /** Say something to those who only hear. */
  say(text) {
    this._announcer.say(text);
  }

  focus() {
    this._composer.focus();
  }

  /** Give the reader a text back to change. */
  takeBack(text) {
    if (this._composer.text === "") this._composer.text = text;
  }

  _build(root) {
    const document = this._document;
    this._welcome = element(document, "div", { class: "welcome" });
    this._list = element(document, "div", { class: "messages" });
    // A log that is not live: what is new in it is read out, in sentences, by the announcer.
    const log = { class: "scroller", role: "log", "aria-live": "off", tabindex: "0" };
    this._scroller = element(document, "div", log, this._welcome, this._list);
    this._pill = element(document, "button", { type: "button", class: "pill", hidden: true }, icon(document, "down"));
    const view = element(document, "div", { class: "thread" }, this._scroller, this._pill);
    root.append(view, this._composer.element, this._status, this._announcer.element);
    this._pill.addEventListener("click", () => this._follower.jump());
    this._list.addEventListener("click", (event) => this._clicked(event));
    this._welcome.addEventListener("click", (event) => {
      const suggestion = event.target.closest("[data-suggestion]");
      if (suggestion) this._send(suggestion.getAttribute("data-suggestion"));
    });
  }

  _showWelcome() {
    const document = this._document;
    const cards = this._words.suggestions.map(({ title, text }) =>
      element(
        document,
        "button",
        { type: "button", class: "suggestion", "data-suggestion": text },
        element(document, "strong", {}, title),
        element(document, "span", {}, text),
      ),
    );
    const greeting = element(document, "h2", {}, this._words.greeting);
    const note = element(document, "p", {}, this._words.greetingNote);
    this._welcome.replaceChildren(greeting, note, element(document, "div", { class: "suggestions" }, ...cards));
  }

  _send(text) {
    if (this._state.phase !== "idle") return;
    this._on.send(text);
    this._follower.sent();
  }

  _add(message) {
    const options = { words: this._words, pageLanguage: this._pageLanguage };
    const view = new MessageView(this._document, message, options);
    this._views.set(message.key, view);
    this._list.append(view.element);
  }

  _remove(key, view) {
    if (view.element.contains(this._document.activeElement)) this._composer.focus();
    view.element.remove();
    this._views.delete(key);
  }

  /** Read out the running answer; what is over before it is first seen was read long ago. */
  _tell(message, isNew) {
    if (message.role !== "assistant") return;
    const isRunning = message.status === "waiting" || message.status === "streaming";
    if (isNew && isRunning) this._announcer.start(message.key, message.text);
    this._announcer.follow(message.key, message.text, !isRunning);
  }

  _answerTop() {
    const last = this._list.lastElementChild;
    return last && this._state.phase !== "idle" ? last.offsetTop : null;
  }

  _showPill() {
    const isAway = this._follower?.isAway ?? false;
    if (this._pill.hidden === isAway) this._pill.hidden = !isAway;
  }

  _clicked(event) {
    const button = event.target.closest("button[data-action]");
    if (!button) return;
    const action = button.getAttribute("data-action");
    if (action === "copy" || action === "copyCode") {
      this._copy(button, action);
    } else {
      this._follower.sent();
      this._on[action]();
    }
  }

  async _copy(button, action) {
    const key = button.closest("[data-key]").getAttribute("data-key");
    const text =
      action === "copy"
        ? this._state.messages.find((message) => message.key === key).text
        : button.closest(".code-block").querySelector("pre").textContent;
    if (!(await copyText(this._document, text, button.closest(".message")))) return;
    const document = this._document;
    this.say(this._words.copied);
    button.classList.add("is-done");
    if (action === "copy") button.replaceChildren(icon(document, "done"));
    else button.textContent = this._words.copied;
    setTimeout(() => {
      button.classList.remove("is-done");
      if (action === "copy") button.replaceChildren(icon(document, "copy"));
      else button.textContent = this._words.copyCode;
    }, COPIED_MS);
  }
}
