// SPDX-License-Identifier: Apache-2.0
/** What each construct becomes, whole and while it grows. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { parseBlocks } from "../../../../static/markdown/blocks.js";

/** A tree in short: tag(kids), strings as they are. */
function brief(tree) {
  return typeof tree === "string" ? tree : `${tree.tag}(${tree.kids.map(brief).join("|")})`;
}

function parsed(text, isOpen = false) {
  return parseBlocks(text, { isOpen }).blocks.map((block) => brief(block.tree)).join(" ");
}

for (const [text, wanted] of [
  ["a\nb\n\nc", "p(a|br()|b) p(c)"],
  ["# a\n###### b ##\n#c", "h3(a) h6(b) p(#c)"],
  ["a\n---\nb\n* * *", "p(a) hr() p(b) hr()"],
  ["- a\n- b", "ul(li(a)|li(b))"],
  ["* a\n\n* b\n\n  c", "ul(li(a)|li(b|p(c)))"],
  ["1. a\n   - b\n   - c\n2. d", "ol(li(a|ul(li(b)|li(c)))|li(d))"],
  ["- a\n  - b\n- c", "ul(li(a|ul(li(b)))|li(c))"],
  ["- a\n\t- b", "ul(li(a|ul(li(b))))"],
  ["- a\nb", "ul(li(a|br()|b))"],
  ["- a\n\nb", "ul(li(a)) p(b)"],
  ["- [ ] a\n- [x] b", "ul(li(☐ |a)|li(☑ |b))"],
  ["1. a\n- b", "ol(li(a)) ul(li(b))"],
  ["In\n1986. It", "p(In|br()|1986. It)"],
  ["In\n1. It", "p(In) ol(li(It))"],
  ["> a\n> > b\n>\n> - c", "blockquote(p(a)|blockquote(p(b))|ul(li(c)))"],
  ["```\na\n\n  b\n```\nc", "div(div(span()|button())|pre(code(a\n\n  b))) p(c)"],
  ["~~~py\n```\n~~~", "div(div(span(py)|button())|pre(code(```)))"],
  ["- a\n  ```\n  b\n  ```", "ul(li(a|div(div(span()|button())|pre(code(b)))))"],
  ["| a | b |\n|---|:-:|\n| 1 |\n| 2 | 3 | 4 |", "div(table(thead(tr(th(a)|th(b)))|tbody(tr(td(1)|td())|tr(td(2)|td(3)))))"],
  ["a|b\n-|-\n1|2\n\nc", "div(table(thead(tr(th(a)|th(b)))|tbody(tr(td(1)|td(2))))) p(c)"],
  ["| a\\|b |\n|---|", "div(table(thead(tr(th(a|b)))|tbody()))"],
  ["a | b\nc", "p(a | b|br()|c)"],
  ["**a** *b* __c__ _d_ ~~e~~ ***f***", "p(strong(a)| |em(b)| |strong(c)| |em(d)| |del(e)| |em(strong(f)))"],
  ["2 * 3 * 4, snake_case_name, ~5", "p(2 * 3 * 4, snake_case_name, ~5)"],
  ["**注意：**请看「*文*」", "p(strong(注意：)|请看「|em(文)|」)"],
  ["`a*b*` ``c`d`` `e", "p(code(a*b*)| |code(c`d)| `e)"],
  ["[a](https://x.example/a) [b](c) d[0](e", "p(span(a(a)|span(x.example))| |span(b)| d[0](e)"],
  ["[a](https://x.example/b(c) \"t\")", "p(span(a(a)|span(x.example)))"],
  ["see https://x.example/a(b). and (https://y.example)", "p(see |a(https://x.example/a(b))|. and (|a(https://y.example)|))"],
  ["看https://x.example/a。好", "p(看|a(https://x.example/a)|。好)"],
  ["<https://x.example> <a@b.example>", "p(a(https://x.example)| |a(a@b.example))"],
  ["\\*a\\* a\\\nb &lt; &amp;lt;", "p(*a* a|br()|b < &lt;)"],
  ["a<br>b<b>", "p(a|br()|b<b>)"],
]) {
  test(`${JSON.stringify(text)}`, () => assert.equal(parsed(text), wanted));
}

for (const [text, wanted] of [
  ["a **b", "p(a |strong(b))"],
  ["a **", "p(a )"],
  ["a **b*", "p(a |strong(b))"],
  ["a `b", "p(a |code(b))"],
  ["a [b", "p(a )"],
  ["a [b](https://x", "p(a )"],
  ["a [b] c", "p(a [b] c)"],
  ["a [" + "b".repeat(400), "p(a [" + "b".repeat(400) + ")"],
  ["a https://x.exam", "p(a https://x.exam)"],
  ["#", ""],
  ["a\n-", "p(a)"],
  ["a\n12.", "p(a)"],
  ["- a\n- ", "ul(li(a)|li())"],
  ["``", ""],
  ["```py", ""],
  ["```py\n", "div(div(span(py)|button())|pre(code()))"],
  ["```\na\n``", "div(div(span()|button())|pre(code(a)))"],
  ["| a | b |", ""],
  ["| a | b |\n|--", ""],
  ["x\n| a | b |", "p(x)"],
]) {
  test(`growing, ${JSON.stringify(text.slice(0, 24))} shows what is sure`, () => assert.equal(parsed(text, true), wanted));
}

test("nesting has an end", () => {
  const depth = (tree) => (typeof tree === "string" ? 0 : 1 + Math.max(0, ...tree.kids.map(depth)));
  for (const text of [">".repeat(500) + "a", "- ".repeat(500) + "a", "*a ".repeat(500) + "a*".repeat(500)]) {
    assert.ok(Math.max(...parseBlocks(text).blocks.map((block) => depth(block.tree))) < 24, text.slice(0, 9));
  }
});

test("characters that reorder text are not shown", () => {
  assert.equal(parsed("a\u202eb\u2066c\0"), "p(abc\ufffd)");
});
