// SPDX-License-Identifier: Apache-2.0
/** What all files of the page promise together: no way for markup in, readable colours, few bytes. */
import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";

const ROOT = resolve(dirname(fileURLToPath(import.meta.url)), "../../../static");
const FILES = files(ROOT);
const BYTES_MAX = 56_000; // of everything a first visit loads, each file by itself in gzip, comments and all
const CODE_LINES_MAX = 300;
const ENTRIES_MAX = 10;

function files(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) =>
    entry.isDirectory() ? files(join(folder, entry.name)) : [join(folder, entry.name)],
  );
}

function text(name) {
  return readFileSync(join(ROOT, name), "utf8");
}

function code(path) {
  return readFileSync(path, "utf8").replace(/\/\*[^]*?\*\//g, "").replace(/^\s*\/\/.*$/gm, "");
}

const SCRIPTS = FILES.filter((path) => path.endsWith(".js"));
const OPENINGS = /innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|\beval\b|new Function|createContextualFragment/;

test("no script has a way for text to become markup or code", () => {
  for (const path of SCRIPTS) assert.doesNotMatch(code(path), OPENINGS, path);
});

test("no script sets a style attribute, or scrolls the pages around ours", () => {
  for (const path of SCRIPTS) assert.doesNotMatch(code(path), /setAttribute\("style"|cssText|scrollIntoView/, path);
});

test("the page has nothing inline and nothing from elsewhere", () => {
  const html = text("index.html");
  assert.doesNotMatch(html, /\sstyle=|\son\w+=|<style|<script>|https?:/);
  for (const name of ["view/chat.css", "page/page.css"]) assert.doesNotMatch(text(name), /@import|url\(/);
});

test("every file opens with its licence, and every script with its purpose", () => {
  for (const path of FILES) {
    const head = readFileSync(path, "utf8").slice(0, 300);
    if (!path.endsWith(".svg")) assert.match(head, /SPDX-License-Identifier: Apache-2\.0/, path);
    if (path.endsWith(".js")) assert.match(head, /^\/\/ SPDX.*\n\/\*\*/, path);
  }
});

test("no script is long, and no folder crowded", () => {
  for (const path of SCRIPTS) {
    const lines = code(path).split("\n").filter((line) => line.trim() !== "").length;
    assert.ok(lines <= CODE_LINES_MAX, `${path}: ${lines}`);
  }
  for (const folder of [".", "view", "page", "markdown", "strings"]) {
    assert.ok(readdirSync(join(ROOT, folder)).length <= ENTRIES_MAX, folder);
  }
});

test("the page asks for every script at once", () => {
  const html = text("index.html");
  const asked = new Set([...html.matchAll(/(?:modulepreload" href|src)="([^"]+\.js)"/g)].map((found) => found[1]));
  const scripts = SCRIPTS.map((path) => relative(ROOT, path)).filter((path) => !/^strings\/(?!choose)/.test(path));
  assert.deepEqual([...asked].sort(), scripts.sort());
});

test("a first visit loads little", () => {
  const loaded = FILES.filter((path) => !/strings\/(?:zh|ja)/.test(path));
  const total = loaded.reduce((sum, path) => sum + gzipSync(readFileSync(path), { level: 9 }).length, 0);
  assert.ok(total <= BYTES_MAX, `${total} bytes`);
});

/** The colours of a scheme, by name. */
function colours(css, from) {
  const block = css.slice(css.indexOf(":root {", from));
  return Object.fromEntries([...block.slice(0, block.indexOf("}")).matchAll(/--([\w-]+): (#[0-9a-f]{6})/g)].map((found) => found.slice(1)));
}

function luminance(hex) {
  const [red, green, blue] = [1, 3, 5].map((at) => {
    const part = Number.parseInt(hex.slice(at, at + 2), 16) / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function contrast(first, second) {
  const [light, dark] = [luminance(first), luminance(second)].sort((a, b) => b - a);
  return (light + 0.05) / (dark + 0.05);
}

for (const [scheme, mark] of [["light", 0], ["dark", "prefers-color-scheme: dark"]]) {
  test(`the ${scheme} colours can be read`, () => {
    const css = text("page/page.css");
    const known = colours(css, mark === 0 ? 0 : css.indexOf(mark));
    for (const [front, back, least] of [
      ...["paper", "raised", "bubble", "code", "hover", "notice"].map((back) => ["ink", back, 4.5]),
      ...["paper", "raised", "code", "hover"].map((back) => ["faint", back, 4.5]),
      ...["paper", "raised", "notice", "bubble"].map((back) => ["accent", back, 4.5]),
      ["on-accent", "accent", 4.5],
      ["alarm", "paper", 4.5],
      ["field-edge", "raised", 3],
      ["field-edge", "paper", 3],
    ]) {
      const found = contrast(known[front], known[back]);
      assert.ok(found >= least, `${front} on ${back}: ${found.toFixed(2)}`);
    }
  });
}
