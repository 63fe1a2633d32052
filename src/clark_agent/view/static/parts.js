// What timelines, requests and comparisons are made of: texts, blocks, messages and results.

import { api } from "./api.js";
import { isDiff, unifiedDiff } from "./differences.js";
import { announce, details, fill, h, isEmbeddedImage, outLink } from "./dom.js";
import { number, plural, size } from "./format.js";
import { markdown } from "./markdown.js";
import { exact, exactLine, visible } from "./visible.js";

const SHOWN = 20_000; // characters of a text at first
const STYLED = 200_000; // longer texts are shown without markdown
const PIECE = 200_000;
const TALL = { markdown: 60, plain: 40, code: 18, exact: 18 }; // lines that are shown at first
const LONG = { markdown: 6_000, plain: 4_000, code: 2_400, exact: 2_400 }; // characters

/** A text of a log. `as` is "markdown", "plain", "code" or "diff"; by default a diff is one. "exact"
 *  is code in which invisible characters are escaped. */
export function textView(runId, text, as = "code") {
  const place = h("div.text");
  const whole = { ...text, runId };
  const kind = as === "code" && isDiff(text.text) ? "diff" : as;
  drawText(place, whole, kind, false);
  return place;
}

function drawText(place, whole, kind, isOpen) {
  const shown = isOpen ? whole.text : beginning(whole.text, SHOWN);
  const left = whole.length - points(shown);
  const drawn = drawKind(shown, kind);
  const lines = shown.split("\n", (TALL[kind] ?? 0) + 1).length;
  const isTall = !isOpen && kind in TALL && (lines > TALL[kind] || shown.length > LONG[kind]);
  const hasMore = shown.length < whole.text.length || (left > 0 && !api.isStatic);
  place.replaceChildren(
    isTall || left > 0 ? cut(place, whole, kind, drawn, left, { isTall, hasMore }) : drawn,
  );
}

function beginning(text, most) {
  if (text.length <= most) return text;
  const isInPair = /[\uD800-\uDBFF]/.test(text[most - 1]);
  return text.slice(0, isInPair ? most - 1 : most);
}

/** The number of code points: how the server counts lengths and places in a text. */
export function points(text) {
  let count = 0;
  for (const _ of text) count += 1;
  return count;
}

function drawKind(text, kind) {
  if (kind === "exact") return h("pre.printed", { tabindex: 0, dir: "ltr" }, exact(text));
  if (text.length > STYLED) return h("pre.printed", { tabindex: 0 }, text);
  if (kind === "markdown") return markdown(text);
  if (kind === "diff") return unifiedDiff(text);
  if (kind === "plain") return h("div.plain", { dir: "auto" }, text);
  return h("pre.printed", { dir: "auto" }, text);
}

function cut(place, whole, kind, drawn, left, { isTall, hasMore }) {
  const box = h("div.clip", { class: isTall ? "is-cut" : "" }, h("div.clipped", null, drawn));
  const hint = `Show ${left > PIECE ? "more of" : "all"} ${number(whole.length)} characters`;
  const more = h("button.link", { type: "button", onclick: () => open() }, hint);
  async function open() {
    more.disabled = true;
    try {
      if (!api.isStatic && whole.at !== null && whole.at !== undefined) await load(whole);
      drawText(place, whole, kind, true);
      (place.querySelector("button") ?? place).focus();
    } catch (error) {
      announce(error.message, "error");
      more.disabled = false;
    }
  }
  if (hasMore || isTall) box.append(more);
  if (left > 0 && !hasMore)
    box.append(h("p.muted", null, `${number(left)} more characters are not in this file.`));
  return box;
}

async function load(whole) {
  const have = points(whole.text);
  if (have >= whole.length) return;
  const piece = await api.piece(whole.runId, whole, have, PIECE);
  whole.text += piece.text;
}

/** One line for people, cut by the style sheet. */
export function firstLine(text, most = 240) {
  return text
    .slice(0, 4 * most)
    .replace(/\s+/g, " ")
    .trim()
    .slice(0, most);
}

// --- blocks --------------------------------------------------------------------------------------

/** A block of a message. Calls are drawn by their own card in a timeline. */
export function blockView(runId, block, as = "markdown") {
  switch (block.kind) {
    case "text":
      return block.channel === "text" ? textView(runId, block.text, as) : thought(runId, block);
    case "image":
      return picture(runId, block);
    case "file":
      return file(block);
    case "call":
      return callLine(runId, block);
    case "compaction":
      return compaction(runId, block);
    default:
      return other(runId, block);
  }
}

function thought(runId, block) {
  const words = plural(block.text.length, "character");
  const name = block.channel === "thinking" ? "Thinking" : "Reasoning";
  const props = { class: "thought" };
  return details([`${name} · ${words}`], () => textView(runId, block.text, "plain"), props);
}

function picture(runId, image) {
  const source = api.imageSource(runId, image);
  const alt = firstLine(image.alt ?? "image");
  const isOurs = source !== null && (isEmbeddedImage(source) || !source.includes(":"));
  if (!isOurs) {
    const name = image.url ?? image.media_type ?? "";
    return h("p.muted", null, `Image not shown: ${alt} `, h("code", null, firstLine(name, 160)));
  }
  const shown = h("img", { src: source, alt, loading: "lazy" });
  return h("figure.picture", null, shown, image.alt ? h("figcaption", null, alt) : null);
}

function file(block) {
  const facts = [block.media_type, block.size === null ? null : size(block.size)].filter(Boolean);
  const name = block.name ?? "file";
  const link = block.url ? outLink(block.url, name) : h("b", null, name);
  return h("p", null, "File: ", link, " ", h("span.muted", null, facts.join(" · ")));
}

function callLine(runId, call) {
  const args = h("span.args", null, exact(call.summary));
  const summary = [h("span.name", null, visible(call.name)), args];
  return details(summary, () => argumentsView(runId, call), { class: "call" });
}

function other(runId, block) {
  const name = block.name === "reasoning_details" ? "Reasoning of the provider" : block.name;
  return details(
    [`${name} · ${plural(block.data.length, "character")}`],
    () => textView(runId, block.data),
    {
      class: "thought",
    },
  );
}

function compaction(runId, block) {
  const props = { class: "compaction" };
  return details([compactionLine(block)], () => textView(runId, block.text, "markdown"), props);
}

function compactionLine(block) {
  const { first_turn: first, last_turn: last, tokens_before: before } = block;
  let what = first === last ? `turn ${number(first)}` : `turns ${number(first)} to ${number(last)}`;
  if (!last) what = "earlier summaries";
  const became = block.has_summary ? "became a summary" : "left out, without a summary";
  const merged = block.merges && last ? ", in place of earlier ones" : "";
  const sizes = before ? `, ${number(before)} → ${number(block.tokens_after)} tokens` : "";
  return `Compaction: ${what} ${became}${merged}${sizes}`;
}

/** Whether all of a text is here. */
export function isWhole(text) {
  return text.at === null && points(text.text) === text.length;
}

/** The arguments of a call: a table if they are an object, or else the text. */
export function argumentsView(runId, { arguments: text, is_json: isJson = true }) {
  const values = isJson && isWhole(text) ? objectOf(text.text) : null;
  if (values === null) return textView(runId, text, "exact");
  const rows = Object.entries(values).map(([name, value]) => [
    h("dt", { dir: "ltr" }, exactLine(name)),
    h("dd", null, valueView(runId, value)),
  ]);
  return rows.length ? h("dl.args-table", null, rows) : h("p.muted", null, "no arguments");
}

/** The object that a text is as JSON, if showing its values loses nothing; or else null. */
export function objectOf(json) {
  try {
    const value = JSON.parse(json);
    const isObject = value !== null && typeof value === "object" && !Array.isArray(value);
    // Numbers beyond 2^53 would change, so the text is shown then.
    return isObject && !/\d{16}/.test(json) ? value : null;
  } catch {
    return null;
  }
}

function valueView(runId, value) {
  const isText = typeof value === "string";
  const text = isText ? value : JSON.stringify(value, null, 2);
  if (text.trim() && (text.includes("\n") || text.length > 200)) {
    return textView(runId, { text, length: points(text), at: null }, "exact");
  }
  return h("pre", { dir: "ltr" }, text.trim() ? exact(text) : exactLine(text));
}

/** A JSON text as a table or as it is; null gives null. */
export function dataView(runId, text) {
  if (text === null) return null;
  return argumentsView(runId, { arguments: text, is_json: true });
}

// --- messages ------------------------------------------------------------------------------------

const ROLES = {
  system: "System",
  user: "User",
  assistant: "Assistant",
  tool_result: "Result",
  custom: "Custom",
};

/** The name of who says a message. */
export function roleName(message) {
  const name = ROLES[message.role] ?? message.role;
  return message.name ? `${name} · ${message.name}` : name;
}

/** The blocks of a message. */
export function messageBody(runId, message) {
  const as = message.role === "assistant" || message.role === "user" ? "markdown" : "code";
  return message.blocks.map((block) => blockView(runId, block, as));
}

/** The text of a message, to compare or to show its beginning. */
export function plainText(message) {
  return message.blocks.map(plainBlock).join("\n");
}

function plainBlock(block) {
  if (block.kind === "text") return block.text.text;
  if (block.kind === "call") return `${block.name} ${block.arguments.text}`;
  if (block.kind === "image") return `[image: ${block.alt ?? block.media_type ?? ""}]`;
  if (block.kind === "compaction") return `${compactionLine(block)}\n${block.text.text}`;
  if (block.kind === "file") return `[file: ${block.name ?? ""}]`;
  return `[${block.name}] ${block.data.text}`;
}

/** What a tool returned. */
export function resultView(runId, result, label = "Result") {
  const isOneDiff = result.diff !== null;
  const body = result.blocks.map((block) => blockView(runId, block, "code"));
  const parts = [
    result.narration ? h("p", null, firstLine(result.narration, 600)) : null,
    isOneDiff ? textView(runId, result.diff, "diff") : null,
    body,
    result.kept ? keptView(runId, result.kept) : null,
    result.details ? moreDetails(runId, result.details) : null,
    result.terminate ? h("p.muted", null, "This result votes to end the run.") : null,
  ];
  const kind = result.is_error ? "error" : "";
  return h(
    "div.part",
    { class: kind },
    h("p.label", null, result.is_error ? "Error" : label),
    parts,
  );
}

// What was too large for the model: it got what is above.
function keptView(runId, { text, data }) {
  const left = data ? h("p.muted", null, `${data === 1 ? "An image or file was" : `${number(data)} images and files were`} left out.`) : null;
  if (text === null) return left;
  const words = `The model got a part of this result. All of it: ${plural(text.length, "character")}`;
  const props = { class: "quiet-details kept" };
  return [left, details([words], () => keptText(runId, text), props)];
}

function keptText(runId, text) {
  if (text.text) return textView(runId, text);
  if (api.isStatic) return h("p.muted", null, "It is not in this file.");
  const place = h("div", { "aria-busy": "true" }, h("p.muted", null, "Loading …"));
  api
    .piece(runId, text, 0, PIECE)
    .then((piece) => fill(place, textView(runId, { ...text, text: piece.text })))
    .catch((error) => fill(place, h("p.form-error", null, error.message)))
    .finally(() => place.removeAttribute("aria-busy"));
  return place;
}

function moreDetails(runId, text) {
  return details(["Details for the host"], () => dataView(runId, text), {
    class: "quiet-details",
  });
}
