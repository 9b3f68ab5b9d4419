// SPDX-License-Identifier: Apache-2.0
/**
 * Trees → DOM nodes, in place: what did not change is not touched, so a selection, a focus or a scroll position in
 * a growing answer stays.
 *
 * Invariant: only the tags and attributes below ever exist, and all text is set as text. It must never parse HTML.
 */
import { parseBlocks } from "./blocks.js";

const TAGS = new Set(
  "a blockquote br button code del div em h3 h4 h5 h6 hr li ol p pre span strong table tbody td th thead tr ul".split(" "),
);
const ATTRIBUTES = new Set("class data-action dir href rel scope start tabindex target title type".split(" "));

/** One message's text, drawn into `container`. `words` names the buttons by their action. */
export class MarkdownView {
  constructor(container, words) {
    this._container = container;
    this._words = words;
    this._text = "";
    this._blocks = []; // {start, tree}, drawn
    this._stableStart = 0;
  }

  /** Draw a text; `isOpen` while it grows. */
  update(text, { isOpen }) {
    const isGrown = text.startsWith(this._text);
    const from = isGrown ? this._stableStart : 0;
    const kept = isGrown ? this._blocks.filter((block) => block.start < from) : [];
    const parsed = parseBlocks(text.slice(from), { isOpen });
    const fresh = parsed.blocks.map(({ start, tree }) => ({ start: start + from, tree }));
    const before = this._blocks.slice(kept.length).map((block) => block.tree);
    const after = fresh.map((block) => block.tree);
    patchKids(this._container, before, after, this._words, kept.length);
    this._blocks = [...kept, ...fresh];
    this._stableStart = from + parsed.lastStart;
    this._text = text;
  }
}

/** Make a parent's children, from the one at `first` on, show `after` where they showed `before`. */
function patchKids(parent, before, after, words, first = 0) {
  const shared = Math.min(before.length, after.length);
  for (let index = 0; index < shared; index += 1) {
    patch(parent, parent.childNodes[first + index], before[index], after[index], words);
  }
  for (let index = before.length - 1; index >= shared; index -= 1) {
    parent.removeChild(parent.childNodes[first + index]);
  }
  for (const tree of after.slice(shared)) parent.appendChild(create(parent.ownerDocument, tree, words));
}

function patch(parent, drawn, before, after, words) {
  if (typeof before === "string" && typeof after === "string") {
    if (before === after) return;
    if (after.startsWith(before)) drawn.appendData(after.slice(before.length));
    else drawn.data = after;
  } else if (isSameKind(before, after)) {
    patchKids(drawn, before.kids, after.kids, words);
  } else {
    parent.replaceChild(create(parent.ownerDocument, after, words), drawn);
  }
}

function isSameKind(before, after) {
  if (typeof before === "string" || typeof after === "string" || before.tag !== after.tag) return false;
  return JSON.stringify(before.attrs) === JSON.stringify(after.attrs);
}

function create(document, tree, words) {
  if (typeof tree === "string") return document.createTextNode(tree);
  if (!TAGS.has(tree.tag)) throw new Error(`no such tag here: ${tree.tag}`);
  const element = document.createElement(tree.tag);
  for (const [name, value] of Object.entries(tree.attrs ?? {})) {
    if (!ATTRIBUTES.has(name)) throw new Error(`no such attribute here: ${name}`);
    element.setAttribute(name, value);
  }
  for (const kid of tree.kids) element.appendChild(create(document, kid, words));
  if (tree.tag === "button") element.appendChild(document.createTextNode(words[tree.attrs["data-action"]]));
  return element;
}
