// The state of a run, as a word with a sign.

import { h } from "./dom.js";

const LOOKS = {
  done: ["good", "done"],
  wrapped_up: ["good", "wrapped up"],
  hit_max_iterations: ["warn", "out of turns"],
  out_of_budget: ["warn", "out of budget"],
  suspended: ["warn", "waiting"],
  running: ["live", "running"],
  failed: ["bad", "failed"],
  aborted: ["bad", "aborted"],
  damaged: ["bad", "damaged"],
  newer: ["warn", "newer version"],
};

/** The words for a state. */
export function statusWords(status) {
  return LOOKS[status]?.[1] ?? status.replaceAll("_", " ");
}

/** A dot and a word. */
export function statusView(status) {
  return h(
    "span.status",
    { class: LOOKS[status]?.[0] ?? "", data: { status } },
    statusWords(status),
  );
}

/** Where a log cannot be read any further, and why. */
export function damageWords({ where, reason, is_newer: isNewer }) {
  const what = isNewer
    ? "The log goes on, but this version of clark-agent cannot read it"
    : "The log is damaged from here on";
  return `${what}: ${reason} (${where})`;
}

/** Whether the run may go on: it has not ended. */
export function isOpen(status) {
  return status === "running" || status === "suspended";
}
