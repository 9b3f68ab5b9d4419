// SPDX-License-Identifier: Apache-2.0
/**
 * Text → blocks: paragraphs, headings, lists, quotes, tables, code. Pure.
 *
 * A subset of CommonMark and GitHub's tables, as chat models write it: a line break is a break, what is indented
 * below a list item belongs to it, and neither HTML, nor reference links, nor setext headings exist.
 *
 * Invariant: what stands before the last block never changes when text is added, so a growing text is parsed again
 * from `lastStart` on only; cut anywhere and continued, a text gives the same blocks as at once. It must never nest
 * deeper than DEPTH_MAX.
 */
import { parseInline } from "./inline.js";
import { node } from "./tree.js";

const DEPTH_MAX = 8;
const COLUMNS_MAX = 64;
const RULE_CHARS_MAX = 200;

const FENCE = /^( {0,3})(`{3,}|~{3,})[ \t]*([^`\n]{0,200})$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|\t|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const DELIMITER = /^:?-+:?$/;
/** A last line like this may still become anything. */
const UNDECIDED = /^(?:[-*_+#>~`|:=\s]+|\s*\d{1,9}[.)]?\s*|\s*[-*+]\s+\[[ xX]?\]?\s*)$/;
/** Characters that reorder text: with them, what a line says is not what a reader sees. */
const REORDERING = /[\u202a-\u202e\u2066-\u2069]/g;

/**
 * Parse a text. With `isOpen` it still grows, and its last line may be half a line.
 * @returns {{blocks: {start: number, tree: object}[], lastStart: number}} `start` and `lastStart` are offsets in
 *   the text; `lastStart` is where the last block begins that surely begins there.
 */
export function parseBlocks(text, { isOpen = false } = {}) {
  const lines = text.split("\n");
  const starts = [];
  let offset = 0;
  for (const line of lines) {
    starts.push(offset);
    offset += line.length + 1;
  }
  const clean = lines.map((line) => line.replace(/\r$/, "").replace(/\0/g, "\ufffd").replace(REORDERING, ""));
  const found = readBlocks(clean, isOpen, 0);
  // A table is one by its second line, so that one must be whole too.
  const sure = found.filter((block) => block.line + (block.isTable ? 1 : 0) < lines.length - 1);
  return {
    blocks: found.filter((block) => block.tree !== null).map((block) => ({ start: starts[block.line], tree: block.tree })),
    lastStart: sure.length > 0 ? starts[sure.at(-1).line] : 0,
  };
}

/** Lines → [{line, tree}]; a null tree is a block that is held back. */
function readBlocks(lines, isOpen, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const isLast = at === lines.length - 1;
    const read = isOpen && isLast && isHeld(lines[at]) ? holdBack : readerOf(lines, at, depth);
    const block = read(lines, at, isOpen, depth);
    blocks.push({ line: at, tree: block.tree, isTable: read === readTable });
    at = block.end;
  }
  return blocks;
}

function holdBack(lines) {
  return { tree: null, end: lines.length };
}

function isHeld(line) {
  return UNDECIDED.test(line) || FENCE.test(line);
}

function readerOf(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return readCode;
  if (HEADING.test(line)) return readHeading;
  if (isRule(line)) return readRule;
  if (depth < DEPTH_MAX && QUOTE.test(line)) return readQuote;
  if (depth < DEPTH_MAX && ITEM.test(line)) return readList;
  return isTableHead(lines, at) ? readTable : readParagraph;
}

/** Whether a block of another kind may begin right after a paragraph's line. */
function interrupts(lines, at, depth) {
  const reader = readerOf(lines, at, depth);
  if (reader !== readList) return reader !== readParagraph;
  // "1986. A good year" in the middle of a paragraph is no list, and a lone dash is a dash.
  const [mark, , marker] = ITEM.exec(lines[at]);
  return lines[at].length > mark.length && (marker.length === 1 || /^1[.)]$/.test(marker));
}

function isBlank(line) {
  return line.trim() === "";
}

function isRule(line) {
  return line.length <= RULE_CHARS_MAX && RULE.test(line);
}

function readCode(lines, at, isOpen) {
  const [, indent, fence, info] = FENCE.exec(lines[at]);
  const isClosing = (line) => {
    const trimmed = line.trim();
    return trimmed.length >= fence.length && line.search(/\S/) <= 3 && trimmed === fence[0].repeat(trimmed.length);
  };
  let end = at + 1;
  while (end < lines.length && !isClosing(lines[end])) end += 1;
  const inside = lines.slice(at + 1, end);
  if (end === lines.length && isOpen && inside.length > 0) {
    // A half line of fence characters is the end of the fence on its way, and an empty one is not there yet.
    const last = inside.at(-1).trim();
    if (last === "" || last === fence[0].repeat(last.length)) inside.pop();
  }
  const code = inside.map((line) => line.slice(Math.min(indent.length, line.search(/\S|$/)))).join("\n");
  return { tree: codeTree(code, info.trim().split(/\s/)[0]), end: Math.min(end + 1, lines.length) };
}

function codeTree(code, language) {
  const head = node(
    "div",
    { class: "code-head" },
    node("span", { class: "code-language", dir: "ltr" }, language.replace(/[^\w+#.-]/g, "").slice(0, 24)),
    node("button", { type: "button", class: "quiet", "data-action": "copyCode" }),
  );
  return node("div", { class: "code-block" }, head, node("pre", { dir: "ltr", tabindex: "0" }, node("code", null, code)));
}

/** The outermost block finds its direction from all its text; what is inside follows it. */
function direction(depth) {
  return depth === 0 ? { dir: "auto" } : {};
}

function readHeading(lines, at, isOpen, depth) {
  const line = lines[at].trim();
  const level = HEADING.exec(line)[1].length;
  let end = line.length;
  while (line[end - 1] === "#") end -= 1;
  const hasTail = end < line.length && /\s/.test(line[end - 1] ?? "");
  const text = line.slice(level, hasTail ? end : line.length).trim();
  const inline = parseInline(text, { isOpen: isOpen && at === lines.length - 1 });
  // A page and a message have headings of their own above these.
  return { tree: node(`h${Math.min(level + 2, 6)}`, direction(depth), ...inline), end: at + 1 };
}

function readRule(_lines, at) {
  return { tree: node("hr", null), end: at + 1 };
}

function readQuote(lines, at, isOpen, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  const inside = lines.slice(at, end).map((line) => line.replace(QUOTE, ""));
  const kids = treesOf(inside, isOpen && end === lines.length, depth + 1);
  return { tree: node("blockquote", direction(depth), ...kids), end };
}

function treesOf(lines, isOpen, depth) {
  return readBlocks(lines, isOpen, depth).flatMap((block) => block.tree ?? []);
}

function readList(lines, at, isOpen, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const isOrdered = marker.length > 1;
  const items = [];
  let end = at;
  while (end < lines.length && isSibling(lines[end], indent.length, isOrdered) && !isRule(lines[end])) {
    const next = endOfItem(lines, end, indent.length, depth);
    items.push({ lines: dedented(lines, end, next), isLast: next === lines.length });
    end = skipBlanks(lines, next);
  }
  const kids = items.map((item) => itemTree(item.lines, isOpen && item.isLast, depth));
  const start = Number.parseInt(marker, 10);
  const first = isOrdered && start !== 1 ? { start: String(start) } : {};
  return { tree: node(isOrdered ? "ol" : "ul", { ...direction(depth), ...first }, ...kids), end };
}

function isSibling(line, indent, isOrdered) {
  const found = ITEM.exec(line);
  return found !== null && Math.abs(found[1].length - indent) < 2 && found[2].length > 1 === isOrdered;
}

/** The first line after an item's own: deeper ones, blanks between those, and text that simply goes on. */
function endOfItem(lines, at, indent, depth) {
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    if (isBlank(line)) {
      const next = skipBlanks(lines, end);
      if (next === lines.length || indentOf(lines[next]) < indent + 2) return end;
      end = next;
      continue;
    }
    const isDeeper = indentOf(line) >= indent + 2;
    if (!isDeeper && (isBlank(lines[end - 1]) || ITEM.test(line) || interrupts(lines, end, depth))) return end;
    end += 1;
  }
  return end;
}

function dedented(lines, at, end) {
  const [mark] = ITEM.exec(lines[at]);
  const first = lines[at].slice(mark.length);
  const rest = lines.slice(at + 1, end).map((line) => untabbed(line).slice(Math.min(mark.length, indentOf(line))));
  return [first, ...rest];
}

/** An item's first paragraph stands in it as it is, whether its neighbours are near or far. */
function itemTree(lines, isOpen, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  const text = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  const kids = treesOf(text, isOpen, depth + 1);
  if (kids[0]?.tag === "p") kids.splice(0, 1, ...kids[0].kids);
  if (!task) return node("li", null, ...kids);
  return node("li", { class: "task" }, task[1] === " " ? "☐ " : "☑ ", ...kids);
}

function indentOf(line) {
  return untabbed(line).search(/[^ ]|$/);
}

/** Leading tabs as four spaces each. */
function untabbed(line) {
  return line.replace(/^[ \t]+/, (blank) => blank.replace(/\t/g, "    "));
}

function skipBlanks(lines, at) {
  let end = at;
  while (end < lines.length && isBlank(lines[end])) end += 1;
  return end;
}

function cellsOf(line) {
  let row = line.trim();
  if (row.startsWith("|")) row = row.slice(1);
  const cells = row.replace(/\\\|/g, "\0").split("|", COLUMNS_MAX + 2);
  if (cells.length > 1 && isBlank(cells.at(-1))) cells.pop();
  return cells.map((cell) => cell.trim().replace(/\0/g, "|"));
}

function isTableHead(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|") || !/^[\s|:-]+$/.test(lines[at + 1])) return false;
  const head = cellsOf(lines[at]);
  const delimiters = cellsOf(lines[at + 1]);
  const isEven = head.length === delimiters.length && head.length <= COLUMNS_MAX;
  return isEven && lines[at + 1].includes("-") && delimiters.every((cell) => DELIMITER.test(cell));
}

function readTable(lines, at, isOpen, depth) {
  const head = cellsOf(lines[at]);
  const aligns = cellsOf(lines[at + 1]).map(alignOf);
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && !isBlank(lines[end])) end += 1;
  const rows = lines.slice(at + 2, end).map(cellsOf);
  const isGrowing = isOpen && end === lines.length;
  const body = rows.map((cells, row) =>
    rowTree("td", aligns, aligns.map((_, column) => cells[column] ?? ""), isGrowing && row === rows.length - 1),
  );
  const table = node("table", direction(depth), node("thead", null, rowTree("th", aligns, head, false)), node("tbody", null, ...body));
  return { tree: node("div", { class: "table-scroll", tabindex: "0" }, table), end };
}

function alignOf(delimiter) {
  if (delimiter.endsWith(":")) return delimiter.startsWith(":") ? "align-center" : "align-end";
  return null;
}

function rowTree(tag, aligns, cells, isOpen) {
  const trees = cells.map((cell, column) => {
    const attrs = {};
    if (tag === "th") attrs.scope = "col";
    if (aligns[column]) attrs.class = aligns[column];
    return node(tag, attrs, ...parseInline(cell, { isOpen }));
  });
  return node("tr", null, ...trees);
}

function readParagraph(lines, at, isOpen, depth) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines, end, depth)) end += 1;
  const inside = lines.slice(at, end).map((line) => line.trim());
  const isGrowing = isOpen && end === lines.length;
  if (isGrowing) dropUndecided(inside);
  if (inside.length === 0) return { tree: null, end };
  return { tree: node("p", direction(depth), ...parseInline(inside.join("\n"), { isOpen: isGrowing })), end };
}

/** Take off the last lines of a growing paragraph that may turn out to begin something else. */
function dropUndecided(inside) {
  if (inside.length > 1 && UNDECIDED.test(inside.at(-1))) inside.pop();
  // A row in bars becomes a table's head once the line below it is there.
  if (inside.at(-1).startsWith("|")) inside.pop();
}
