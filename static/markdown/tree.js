// SPDX-License-Identifier: Apache-2.0
/**
 * The tree between text and page: strings, and nodes of a tag, its attributes and what is inside.
 *
 * Invariant: plain data. It must never hold anything of the page.
 */

/** A node: a string, or {tag, attrs, kids}. */
export function node(tag, attrs, ...kids) {
  return { tag, attrs, kids };
}

/** The text of nodes, without their marks. */
export function plainText(nodes) {
  let text = "";
  for (const kid of nodes) text += typeof kid === "string" ? kid : kid.tag === "br" ? "\n" : plainText(kid.kids);
  return text;
}
