// SPDX-License-Identifier: Apache-2.0
/**
 * As much of a document as our modules touch, and no parser: a text set as text can never become an element here,
 * so what a test must find out is which elements and attributes were made.
 */

class FakeNode {
  constructor(document) {
    this.ownerDocument = document;
    this.parentNode = null;
    this.childNodes = [];
  }

  appendChild(node) {
    return this.insertBefore(node, null);
  }

  insertBefore(node, before) {
    node.parentNode?.removeChild(node);
    const at = before === null ? this.childNodes.length : this.childNodes.indexOf(before);
    this.childNodes.splice(at, 0, node);
    node.parentNode = this;
    return node;
  }

  removeChild(node) {
    const at = this.childNodes.indexOf(node);
    if (at < 0) throw new Error("not a child of this node");
    this.childNodes.splice(at, 1);
    node.parentNode = null;
    return node;
  }

  replaceChild(node, old) {
    this.insertBefore(node, old);
    return this.removeChild(old);
  }

  get textContent() {
    return this.childNodes.map((child) => child.textContent).join("");
  }

  set textContent(text) {
    for (const child of [...this.childNodes]) this.removeChild(child);
    if (text !== "") this.appendChild(this.ownerDocument.createTextNode(text));
  }
}

class FakeText extends FakeNode {
  constructor(document, data) {
    super(document);
    this.data = data;
  }

  appendData(data) {
    this.data += data;
  }

  get textContent() {
    return this.data;
  }
}

class FakeElement extends FakeNode {
  constructor(document, tag) {
    super(document);
    this.tagName = tag.toUpperCase();
    this.attributes = new Map();
  }

  setAttribute(name, value) {
    this.attributes.set(name, String(value));
  }

  getAttribute(name) {
    return this.attributes.get(name) ?? null;
  }
}

export class FakeDocument {
  createElement(tag) {
    return new FakeElement(this, tag);
  }

  createTextNode(data) {
    return new FakeText(this, data);
  }
}

/** Every element below a node. */
export function* elements(node) {
  for (const child of node.childNodes) {
    if (child.tagName) yield child;
    yield* elements(child);
  }
}

/** A node and what is below it as one string, to compare two of them. */
export function outline(node) {
  if (!node.tagName) return JSON.stringify(node.data);
  const attributes = [...node.attributes].map(([name, value]) => ` ${name}=${JSON.stringify(value)}`).sort();
  return `<${node.tagName.toLowerCase()}${attributes.join("")}>${node.childNodes.map(outline).join("")}</>`;
}
