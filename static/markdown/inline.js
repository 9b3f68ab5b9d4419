// SPDX-License-Identifier: Apache-2.0
/**
 * The inside of a line: emphasis, code, links. Pure: text → nodes of the tree that `render.js` may draw.
 *
 * Invariant: whatever the text, the tree holds only the tags below and links that `safeHref` let through, and the
 * work grows with the length of the text. It must never make markup out of markup: HTML is text here.
 *
 * With `isOpen` the text is still growing: what may yet turn out to be a mark is held back, so that no reader sees
 * raw marks flicker.
 */
import { HELD_CHARS_MAX, pairMarks } from "./emphasis.js";
import { URL_CHARS_MAX, isUnfinishedTarget, linkNode, readTarget, trimUrl } from "./links.js";
import { node } from "./tree.js";

const MARKS_MAX = 2_000; // in one line; the rest of a line that has more is plain text

const SPACE = /\s/;
const WORD = /[\p{L}\p{N}]/u;
const HAN = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Hangul}]/u;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const BARE_URL = new RegExp(`https?://[^\\s<>"\`|，。；：！？、（）「」『』《》〈〉【】“”‘’…]{1,${URL_CHARS_MAX}}`, "iy");
const ANGLE_URL = new RegExp(`<((?:https?://|mailto:|tel:)[^\\s<>]{1,${URL_CHARS_MAX}})>`, "iy");
const ANGLE_MAIL = /<([\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8})>/y;
const ENTITY = /&(amp|lt|gt|quot|#39|nbsp);/y;
const BREAK = /<br\s{0,4}\/?>/iy;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', "#39": "'", nbsp: "\u00a0" };
const SPECIAL = /[\\`*_~[\]!<&\nhH]/g;

/** Text of one paragraph, heading or cell → nodes. */
export function parseInline(text, { isOpen = false } = {}) {
  return new InlineReader(text, isOpen).read();
}

class InlineReader {
  constructor(text, isOpen) {
    this._text = text;
    this._isOpen = isOpen;
    this._at = 0;
    this._tokens = []; // nodes and emphasis marks
    this._brackets = []; // {index, at, isImage}
    this._numMarks = 0;
    this._ticks = null; // where runs of backticks start, by their length; found when the first is met
    this._lastParen = text.lastIndexOf(")");
  }

  read() {
    while (this._at < this._text.length && this._numMarks < MARKS_MAX) {
      SPECIAL.lastIndex = this._at;
      const found = SPECIAL.exec(this._text);
      const stop = found ? found.index : this._text.length;
      this._push(this._text.slice(this._at, stop));
      this._at = stop;
      if (!found) break;
      if (this._special(found[0])) return this._close();
    }
    this._push(this._text.slice(this._at));
    return this._close();
  }

  _push(token) {
    if (token !== "") this._tokens.push(token);
  }

  /** Read what stands at a special character; true if the rest is held back. */
  _special(character) {
    const reader = READERS[character];
    const before = this._at;
    const isHeld = reader.call(this) === true;
    if (this._at === before && !isHeld) {
      this._push(character);
      this._at += 1;
    }
    return isHeld;
  }

  _isTail(end) {
    return this._isOpen && end >= this._text.length;
  }

  _match(pattern) {
    pattern.lastIndex = this._at;
    return pattern.exec(this._text);
  }

  _close() {
    // An open bracket near the end of growing text may become a link: what follows it waits.
    const first = this._brackets.find((bracket) => this._text.length - bracket.at <= HELD_CHARS_MAX);
    if (this._isOpen && first) this._tokens.length = first.index;
    return pairMarks(this._tokens, this._isOpen ? this._text.length : null);
  }

  _escape() {
    const next = this._text[this._at + 1];
    if (next === undefined) return this._isOpen;
    if (next === "\n") {
      this._at += 1;
    } else if (ESCAPABLE.test(next)) {
      this._push(next);
      this._at += 2;
    }
    return false;
  }

  _code() {
    const start = this._at;
    let end = start;
    while (this._text[end] === "`") end += 1;
    const length = end - start;
    this._numMarks += 1;
    const close = this._nextTicks(end, length);
    if (close !== undefined) {
      this._push(codeNode(this._text.slice(end, close)));
      this._at = close + length;
      return false;
    }
    if (this._isOpen && this._text.length - start <= HELD_CHARS_MAX) {
      const code = this._text.slice(end).replace(/`+$/, "");
      if (code.trim() !== "") this._push(codeNode(code));
      return true;
    }
    this._push(this._text.slice(start, end));
    this._at = end;
    return false;
  }

  /** Where the next run of exactly `length` backticks starts. */
  _nextTicks(from, length) {
    if (this._ticks === null) {
      this._ticks = new Map();
      for (const { 0: run, index } of this._text.matchAll(/`+/g)) {
        if (!this._ticks.has(run.length)) this._ticks.set(run.length, []);
        this._ticks.get(run.length).push(index);
      }
      for (const starts of this._ticks.values()) starts.reverse();
    }
    const starts = this._ticks.get(length) ?? [];
    while (starts.length > 0 && starts.at(-1) < from) starts.pop();
    return starts.at(-1);
  }

  _emphasis() {
    const mark = this._text[this._at];
    const start = this._at;
    let end = start;
    while (this._text[end] === mark) end += 1;
    const count = end - start;
    this._at = end;
    this._numMarks += 1;
    const before = this._text[start - 1] ?? " ";
    const after = this._text[end] ?? " ";
    let canOpen = !SPACE.test(after);
    let canClose = !SPACE.test(before);
    if (mark === "_") {
      canOpen &&= !isLetter(before);
      canClose &&= !isLetter(after);
    }
    const isTail = this._isTail(end);
    const isMark = mark === "~" ? count === 2 || (isTail && count === 1) : count <= 3;
    if (isMark && (canOpen || canClose || isTail)) {
      this._tokens.push({ mark, count, canOpen: canOpen || isTail, canClose, isTail, at: start });
    } else {
      this._push(this._text.slice(start, end));
    }
    return false;
  }

  _bracket() {
    this._numMarks += 1;
    this._brackets.push({ index: this._tokens.length, at: this._at, isImage: false });
    this._push("[");
    this._at += 1;
    return false;
  }

  _bang() {
    if (this._text[this._at + 1] !== "[") return false;
    this._numMarks += 1;
    this._brackets.push({ index: this._tokens.length, at: this._at, isImage: true });
    this._push("![");
    this._at += 2;
    return false;
  }

  _bracketEnd() {
    const bracket = this._brackets.pop();
    if (!bracket) return false;
    if (this._isTail(this._at + 1)) {
      this._brackets.push(bracket);
      return false;
    }
    if (this._text[this._at + 1] !== "(") return false;
    const target = readTarget(this._text, this._at + 2, this._lastParen);
    if (target === null) {
      // The address is still being written, or this is no link at all.
      if (this._isOpen && this._text.length - bracket.at <= URL_CHARS_MAX && isUnfinishedTarget(this._text, this._at + 2)) {
        this._tokens.length = bracket.index;
        return true;
      }
      return false;
    }
    const label = pairMarks(this._tokens.slice(bracket.index + 1), null);
    this._tokens.length = bracket.index;
    this._push(linkNode(label, target.url, bracket.isImage, this._brackets.length > 0));
    this._at = target.end;
    return false;
  }

  _angle() {
    const url = this._match(ANGLE_URL) ?? this._match(ANGLE_MAIL);
    if (url) {
      const address = url[1].includes(":") ? url[1] : `mailto:${url[1]}`;
      this._push(linkNode([url[1]], address, false, this._brackets.length > 0));
      this._at += url[0].length;
      return false;
    }
    const line = this._match(BREAK);
    if (line) {
      this._push(node("br", null));
      this._at += line[0].length;
    }
    return false;
  }

  _entity() {
    const entity = this._match(ENTITY);
    if (!entity) return false;
    this._push(ENTITIES[entity[1]]);
    this._at += entity[0].length;
    return false;
  }

  _newline() {
    this._push(node("br", null));
    this._at += 1;
    return false;
  }

  _bareUrl() {
    const found = isLetter(this._text[this._at - 1] ?? " ") ? null : this._match(BARE_URL);
    if (!found) return false;
    const url = trimUrl(found[0]);
    this._at += url.length;
    // While it grows it is text: a half address must not be followed.
    const isLink = !this._isTail(this._at) && this._brackets.length === 0;
    this._push(isLink ? linkNode([url], url, false, false) : url);
    return false;
  }
}

const READERS = {
  "\\": InlineReader.prototype._escape,
  "`": InlineReader.prototype._code,
  "*": InlineReader.prototype._emphasis,
  _: InlineReader.prototype._emphasis,
  "~": InlineReader.prototype._emphasis,
  "[": InlineReader.prototype._bracket,
  "]": InlineReader.prototype._bracketEnd,
  "!": InlineReader.prototype._bang,
  "<": InlineReader.prototype._angle,
  "&": InlineReader.prototype._entity,
  "\n": InlineReader.prototype._newline,
  h: InlineReader.prototype._bareUrl,
  H: InlineReader.prototype._bareUrl,
};

/** Letters and digits, but not of scripts that write without spaces: there a mark may stand inside a word. */
function isLetter(character) {
  return WORD.test(character) && !HAN.test(character);
}

function codeNode(code) {
  const isPadded = code.length > 2 && code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "";
  return node("code", { dir: "ltr" }, (isPadded ? code.slice(1, -1) : code).replace(/\n/g, " "));
}

