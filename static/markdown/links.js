// SPDX-License-Identifier: Apache-2.0
/**
 * Links: which addresses are let through, and how one is written.
 *
 * Invariant: a link has an address of http, https, mailto or tel, and its host can be read. It must never make
 * anything that is loaded without a press.
 */
import { node, plainText } from "./tree.js";

export const URL_CHARS_MAX = 2_048;

const SPACE = /\s/;

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

/** `url "title")` from `at` on → {url, end}, or null. */
export function readTarget(text, at, lastParen) {
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
export function isUnfinishedTarget(text, at) {
  return /^\S*(?:\s{1,8}(?:["'][^\n]{0,300})?)?$/.test(text.slice(at, at + URL_CHARS_MAX + 330));
}

/** Punctuation at the end of an address belongs to the sentence around it; so does a `)` that it did not open. */
export function trimUrl(url) {
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
export function linkNode(label, url, isImage, isInLabel) {
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
