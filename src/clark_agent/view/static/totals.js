// The tokens of a run as a bar.

import { append, h } from "./dom.js";
import { number, short } from "./format.js";

const PARTS_OF_TOTAL = [
  ["cache_read", "cached", "from the cache"],
  ["input", "input", "input"],
  ["cache_write", "written", "written to the cache"],
  ["output", "output", "output"],
];

/** The tokens of the run, with the runs below it, as a bar. */
export function totalsView(view) {
  const tokens = view.tree_tokens;
  const parts = PARTS_OF_TOTAL.filter(([name]) => tokens[name] > 0);
  if (!parts.length) return null;
  const words = parts.map(([name, , label]) => `${number(tokens[name])} ${label}`);
  const bar = parts.map(([name, kind]) =>
    h("span", { class: kind, style: { "flex-grow": String(tokens[name]) } }),
  );
  const legend = parts.map(([name, kind, label]) =>
    h("span", { class: kind }, `${short(tokens[name])} ${label}`),
  );
  const label = `Tokens: ${words.join(", ")}`;
  const place = h(
    "div.totals-place",
    null,
    h("div.totals", { role: "img", "aria-label": label }, bar),
  );
  return append(place, [h("div.legend", { "aria-hidden": "true" }, legend)]);
}
