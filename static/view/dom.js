// SPDX-License-Identifier: Apache-2.0
/**
 * Making elements, icons and copies without a line of HTML.
 *
 * Invariant: text is set as text. It must never know what it is used for.
 */

const SVG = "http://www.w3.org/2000/svg";

/** Strokes on a 24 × 24 field. */
const ICONS = {
  send: "M12 19V5 M5.5 11.5 12 5l6.5 6.5",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9z M5 15V4h10",
  done: "M5 12.5 10 17.5 19 7",
  again: "M19.5 12a7.5 7.5 0 1 1-2.2-5.3 M19.5 3.5v4.2h-4.2",
  down: "M12 5v14 M5.5 12.5 12 19l6.5-6.5",
  close: "M6 6l12 12 M18 6 6 18",
};

/** An element; an attribute that is null or false is left out, true is an empty one. */
export function element(document, tag, attributes = {}, ...kids) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...kids);
  return made;
}

/** A drawing that says nothing: the words are beside it or in its button's label. */
export function icon(document, name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  const attributes = { viewBox: "0 0 24 24", class: `icon icon-${name}`, "aria-hidden": "true", focusable: "false" };
  for (const [key, value] of Object.entries(attributes)) svg.setAttribute(key, value);
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button with an icon; `label` is read and shown on hover. */
export function iconButton(document, name, label, action) {
  const attributes = { type: "button", class: "icon-button", "aria-label": label, title: label };
  const button = element(document, "button", { ...attributes, "data-action": action }, icon(document, name));
  return button;
}

/** Put text on the clipboard; true if it is there. Where the page is not secure, the old way is the only one. */
export async function copyText(document, text, container = document.body) {
  try {
    await document.defaultView.navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = element(document, "textarea", { class: "visually-hidden", readonly: true });
    field.value = text;
    const focused = field.ownerDocument.activeElement;
    container.append(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    focused?.focus?.({ preventScroll: true });
    return isDone;
  }
}
