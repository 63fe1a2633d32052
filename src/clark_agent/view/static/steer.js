// Writing to a run.

import { api } from "./api.js";
import { act } from "./dialogs.js";
import { announce, h } from "./dom.js";

/** The form that sends messages to a run. */
export function steerForm(runId) {
  const text = h("textarea", { id: "steer", rows: 1, placeholder: "Write to this run" });
  const options = [
    ["after_batch", "after the running tools"],
    ["before_next_tool", "before the next tool"],
    ["now", "now, stopping what runs"],
    ["follow_up", "when it is done"],
  ].map(([value, words]) => h("option", { value }, words));
  const when = h("select", { id: "steer-when" }, options);
  const error = h("p.form-error", { role: "alert" });
  const button = h("button.primary", { type: "submit" }, "Send");
  const send = async (event) => {
    event.preventDefault();
    if (!text.value.trim()) return;
    const body = { message: text.value, when: when.value, id: crypto.randomUUID() };
    const done = await act(button, error, () => api.steer(runId, body));
    if (!done) return;
    text.value = "";
    announce(done.message ?? "Sent.");
  };
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  });
  return h(
    "form.steer",
    { onsubmit: send, "aria-label": "Steer" },
    h("label", { for: "steer" }, h("span.visually-hidden", null, "Message to the run"), text),
    h("div.actions", null, h("label", { for: "steer-when" }, "Deliver", when), button),
    error,
  );
}
