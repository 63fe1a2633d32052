// Differences between texts: a unified diff in colours, and two texts line by line.

import { h } from "./dom.js";

const MOST_EDITS = 1_000; // beyond this, two texts are shown one after the other
const CONTEXT = 3;
const MOST_LINES = 2_000;

/** Whether the text is a unified diff. */
export function isDiff(text) {
  const start = text.slice(0, 4_000);
  if (/^(?:--- |diff --git )/m.test(start) && /^@@ /m.test(start)) return true;
  return /^@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@/.test(start);
}

/** A unified diff in colours. */
export function unifiedDiff(text) {
  let isInHunk = false;
  return diffBlock(
    text.split("\n").map((line) => {
      if (line.startsWith("@@")) isInHunk = true;
      else if (/^(?:diff |index |--- \S|\+\+\+ \S)/.test(line) && !isInHunk) return ["file", line];
      else if (line.startsWith("diff ")) isInHunk = false;
      const kinds = { "@": "hunk", "+": "added", "-": "removed" };
      return [kinds[line[0]] ?? "same", line];
    }),
  );
}

function diffBlock(rows) {
  const lines = rows.slice(0, MOST_LINES).map(([kind, line]) => {
    const tag = { added: "ins", removed: "del" }[kind] ?? "span";
    return h(`${tag}.${kind}`, null, line || " ");
  });
  const left = rows.length - lines.length;
  const rest = left > 0 ? h("span.hunk", null, `… ${left} more lines`) : null;
  return h("pre.diff", { tabindex: 0, role: "region", "aria-label": "diff" }, lines, rest);
}

/** What changed between two texts, with a few lines around each change. */
export function textDiff(before, after) {
  const rows = editScript(before.split("\n"), after.split("\n"));
  return diffBlock(withContext(rows.map(([kind, line]) => [kind, `${SIGNS[kind]}${line}`])));
}

const SIGNS = { added: "+ ", removed: "- ", same: "  " };

function withContext(rows) {
  const near = new Uint8Array(rows.length);
  rows.forEach(([kind], at) => {
    if (kind === "same") return;
    const end = Math.min(rows.length, at + CONTEXT + 1);
    for (let place = Math.max(0, at - CONTEXT); place < end; place += 1) near[place] = 1;
  });
  const shown = [];
  let left = 0;
  rows.forEach((row, at) => {
    if (near[at]) {
      if (left) shown.push(["hunk", `… ${left} lines are the same`]);
      left = 0;
      shown.push(row);
    } else left += 1;
  });
  if (left) shown.push(["hunk", `… ${left} lines are the same`]);
  return shown;
}

/** Return `[kind, line]` for all lines: same, removed or added. */
export function editScript(before, after) {
  let start = 0;
  const most = Math.min(before.length, after.length);
  while (start < most && before[start] === after[start]) start += 1;
  let end = 0;
  while (end < most - start && before.at(-1 - end) === after.at(-1 - end)) end += 1;
  const old = before.slice(start, before.length - end);
  const now = after.slice(start, after.length - end);
  const same = (lines) => lines.map((line) => ["same", line]);
  const tail = end ? before.slice(-end) : [];
  return [...same(before.slice(0, start)), ...shortest(old, now), ...same(tail)];
}

/** The shortest way from one list to the other (Myers), if it is not too long. */
function shortest(old, now) {
  const most = Math.min(old.length + now.length, MOST_EDITS);
  const trace = [];
  const furthest = new Map([[1, 0]]);
  for (let edits = 0; edits <= most; edits += 1) {
    trace.push(new Map(furthest));
    for (let k = -edits; k <= edits; k += 2) {
      const down = furthest.get(k + 1) ?? -1;
      const right = furthest.get(k - 1) ?? -1;
      let x = k === -edits || (k !== edits && right < down) ? down : right + 1;
      while (x < old.length && x - k < now.length && old[x] === now[x - k]) x += 1;
      furthest.set(k, x);
      if (x >= old.length && x - k >= now.length) return walkBack(trace, old, now);
    }
  }
  const rows = (kind, lines) => lines.map((line) => [kind, line]);
  return [...rows("removed", old), ...rows("added", now)];
}

function walkBack(trace, old, now) {
  const rows = [];
  let x = old.length;
  let y = now.length;
  for (let edits = trace.length - 1; edits >= 0; edits -= 1) {
    const furthest = trace[edits];
    const k = x - y;
    const down = furthest.get(k + 1) ?? -1;
    const right = furthest.get(k - 1) ?? -1;
    const from = k === -edits || (k !== edits && right < down) ? k + 1 : k - 1;
    const fromX = furthest.get(from) ?? 0;
    const fromY = fromX - from;
    while (x > Math.max(0, fromX) && y > Math.max(0, fromY)) {
      x -= 1;
      y -= 1;
      rows.push(["same", old[x]]);
    }
    if (edits === 0) break;
    if (from === k + 1) rows.push(["added", now[(y -= 1)]]);
    else rows.push(["removed", old[(x -= 1)]]);
  }
  return rows.reverse();
}
