// SPDX-License-Identifier: Apache-2.0
/**
 * Where one writes. Safe for input methods: the Enter that confirms a word never sends.
 *
 * Invariant: while an input method composes, neither the text nor the box is touched. It must never send twice for
 * one key press.
 */
import { element, icon } from "./dom.js";

/**
 * What a key press does: `send`, `swallow` (nothing, and no new line either), or `ignore` (whatever it always does).
 * Safari ends a composition before the key that ended it comes, with isComposing false: keyCode 229 still tells.
 */
export function keyAction(event) {
  if (event.isComposing || event.keyCode === 229) return "ignore";
  if (event.key !== "Enter" || event.shiftKey || event.altKey) return "ignore";
  return event.repeat ? "swallow" : "send";
}

export class Composer {
  /** @param {{onSend: (text: string) => void, onStop: () => void, charsMax: number}} options */
  constructor(document, { onSend, onStop, charsMax }) {
    this._onSend = onSend;
    this._onStop = onStop;
    this._charsMax = charsMax;
    this._isComposing = false;
    this._state = { canSend: true, canStop: false };
    this._words = {};
    this._build(document);
    this._listen();
  }

  get text() {
    return this._field.value;
  }

  /** Put a text into the box. */
  set text(text) {
    this._field.value = text;
    this._changed();
  }

  focus() {
    this._field.focus({ preventScroll: true });
  }

  setWords(words) {
    this._words = words;
    this._field.setAttribute("aria-label", words.message);
    this._field.setAttribute("placeholder", words.placeholder);
    this._hint.textContent = words.hint;
    this._changed();
  }

  /** `canSend`: a message may be said; `canStop`: an answer is under way. */
  update(state) {
    if (state.canSend === this._state.canSend && state.canStop === this._state.canStop) return;
    this._state = state;
    this._changed();
  }

  _build(document) {
    const attributes = { rows: "1", enterkeyhint: "send", dir: "auto", autocomplete: "off", "aria-describedby": "hint" };
    this._field = element(document, "textarea", attributes);
    // A twin below the box with the same text gives it its height: nothing is measured, nothing jumps.
    this._twin = element(document, "div", { class: "twin", "aria-hidden": "true" });
    this._button = element(document, "button", { type: "button", class: "send" });
    this._problem = element(document, "p", { class: "problem", role: "status" });
    this._hint = element(document, "p", { class: "hint", id: "hint" });
    const grow = element(document, "div", { class: "grow" }, this._field, this._twin);
    const box = element(document, "div", { class: "box" }, grow, this._button);
    this.element = element(document, "div", { class: "composer" }, this._problem, box, this._hint);
  }

  _listen() {
    const field = this._field;
    field.addEventListener("compositionstart", () => (this._isComposing = true));
    const composed = () => {
      this._isComposing = false;
      this._changed();
    };
    field.addEventListener("compositionend", composed);
    field.addEventListener("blur", composed);
    field.addEventListener("input", () => this._changed());
    field.addEventListener("keydown", (event) => this._pressed(event));
    // A press on the button must not take the focus from the box: on a phone the keyboard would close.
    this._button.addEventListener("pointerdown", (event) => event.preventDefault());
    this._button.addEventListener("click", () => (this._state.canStop ? this._onStop() : this._send()));
  }

  _pressed(event) {
    const action = keyAction(event);
    if (action === "ignore") return;
    event.preventDefault();
    if (action === "send") this._send();
  }

  _send() {
    const text = this._field.value.trim();
    if (text === "" || this._excess > 0 || !this._state.canSend) return;
    this.text = "";
    this._onSend(text);
  }

  get _excess() {
    return Math.max(0, this._field.value.length - this._charsMax);
  }

  /** Bring everything round the box in line with its text. */
  _changed() {
    if (!this._isComposing) this._twin.textContent = `${this._field.value}\u200b`;
    const { canSend, canStop } = this._state;
    const excess = this._excess;
    const problem = excess > 0 ? this._words.tooLong?.replace("{count}", excess) : "";
    if (this._problem.textContent !== problem) this._problem.textContent = problem;
    const isReady = canSend && excess === 0 && this._field.value.trim() !== "";
    const label = canStop ? this._words.stop : this._words.send;
    if (this._button.getAttribute("aria-label") !== label) {
      this._button.setAttribute("aria-label", label);
      this._button.setAttribute("title", label);
      this._button.replaceChildren(icon(this._button.ownerDocument, canStop ? "stop" : "send"));
    }
    // Kept in the tab order and said to be off: a focus that vanishes loses its reader.
    this._button.setAttribute("aria-disabled", String(!canStop && !isReady));
  }
}
