// SPDX-License-Identifier: Apache-2.0
/**
 * Marks in pairs: strong, emphasised and struck text.
 *
 * Invariant: a mark without a partner is text again, and nothing nests deeper than DEPTH_MAX. It must never look at
 * what the marks stand round.
 */
import { node } from "./tree.js";

/** A mark unmatched for longer is probably none. */
export const HELD_CHARS_MAX = 300;

const DEPTH_MAX = 8;

/**
 * Nodes and marks → nodes. `openLength` is the text's length while it grows, else null: then a mark near the end
 * without its partner counts as if the partner came last, and one at the very end is not shown yet.
 */
export function pairMarks(tokens, openLength) {
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
