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

/** Whether the run may go on: it has not ended. */
export function isOpen(status) {
  return status === "running" || status === "suspended";
}
