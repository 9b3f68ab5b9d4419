// SPDX-License-Identifier: Apache-2.0
/** Whatever a model writes, wherever its stream is cut, the page holds only what we allow, and the same as at once. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { MarkdownView } from "../../../../static/markdown/render.js";
import { FakeDocument, elements, outline } from "../fake_document.mjs";
import { ATTACKS, TANGLES } from "./payloads.mjs";

const WORDS = { copyCode: "Copy" };
const TAGS = new Set(
  "A BLOCKQUOTE BR BUTTON CODE DEL DIV EM H3 H4 H5 H6 HR LI OL P PRE SPAN STRONG TABLE TBODY TD TH THEAD TR UL".split(" "),
);
const ATTRIBUTES = new Set("class data-action dir href rel scope start tabindex target title type".split(" "));
const CLASSES = new Set(
  "align-center align-end code-block code-head code-language image-link link-host quiet table-scroll task".split(" "),
);

const MARKS = [
  ..."a|b |\n|\n\n|- |  |1. |2) |> |# |---|***|**|*|_|~~|`|```|~~~|[|](|](https://x.example)|)|!|\\|\t|[x] ".split("|"),
  ..."|,|-|,---|---,x | y,https://a.example/c ,中文。,<br>,&lt;,***\n,1986. ".split(","),
];

function view() {
  const container = new FakeDocument().createElement("main");
  return { container, markdown: new MarkdownView(container, WORDS) };
}

function drawn(text, isOpen = false) {
  const { container, markdown } = view();
  markdown.update(text, { isOpen });
  return container;
}

function assertInert(container, text) {
  for (const element of elements(container)) {
    assert.ok(TAGS.has(element.tagName), `${element.tagName} from ${JSON.stringify(text)}`);
    for (const [name, value] of element.attributes) {
      assert.ok(ATTRIBUTES.has(name), `${name} from ${JSON.stringify(text)}`);
      if (name === "class") assert.ok(CLASSES.has(value), value);
    }
    if (element.tagName !== "A") continue;
    const href = element.getAttribute("href");
    assert.match(href, /^(?:https?:\/\/[^@]+|mailto:[^<>"]+|tel:[^<>"]+)$/, JSON.stringify(text));
    assert.equal(element.getAttribute("rel"), "noopener noreferrer nofollow");
    assert.equal([...elements(element)].filter((inner) => inner.tagName === "A").length, 0);
  }
}

test("an attack is inert at every cut", () => {
  assert.ok(ATTACKS.length >= 60);
  for (const text of ATTACKS) {
    for (let cut = 0; cut <= text.length; cut += 1) {
      for (const isOpen of [true, false]) assertInert(drawn(text.slice(0, cut), isOpen), text.slice(0, cut));
    }
  }
});

test("a stream of any pieces ends as the whole text does", () => {
  for (const text of [...ATTACKS, ...TANGLES, TANGLES.join("\n\n")]) {
    const whole = outline(drawn(text));
    for (const size of [1, 2, 3, 7]) {
      const { container, markdown } = view();
      for (let end = size; end < text.length; end += size) markdown.update(text.slice(0, end), { isOpen: true });
      markdown.update(text, { isOpen: false });
      assert.equal(outline(container), whole, JSON.stringify(text));
    }
  }
});

test("a growing text shows at each cut what a fresh page would", () => {
  for (const text of [...TANGLES, TANGLES.join("\n\n")]) {
    const { container, markdown } = view();
    const step = Math.max(1, Math.floor(text.length / 300));
    for (let end = 0; end < text.length; end += step) {
      markdown.update(text.slice(0, end), { isOpen: true });
      assert.equal(outline(container), outline(drawn(text.slice(0, end), true)), JSON.stringify(text.slice(0, end)));
    }
  }
});

test("so it is for any heap of marks", () => {
  let state = 20_260_901;
  const draw = (choices) => choices[(state = (Math.imul(state, 1_103_515_245) + 12_345) & 0x7fffffff) % choices.length];
  for (let round = 0; round < 400; round += 1) {
    const text = Array.from({ length: 4 + (round % 20) }, () => draw(MARKS)).join("");
    const { container, markdown } = view();
    for (let end = 1; end < text.length; end += 1) {
      markdown.update(text.slice(0, end), { isOpen: true });
      assert.equal(outline(container), outline(drawn(text.slice(0, end), true)), JSON.stringify(text.slice(0, end)));
    }
    markdown.update(text, { isOpen: false });
    assert.equal(outline(container), outline(drawn(text)), JSON.stringify(text));
    assertInert(container, text);
  }
});

test("a text that is replaced is drawn anew", () => {
  const { container, markdown } = view();
  markdown.update("# a\n\nb **c", { isOpen: true });
  markdown.update("x", { isOpen: true });
  assert.equal(outline(container), outline(drawn("x")));
  markdown.update("", { isOpen: true });
  assert.equal(container.childNodes.length, 0);
});

test("what did not change is not touched", () => {
  const { container, markdown } = view();
  markdown.update("first\n\n```js\nlet a", { isOpen: true });
  const [paragraph, block] = container.childNodes;
  const button = [...elements(block)].find((element) => element.tagName === "BUTTON");
  const code = [...elements(block)].find((element) => element.tagName === "CODE").childNodes[0];
  markdown.update("first\n\n```js\nlet a = 1;\n", { isOpen: true });
  assert.equal(container.childNodes[0], paragraph);
  assert.equal([...elements(block)].find((element) => element.tagName === "BUTTON"), button);
  assert.equal(code.data, "let a = 1;");
  assert.equal(button.textContent, "Copy");
});

test("no image loads, and a link says where it goes", () => {
  const image = drawn("![a cat](https://evil.example/?q=1)");
  assert.equal(image.textContent, "a catevil.example");
  const same = drawn("[docs at c.example](https://c.example/x)");
  assert.equal(same.textContent, "docs at c.example");
});

for (const [name, text] of Object.entries({
  "a long line": "word ".repeat(20_000),
  "one word": "x".repeat(100_000),
  "stars": "*a ".repeat(33_000),
  "closing stars": "a*".repeat(50_000),
  "brackets": "[".repeat(50_000) + "](".repeat(25_000),
  "links": "[a](".repeat(25_000) + ")",
  "half links": "](a".repeat(33_000) + ")",
  "ticks": Array.from({ length: 440 }, (_, length) => "`".repeat(length)).join(" "),
  "quotes": ">".repeat(100_000),
  "dashes": "- ".repeat(50_000),
  "hashes": "#".repeat(50_000) + " ".repeat(50_000),
  "bars": "|".repeat(50_000) + "\n" + "|-".repeat(25_000),
  "addresses": "https://a.b ".repeat(8_000),
  "items": "- a\n".repeat(25_000),
  "blanks": "- a\n" + "\n".repeat(90_000) + "b",
  "entities": "&lt;&".repeat(20_000),
  "angles": "<https://a.b".repeat(8_000),
  "backslashes": "\\".repeat(100_000),
})) {
  test(`100 kB of ${name} takes no long time`, () => {
    for (const isOpen of [true, false]) {
      const start = performance.now();
      drawn(text, isOpen);
      const took = performance.now() - start;
      assert.ok(took < 1_500, `${Math.round(took)} ms`); // a laptop takes a tenth of it
    }
  });
}
