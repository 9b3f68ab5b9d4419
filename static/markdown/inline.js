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

/** A node: a string, or {tag, attrs, kids}. */
export function node(tag, attrs, ...kids) {
  return { tag, attrs, kids };
}

const DEPTH_MAX = 8;
const MARKS_MAX = 2_000; // in one line; the rest of a line that has more is plain text
const URL_CHARS_MAX = 2_048;
const HELD_CHARS_MAX = 300; // a mark unmatched for longer is probably none

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

/**
 * The address a link may have, or null: http, https, mailto or tel, with no name and password in it, and with no
 * character in it that hides what it is.
 */
export function safeHref(raw) {
  if (raw.length > URL_CHARS_MAX || /[\u0000-\u0020\u007f-\u00a0\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\\]/.test(raw)) {
    return null;
  }
  if (!/^(?:https?:\/\/|mailto:|tel:)/i.test(raw)) return null;
  try {
    const url = new URL(raw);
    const isPlain = url.username === "" && url.password === "";
    return isPlain && ["http:", "https:", "mailto:", "tel:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** Text of one paragraph, heading or cell → nodes. */
export function parseInline(text, { isOpen = false } = {}) {
  return new InlineReader(text, isOpen).read();
}

/** The text of nodes, without their marks. */
export function plainText(nodes) {
  let text = "";
  for (const kid of nodes) text += typeof kid === "string" ? kid : kid.tag === "br" ? "\n" : plainText(kid.kids);
  return text;
}

class InlineReader {
  constructor(text, isOpen) {
    this._text = text;
    this._isOpen = isOpen;
    this._at = 0;
    this._tokens = []; // nodes and emphasis marks
    this._brackets = []; // {index, at, isImage}
    this._numMarks = 0;
    this._missingTicks = new Set(); // lengths of backtick runs known to have no partner ahead
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
    const close = this._missingTicks.has(length) ? -1 : this._ticks(end, length);
    if (close >= 0) {
      this._push(codeNode(this._text.slice(end, close)));
      this._at = close + length;
      return false;
    }
    this._missingTicks.add(length);
    if (this._isOpen && this._text.length - start <= HELD_CHARS_MAX) {
      const code = this._text.slice(end).replace(/`+$/, "");
      if (code.trim() !== "") this._push(codeNode(code));
      return true;
    }
    this._push(this._text.slice(start, end));
    this._at = end;
    return false;
  }

  /** Where the next run of exactly `length` backticks starts, or -1. */
  _ticks(from, length) {
    let at = this._text.indexOf("`", from);
    while (at >= 0) {
      let end = at;
      while (this._text[end] === "`") end += 1;
      if (end - at === length) return at;
      at = this._text.indexOf("`", end);
    }
    return -1;
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

/** `url "title")` from `at` on → {url, end}, or null. */
function readTarget(text, at, lastParen) {
  if (at > lastParen) return null;
  let end = at;
  let depth = 0;
  while (end < text.length && end - at <= URL_CHARS_MAX) {
    const character = text[end];
    if (SPACE.test(character)) break;
    if (character === "(") depth += 1;
    if (character === ")" && depth-- === 0) break;
    end += 1;
  }
  const url = text.slice(at, end).replace(/^<|>$/g, "");
  const title = /^\s{1,8}(?:"[^"\n]{0,300}"|'[^'\n]{0,300}')?\s{0,8}\)/.exec(text.slice(end, end + 330));
  if (text[end] === ")") return { url, end: end + 1 };
  return title ? { url, end: end + title[0].length } : null;
}

/** Whether what stands after `](` may still become an address. */
function isUnfinishedTarget(text, at) {
  return /^\S*(?:\s{1,8}(?:["'][^\n]{0,300})?)?$/.test(text.slice(at, at + URL_CHARS_MAX + 330));
}

/** Punctuation at the end of an address belongs to the sentence around it; so does a `)` that it did not open. */
function trimUrl(url) {
  let end = url.length;
  while (end > 0) {
    const last = url[end - 1];
    const isUnopened = last === ")" && !url.slice(0, end - 1).includes("(");
    if (!/[.,;:!?'"\]*_~]/.test(last) && !isUnopened) break;
    end -= 1;
  }
  return url.slice(0, end);
}

/**
 * A link that says where it goes. An image is one too, as nothing is loaded unasked; a link in a link's label is
 * its text.
 */
function linkNode(label, url, isImage, isInLabel) {
  const text = plainText(label);
  const href = safeHref(url);
  const shown = label.length > 0 ? label : [href ?? url];
  if (isInLabel || href === null) return node("span", null, ...shown.flatMap(unlinked));
  const attrs = { href, title: href, target: "_blank", rel: "noopener noreferrer nofollow" };
  const link = node("a", isImage ? { ...attrs, class: "image-link" } : attrs, ...shown.flatMap(unlinked));
  const { host } = new URL(href);
  if (host === "" || text.toLowerCase().includes(host.toLowerCase())) return link;
  return node("span", null, link, node("span", { class: "link-host", dir: "ltr" }, host));
}

/** A label's nodes without the links in them. */
function unlinked(kid) {
  if (typeof kid === "string") return [kid];
  if (kid.attrs?.class === "link-host") return [];
  const kids = kid.kids.flatMap(unlinked);
  return kid.tag === "a" ? kids : [{ ...kid, kids }];
}

/**
 * Nodes and marks → nodes. `openLength` is the text's length while it grows, else null: then a mark near the end
 * without its partner counts as if the partner came last, and one at the very end is not shown yet.
 */
function pairMarks(tokens, openLength) {
  const out = [];
  const openers = []; // {mark, count, place in out, at}
  for (const token of tokens) {
    if (token.mark === undefined) out.push(token);
    else placeMark(token, out, openers, openLength);
  }
  for (const opener of openLength === null ? [] : openers.reverse()) {
    while (openLength - opener.at <= HELD_CHARS_MAX && opener.count > 0) {
      wrap(out, opener, Math.min(opener.count, 2));
    }
  }
  return joined(out.map(asNode));
}

function placeMark(token, out, openers, openLength) {
  let { count } = token;
  while (count > 0 && token.canClose) {
    const index = openers.map((opener) => opener.mark).lastIndexOf(token.mark);
    if (index < 0) break;
    const opener = openers[index];
    // Half of a closing `**` came: the other half is on its way.
    if (openLength !== null && token.isTail && count < opener.count) return;
    const used = Math.min(opener.count, count, 2);
    openers.length = index + 1;
    wrap(out, opener, used);
    if (opener.count === 0) openers.pop();
    count -= used;
  }
  if (count === 0) return;
  const entry = { mark: token.mark, count, place: out.length, at: token.at };
  out.push(entry);
  if (token.canOpen) openers.push(entry);
}

/** Make what stands after an opener strong, emphasised or struck, and use up so many of its marks. */
function wrap(out, opener, used) {
  const kids = joined(out.splice(opener.place + 1).map(asNode));
  opener.count -= used;
  if (opener.count === 0) out.length = opener.place;
  if (kids.length === 0) return;
  const depth = 1 + kids.reduce((deepest, kid) => Math.max(deepest, kid.depth ?? 0), 0);
  if (depth > DEPTH_MAX) {
    out.push(...kids);
    return;
  }
  const tag = opener.mark === "~" ? "del" : used === 2 ? "strong" : "em";
  out.push({ ...node(tag, null, ...kids), depth });
}

/** A mark that found no partner is text. */
function asNode(entry) {
  return entry.mark === undefined ? entry : entry.mark.repeat(entry.count);
}

/** Neighbouring strings as one. */
function joined(nodes) {
  const out = [];
  for (const kid of nodes) {
    if (typeof kid === "string" && typeof out.at(-1) === "string") out[out.length - 1] += kid;
    else if (kid !== "") out.push(kid);
  }
  return out;
}
