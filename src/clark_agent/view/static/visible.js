// Invisible characters, escaped: who decides about a call must see all of it, in its order.

// As in `clark_agent/toolkit/_visible.py`: what is not printable, and what is but has no shape.
const INVISIBLE =
  /[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\u{e0100}-\u{e01ef}]|(?![ \n\t])[\p{C}\p{Z}]/gu;

/** The text with invisible characters, and marks of the direction of text, escaped. */
export function visible(text) {
  return text.replace(INVISIBLE, escaped);
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
