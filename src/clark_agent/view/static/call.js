// One call of a tool in a timeline: arguments, decisions, progress, child runs, result.

import { append, details, fill, h } from "./dom.js";
import { duration, moment } from "./format.js";
import { argumentsView, dataView, firstLine, objectOf, resultView, textView } from "./parts.js";
import { statusView } from "./status.js";
import { exact, exactLine, visible } from "./visible.js";

const STATES = {
  called: ["", "", "not run yet"],
  running: ["…", "running", "running"],
  ok: ["✓", "ok", "done"],
  error: ["✗", "error", "failed"],
  waiting: ["?", "waiting", "waiting"],
};

/** The card of a call. It is told what happens to the call, in order. */
export class CallCard {
  constructor(runId, block, context) {
    this.runId = runId;
    this.context = context;
    this.name = block.name;
    this.sign = h("span.sign");
    this.took = h("span.took");
    this.notes = h("div.notes");
    this.progress = h("div.progress");
    this.children = h("div.children");
    this.outcome = h("div.outcome");
    const label = h("span.name", null, exactLine(block.name));
    const isWhole = isWholeIn(block);
    const props = { class: isWhole ? "whole" : "", dir: "ltr", title: visible(block.summary) };
    const line = h("span.args", props, exact(block.summary));
    this.element = h("details.call", { open: true, data: { tool: block.name } });
    this.element.append(h("summary", null, this.sign, label, line, this.took));
    const given = h("div.part", null, h("p.label", null, "Arguments"), argumentsView(runId, block));
    const parts = [
      isWhole ? null : given,
      this.notes,
      this.progress,
      this.children,
      this.outcome,
    ];
    this.element.append(h("div.details-body", null, parts));
    this.set("called");
  }

  set(state) {
    const [sign, style, words] = STATES[state];
    this.state = state;
    this.element.className = `call ${style}`;
    this.sign.textContent = sign;
    this.sign.setAttribute("role", "img");
    this.sign.setAttribute("aria-label", words);
  }

  take(item) {
    switch (item.kind) {
      case "tool_started":
        return this.started(item);
      case "tool_progress":
        return fill(this.progress, progressView(this.runId, item));
      case "tool_result":
        return this.ended(item);
      case "waits":
        return this.waits(item);
      case "decided":
        return this.note(decidedView(this.runId, item));
      default:
        return this.note([h("p.decision", null, "It did not run: its process stopped just then.")]);
    }
  }

  note(shown) {
    append(this.notes, [shown]);
  }

  started(item) {
    this.set("running");
    if (item.arguments === null) return;
    const changed = argumentsView(this.runId, { arguments: item.arguments });
    this.note(h("div.part", null, h("p.label", null, "Ran with these arguments instead"), changed));
  }

  waits(item) {
    this.set("waiting");
    this.note(item.decisions.map((decision) => hookView(this.runId, decision)));
    const { request } = item;
    if (request !== null) {
      const what = request.needs === "permission" ? "waits for permission" : "waits for its result";
      const who = request.assignee ? ` from ${request.assignee}` : "";
      this.note(
        h(
          "p.decision",
          null,
          `${request.asked_by}: ${what}${who} since ${moment(request.asked_at)}`,
        ),
      );
    } else this.note(h("p.decision", null, "It waits for the runs that it started."));
  }

  ended(item) {
    this.set(item.result.is_error ? "error" : "ok");
    this.took.textContent = item.ms === null ? "" : duration(item.ms);
    this.note(item.decisions.map((decision) => hookView(this.runId, decision)));
    if (item.by_runtime) {
      this.note(h("p.decision", null, "Result of the runtime: ", h("code", null, item.by_runtime)));
    }
    if (item.raised) this.note(h("p.form-error", null, item.raised));
    this.progress.replaceChildren();
    fill(this.outcome, resultView(this.runId, item.result));
    if (item.given !== null && contentOf(item.given) !== contentOf(item.result)) {
      const label = "Result of the tool itself, before plugins changed it";
      const build = () => resultView(this.runId, item.given, "Own result");
      this.outcome.append(details([label], build, { class: "quiet-details" }));
    }
  }

  child(child) {
    if (this.children.querySelector(`[data-run="${CSS.escape(child.run.run_id)}"]`)) return;
    this.children.append(childView(child, this.context));
  }
}

const SHORT = 100;
const ODD_SPACE = /\s\s|[^\S ]/;

/** Whether the line of a call shows all of its arguments. */
function isWholeIn({ summary, arguments: text, is_json: isJson }) {
  if (!isJson || text.length >= SHORT || summary.length >= SHORT || summary.includes("…")) return false;
  const values = text.text.includes("\\") ? null : objectOf(text.text);
  const isPlain = ([name, value]) => /^[\w.-]+$/.test(name) && !ODD_SPACE.test(JSON.stringify(value));
  return values !== null && Object.entries(values).every(isPlain);
}

function contentOf({ blocks, is_error: isError, terminate }) {
  return JSON.stringify([blocks, isError, terminate]);
}

/** A child run, folded; its timeline is loaded when it is opened. */
export function childView({ run }, context) {
  const href = `#/run/${encodeURIComponent(run.run_id)}`;
  const link = h("p", null, h("a", { href }, "Open this run on a page of its own"));
  const summary = [
    h("b", null, `Child run${run.agent ? ` · ${run.agent}` : ""}`),
    statusView(run.status),
    h("span.muted", null, run.task ?? ""),
    h("span.muted", null, duration(run.ms)),
  ];
  const props = { class: "child", data: { run: run.run_id } };
  return details(
    summary,
    () => h("div.stack", null, link, context.childTimeline(run.run_id)),
    props,
  );
}

function progressView(runId, item) {
  const text = item.narration
    ? h("p", null, firstLine(item.narration, 600))
    : textView(runId, item.text);
  return h("div.part", null, h("p.label", null, "Progress"), text);
}

/** What a plugin decided about a call. */
export function hookView(runId, { plugin, decision, data }) {
  const line = h("p.decision", null, h("b", null, plugin), `: ${decision}`);
  return h("div", null, line, dataView(runId, data));
}

const VERDICTS = {
  allow: "allowed",
  deny: "denied",
  give_arguments: "allowed with other arguments",
  give_result: "answered with a result",
  expired: "not decided in time",
  elapsed: "the time has come",
  delivered: "the event has come",
};

/** How a request was decided. */
export function decidedView(runId, item) {
  const by = item.by ? ` by ${item.by}` : "";
  const line = `${VERDICTS[item.decision] ?? item.decision}${by} at ${moment(item.at)}`;
  return h("div", null, h("p.decision", null, line), dataView(runId, item.data));
}
