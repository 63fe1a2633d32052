// Markdown for the answers of a model, as elements.
//
// Headings, lists, quotes, tables, code, emphasis and links. HTML in the text is text. Links lead
// to http, https and mailto only; images are shown only if they are data: URLs of raster types.
// The time is linear in the text: every character is looked at a bounded number of times.

import { h, isEmbeddedImage, outLink } from "./dom.js";

const LONGEST_INLINE = 40_000; // a longer paragraph is shown as it is
const MOST_OPEN = 40; // emphasis and brackets inside each other
const DEEPEST = 12; // quotes and lists inside each other

const FENCE = /^ {0,3}(`{3,}|~{3,})/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_RULE = /^\|?(?:[ \t]*:?-+:?[ \t]*\|)*(?:[ \t]*:?-+:?)?$/;

/** Return the text as a `div.markdown`. */
export function markdown(text) {
  return h("div.markdown", { dir: "auto" }, blocks(text.replaceAll("\r", "").split("\n"), 0));
}

function blocks(lines, depth) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const [element, next] = block(lines, at, depth);
    if (element !== null) made.push(element);
    at = next;
  }
  return made;
}

function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = fenceOf(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const level = Math.min(6, heading[1].length + 2);
    return [h(`h${level}`, null, inline(withoutEnd(heading[2], "# \t"))), at + 1];
  }
  if (RULE.test(line)) return [h("hr"), at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quote(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (line.includes("|") && isTableRule(lines[at + 1] ?? "")) return table(lines, at);
  return paragraph(lines, at, depth);
}

/** Return the mark that opens a block of code, and the name of its language. */
function fenceOf(line) {
  const found = FENCE.exec(line);
  if (!found) return null;
  const rest = line.slice(found[0].length);
  if (rest.includes("`")) return null;
  return { mark: found[1], language: /^[\w+#.-]*/.exec(rest.trimStart())[0] };
}

function isTableRule(line) {
  const text = line.trim();
  return text.includes("-") && text.includes("|") && TABLE_RULE.test(text);
}

function fenced(lines, at, { mark, language }) {
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end].trim();
    if (line.startsWith(mark) && line === mark[0].repeat(line.length)) break;
    end += 1;
  }
  const code = h("code", null, lines.slice(at + 1, end).join("\n"));
  const name = language ? `code in ${language}` : "code";
  return [h("pre.code", { tabindex: 0, "aria-label": name }, code), end + 1];
}

function quote(lines, at, depth) {
  const inside = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const found = QUOTE.exec(lines[end]);
    if (!found) break;
    inside.push(found[1]);
  }
  return [h("blockquote", null, blocks(inside, depth + 1)), end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const indent = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    const found = ITEM.exec(line);
    const starts = found && found[1].length <= indent + 1 && found[1].length >= indent;
    if (starts) {
      if (/\d/.test(found[2]) !== isOrdered || RULE.test(line)) break;
      items.push([found[3]]);
    } else if (!line.trim()) {
      if (!belongs(lines, end + 1, indent)) break;
      items.at(-1).push("");
    } else if (leading(line) > indent) {
      items.at(-1).push(line.slice(Math.min(leading(line), indent + 2)));
    } else if (found || starter(line)) break;
    else items.at(-1).push(line);
    end += 1;
  }
  const made = items.map((item) => h("li", null, tight(blocks(item, depth + 1))));
  const start = isOrdered ? Number.parseInt(first[2], 10) : 1;
  return [h(isOrdered ? "ol" : "ul", { start: start === 1 ? null : start }, made), end];
}

function leading(line) {
  return line.length - line.trimStart().length;
}

function belongs(lines, next, indent) {
  const line = lines[next];
  return line !== undefined && line.trim() !== "" && (leading(line) > indent || ITEM.test(line));
}

function tight(made) {
  return made.length && made[0].tagName === "P" ? [[...made[0].childNodes], made.slice(1)] : made;
}

function starter(line) {
  return fenceOf(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
}

function paragraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !starter(lines[end])) {
    if (depth < DEEPEST && ITEM.test(lines[end])) break;
    end += 1;
  }
  return [h("p", null, inline(lines.slice(at, end).join("\n"))), end];
}

function table(lines, at) {
  const head = cells(lines[at]);
  const rows = [];
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) {
    rows.push(cells(lines[end]).slice(0, head.length));
    end += 1;
  }
  const row = (tag, texts) =>
    h(
      "tr",
      null,
      texts.map((text) => h(tag, null, inline(text))),
    );
  const body = rows.map((texts) => row("td", texts));
  const made = h("table", null, h("thead", null, row("th", head)), h("tbody", null, body));
  return [h("div.table", { tabindex: 0, role: "region", "aria-label": "table" }, made), end];
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return text.split("|").map((cell) => cell.trim());
}

// --- inside a paragraph ------------------------------------------------------------------------
//
// One pass makes a flat list of texts, elements, and marks that may turn out to be the begin or
// the end of an element. A second pass builds the tree.

const SPECIAL = /[\\`*_~[\]!\n]|https?:\/\//g;
const TARGET = /\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+"[^"]*")?\s*\)/y;
const BARE = /https?:\/\/[^\s<>"'`\\^{|}[\]*]+/y;
const TAGS = { "*": "em", _: "em", "**": "strong", __: "strong", "~~": "del" };

/** Return the nodes of a paragraph. */
export function inline(text) {
  if (text.length > LONGEST_INLINE) return [text];
  return build(new Scanner(text).scan());
}

class Scanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.parts = [];
    this.marks = []; // open emphasis: { mark, place }
    this.brackets = []; // the places of open brackets
    this.open = new Map(); // how many of each mark are open
    this.ticks = null; // the positions of backtick runs, by length
  }

  scan() {
    const { text } = this;
    while (this.at < text.length) {
      SPECIAL.lastIndex = this.at;
      const found = SPECIAL.exec(text);
      const next = found ? found.index : text.length;
      if (next > this.at) this.parts.push(text.slice(this.at, next));
      this.at = next;
      if (found) this.special(found[0]);
    }
    return this.parts;
  }

  special(what) {
    if (what === "\\") this.escape();
    else if (what === "`") this.code();
    else if (what === "[") this.bracket(1, false);
    else if (what === "]") this.target();
    else if (what === "\n") this.lineBreak();
    else if (what === "!") {
      if (this.text[this.at + 1] === "[") this.bracket(2, true);
      else this.literal(1);
    } else if (what.length > 1) this.bare();
    else this.emphasis(what);
  }

  literal(length) {
    this.parts.push(this.text.slice(this.at, this.at + length));
    this.at += length;
  }

  escape() {
    const next = this.text[this.at + 1];
    if (next !== undefined && /[!-/:-@[-`{-~]/.test(next)) {
      this.parts.push(next);
      this.at += 2;
    } else this.literal(1);
  }

  lineBreak() {
    this.parts.push(h("br"));
    this.at += 1;
  }

  code() {
    const length = runLength(this.text, this.at, "`");
    this.ticks ??= backticks(this.text);
    const places = this.ticks.get(length) ?? [];
    while (places.length && places.at(-1) <= this.at) places.pop(); // kept in falling order
    if (!places.length) {
      this.literal(length);
      return;
    }
    const end = places.at(-1);
    const inside = this.text.slice(this.at + length, end).replaceAll("\n", " ");
    const isPadded = inside.startsWith(" ") && inside.endsWith(" ") && inside.trim();
    this.parts.push(h("code", null, isPadded ? inside.slice(1, -1) : inside));
    this.at = end + length;
  }

  bracket(length, isImage) {
    if (this.brackets.length >= MOST_OPEN) this.brackets.shift();
    this.brackets.push({ place: this.parts.length, isImage, marks: this.marks.length });
    this.literal(length);
  }

  target() {
    const bracket = this.brackets.pop();
    TARGET.lastIndex = this.at + 1;
    const found = bracket && this.text[this.at + 1] === "(" ? TARGET.exec(this.text) : null;
    if (!found) {
      this.literal(1);
      return;
    }
    const { place, isImage } = bracket;
    this.closeMarks(bracket.marks);
    this.parts[place] = { begin: isImage ? "image" : "link", address: found[1] };
    this.parts.push({ end: true });
    if (!isImage) this.brackets.length = 0; // a link contains no link
    this.at = TARGET.lastIndex;
  }

  bare() {
    BARE.lastIndex = this.at;
    const found = BARE.exec(this.text);
    if (!found) {
      this.literal(1);
      return;
    }
    const address = withoutEnd(found[0], found[0].includes("(") ? ".,;:!?" : ".,;:!?)");
    this.parts.push({ begin: "link", address }, address, { end: true });
    this.at += address.length;
  }

  emphasis(char) {
    const length = this.text[this.at + 1] === char ? 2 : 1;
    const mark = char.repeat(length);
    if (!(mark in TAGS)) {
      this.literal(length);
      return;
    }
    const before = this.text[this.at - 1] ?? " ";
    const after = this.text[this.at + length] ?? " ";
    const isInWord = char === "_" && /[\p{L}\p{N}]/u.test(before) && /[\p{L}\p{N}]/u.test(after);
    const canClose = !/\s/.test(before) && !isInWord;
    const canOpen = !/\s/.test(after) && !isInWord;
    if (canClose && this.open.get(mark)) this.closeEmphasis(mark);
    else if (canOpen && this.marks.length < MOST_OPEN) {
      this.marks.push({ mark, place: this.parts.length });
      this.open.set(mark, (this.open.get(mark) ?? 0) + 1);
      this.literal(length);
      return;
    } else this.parts.push(mark);
    this.at += length;
  }

  closeEmphasis(mark) {
    let newest = this.dropMark();
    while (newest.mark !== mark) newest = this.dropMark();
    if (newest.place < (this.brackets.at(-1)?.place ?? 0)) this.brackets.length = 0;
    this.parts[newest.place] = { begin: TAGS[mark] };
    this.parts.push({ end: true });
  }

  closeMarks(count) {
    while (this.marks.length > count) this.dropMark();
  }

  dropMark() {
    const newest = this.marks.pop();
    this.open.set(newest.mark, this.open.get(newest.mark) - 1);
    return newest;
  }
}

/** Return the text without these characters at its end. */
function withoutEnd(text, chars) {
  let end = text.length;
  while (end && chars.includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

function runLength(text, at, char) {
  let end = at;
  while (text[end] === char) end += 1;
  return end - at;
}

function backticks(text) {
  const found = new Map();
  for (const run of [...text.matchAll(/`+/g)].reverse()) {
    const places = found.get(run[0].length);
    if (places) places.push(run.index);
    else found.set(run[0].length, [run.index]);
  }
  return found;
}

function build(parts) {
  const root = [];
  const stack = [root];
  const begun = [];
  for (const part of parts) {
    if (typeof part === "string" || part instanceof Node) stack.at(-1).push(part);
    else if (part.begin) {
      begun.push(part);
      stack.push([]);
    } else stack.at(-2).push(element(begun.pop(), stack.pop()));
  }
  return root;
}

function element({ begin, address }, children) {
  if (begin === "link") return outLink(address, children);
  if (begin !== "image") return h(begin, null, children);
  const alt = h("span", null, children).textContent;
  if (isEmbeddedImage(address)) return h("img", { src: address, alt, loading: "lazy" });
  return h("span.image-link", null, outLink(address, `image: ${alt || address}`));
}
