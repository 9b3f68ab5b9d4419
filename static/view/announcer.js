// SPDX-License-Identifier: Apache-2.0
/**
 * What a screen reader hears of a growing answer: whole sentences, each once.
 *
 * Invariant: its region stands outside the conversation, and what was said leaves it again, so that nothing is read
 * twice. It must never pass on half a sentence while more is coming.
 */
import { parseBlocks } from "../markdown/blocks.js";
import { plainText } from "../markdown/tree.js";
import { element } from "./dom.js";

const PAUSE_MS = 1_500;
const KEPT_MS = 10_000;

/** Where the last whole sentence ends, at or after `from`. An open block of code has none before its end. */
export function sentenceEnd(text, from) {
  const fences = text.slice(0, text.length).match(/^ {0,3}```/gm)?.length ?? 0;
  const limit = fences % 2 === 0 ? text.length : text.lastIndexOf("```");
  let end = from;
  const pattern = /[.!?](?=\s)|[。！？]|\n/g;
  pattern.lastIndex = from;
  for (let found = pattern.exec(text); found && found.index < limit; found = pattern.exec(text)) {
    end = pattern.lastIndex;
  }
  return end;
}

/** Markdown as it is read out: without its marks, and with code only named. */
export function speech(text, words) {
  const speak = (tree) => {
    if (typeof tree === "string") return tree;
    if (tree.attrs?.class === "code-block") return `${words.codeBlock}.`;
    const inside = tree.kids.some((kid) => kid.tag && !INLINE.has(kid.tag)) ? tree.kids.map(speak).join(" ") : plainText(tree.kids);
    return inside;
  };
  return parseBlocks(text).blocks.map((block) => speak(block.tree)).join(" ").trim();
}

const INLINE = new Set(["a", "br", "code", "del", "em", "span", "strong"]);

export class Announcer {
  /** `element` is to be put outside the conversation. */
  constructor(document, environment = globalThis) {
    this.element = element(document, "div", { class: "visually-hidden", "aria-live": "polite", "data-part": "announcer" });
    this.words = {};
    this._environment = environment;
    this._key = null;
    this._end = 0;
    this._spokeAt = -Infinity;
  }

  /** Say a few words now. */
  say(text) {
    if (text === "") return;
    const line = element(this.element.ownerDocument, "p", {}, text);
    this.element.append(line);
    this._environment.setTimeout(() => line.remove(), KEPT_MS);
  }

  /** Begin with an answer; what it holds already is not read. */
  start(key, text = "") {
    this._key = key;
    this._end = text.length;
  }

  /** The answer as it stands; says what is new and whole, or all that is left once it is over. */
  follow(key, text, isOver) {
    if (key !== this._key) return;
    const now = this._environment.performance.now();
    if (!isOver && now - this._spokeAt < PAUSE_MS) return;
    const end = isOver ? text.length : sentenceEnd(text, this._end);
    if (end > this._end) {
      this.say(speech(text.slice(this._end, end), this.words));
      this._spokeAt = now;
      this._end = end;
    }
    if (isOver) this._key = null;
  }
}
