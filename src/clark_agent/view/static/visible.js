// Invisible characters, escaped: who decides about a call must see all of it, in its order.

import { h } from "./dom.js";

// As in `clark_agent/toolkit/_visible.py`: what is not printable, and what is but has no shape.
const INVISIBLE =
  /[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\u{e0100}-\u{e01ef}]|(?![ \n\t])[\p{C}\p{Z}]/gu;

/** The text with invisible characters, and marks of the direction of text, escaped. */
export function visible(text) {
  return text.replace(INVISIBLE, escaped);
}

// Words of scripts that are written from right to left.
const RIGHT_TO_LEFT_LETTER =
  "[\\u0590-\\u08ff\\ufb1d-\\ufdff\\ufe70-\\ufefc\\u{10800}-\\u{10fff}\\u{1e800}-\\u{1efff}]";
const RIGHT_TO_LEFT = new RegExp(
  `${RIGHT_TO_LEFT_LETTER}+(?: ${RIGHT_TO_LEFT_LETTER}+)*`,
  "gu",
);

/** The text with invisible characters escaped, as nodes. Words from right to left do not move the
 *  numbers and signs beside them. */
export function exact(text) {
  const shown = visible(text);
  const parts = [];
  let end = 0;
  for (const { 0: words, index } of shown.matchAll(RIGHT_TO_LEFT)) {
    parts.push(shown.slice(end, index), h("bdi", null, words));
    end = index + words.length;
  }
  return [...parts, shown.slice(end)];
}

/** The same for a name or a short value on one line: quoted where one would not see where it ends. */
export function exactLine(text) {
  const isPlain = text !== "" && text === text.trim() && !/[\n\t]/.test(text);
  return exact(isPlain ? text : JSON.stringify(text));
}

/** The same for JSON, which stays the same value. */
export function visibleJson(text) {
  return text.replace(INVISIBLE, (found) =>
    [...Array(found.length).keys()].map((at) => unit(found.charCodeAt(at))).join(""),
  );
}

function unit(code) {
  return `\\u${code.toString(16).padStart(4, "0")}`;
}

function escaped(found) {
  const code = found.codePointAt(0);
  if (found === "\r") return "\\r";
  if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
  return code < 0x10000 ? unit(code) : `\\U${code.toString(16).padStart(8, "0")}`;
}
