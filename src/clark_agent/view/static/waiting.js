// What waits for a decision: cards with the call, and buttons if the server allows to decide.

import { api } from "./api.js";
import { announce, h } from "./dom.js";
import { act } from "./dialogs.js";
import { moment } from "./format.js";
import { isDiff } from "./differences.js";
import { argumentsView, isWhole, textView } from "./parts.js";
import { exact, exactLine, visible, visibleJson } from "./visible.js";

/** The card of a request. `onDone` is called with the answer of the server. */
export function waitingCard(request, session, onDone) {
  const needs = request.needs === "permission" ? "May it run?" : "What is its result?";
  const facts = [
    `${request.asked_by} asks`,
    request.assignee ? `for ${request.assignee}` : null,
    `since ${moment(request.asked_at)}`,
    request.expires_at ? `expires ${moment(request.expires_at)}` : null,
    request.until ? `goes on by itself ${moment(request.until)}` : null,
    request.event ? `waits for the event ${request.event}` : null,
  ].filter(Boolean);
  const name = h("h3", null, h("code", null, exactLine(request.tool_name)), ` waits. ${needs}`);
  const body = [
    name,
    h("p.muted", null, facts.join(" · ")),
    askedView(request),
    session.can_write ? form(request, onDone) : h("p.muted", null, session.why_not ?? ""),
  ];
  const props = {
    "aria-label": `${visible(request.tool_name)} waits`,
    data: { request: request.request_id },
  };
  return h("article.waiting-card", props, body);
}

const SAID = new Set(["kind", "tool", "arguments"]);

function askedView(request) {
  const id = request.run_id;
  const asked = request.request === null ? null : parsed(request.request);
  const call = h("div.part", null, h("p.label", null, "Arguments"), argumentsView(id, request));
  if (asked === null || typeof asked !== "object") {
    return [request.request ? textView(id, request.request, "exact") : null, call];
  }
  const { preview, summary, question, ...rest } = asked;
  const isSaid = !summary || String(summary).startsWith(`${request.tool_name}(`);
  const whole = (text) => ({ text: String(text), length: [...String(text)].length, at: null });
  const more = Object.entries(rest).filter(([key]) => !SAID.has(key));
  return [
    isSaid ? null : h("p.plain", { dir: "ltr" }, exact(String(summary))),
    question ? h("p.plain", { dir: "ltr" }, h("b", null, exact(String(question)))) : null,
    call,
    preview
      ? h(
          "div.part",
          null,
          h("p.label", null, "What it would change"),
          isDiff(String(preview))
            ? textView(id, whole(visible(String(preview))), "diff")
            : textView(id, whole(String(preview)), "exact"),
        )
      : null,
    more.length
      ? argumentsView(id, { arguments: whole(JSON.stringify(Object.fromEntries(more))) })
      : null,
  ];
}

function parsed(text) {
  if (!isWhole(text)) return null;
  try {
    return JSON.parse(text.text);
  } catch {
    return null;
  }
}

function form(request, onDone) {
  const error = h("p.form-error", { role: "alert" });
  const extra = h("div.stack");
  const decide = async (button, decision, value = null) => {
    const body = { request_id: request.request_id, decision, value };
    const done = await act(button, error, () => api.decide(request.run_id, body));
    if (!done) return;
    announce(done.message ?? "Decided.");
    onDone(done);
  };
  const ask = (words, start, label, send) => {
    const id = `decide-${request.position}-${words}`;
    const area = h("textarea", { id, rows: 3 }, start);
    const button = h(
      "button.primary",
      { type: "button", onclick: () => send(button, area.value) },
      label,
    );
    extra.replaceChildren(h("label", { for: id }, words, area), h("div.actions", null, button));
    area.focus();
  };
  const withArguments = (button, text) => {
    let value;
    try {
      value = JSON.parse(text);
    } catch {
      error.textContent = "These arguments are not JSON.";
      return;
    }
    decide(button, "give_arguments", value);
  };
  const button = (words, onclick, kind = "") =>
    h("button", { type: "button", class: kind, onclick }, words);
  const denying = () =>
    ask("Reason, for the model", "", "Deny", (by, text) => decide(by, "deny", text || null));
  const giving = () =>
    ask("Result, for the model", "", "Give this result", (by, text) =>
      decide(by, "give_result", text),
    );
  const changing = () =>
    ask("Arguments, as JSON", visibleJson(request.arguments.text), "Allow with these", withArguments);
  const isPermission = request.needs === "permission";
  const buttons = [
    isPermission
      ? button("Allow", (event) => decide(event.currentTarget, "allow"), "primary")
      : null,
    button("Deny …", denying, "danger"),
    isPermission && isWhole(request.arguments) ? button("Change …", changing) : null,
    button("Give result …", giving, isPermission ? "" : "primary"),
  ];
  return [h("div.actions", null, buttons), extra, error];
}
