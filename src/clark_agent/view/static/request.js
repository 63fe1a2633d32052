// What the model saw in a turn, and what changed against the request before.

import { api } from "./api.js";
import { textDiff } from "./differences.js";
import { append, details, h } from "./dom.js";
import { number, plural } from "./format.js";
import { firstLine, messageBody, plainText, roleName, textView } from "./parts.js";

const PAGE = 100; // messages

/** The panel of one turn. */
export class RequestPanel {
  constructor(runId, turn, attempt = null) {
    this.runId = runId;
    this.turn = turn;
    this.element = h("div.turn-body.request", { "aria-busy": "true" });
    this.ready = this.load(attempt);
  }

  close() {
    this.isClosed = true;
  }

  async load(attempt, force = null) {
    this.element.replaceChildren(h("p.muted", null, "Loading …"));
    try {
      const request = await api.request(this.runId, this.turn, { attempt, force });
      if (!this.isClosed) this.show(request);
    } catch (error) {
      this.fail(error, attempt);
    } finally {
      this.element.removeAttribute("aria-busy");
    }
  }

  fail(error, attempt) {
    const again = h(
      "button",
      { type: "button", onclick: () => this.load(attempt, 1) },
      "Read it anyway",
    );
    const isLarge = error.error === "too_large";
    this.element.replaceChildren(h("p.form-error", null, error.message), isLarge ? again : "");
  }

  show(request) {
    this.request = request;
    this.element.replaceChildren();
    append(this.element, [
      request.attempts > 1 ? this.attempts() : null,
      prefixView(request),
      this.changes(),
      this.messages(),
      this.front(),
    ]);
  }

  attempts() {
    const { attempts, attempt } = this.request;
    const buttons = Array.from({ length: attempts }, (_, at) => {
      const props = { type: "button", "aria-pressed": String(at + 1 === attempt) };
      return h("button", { ...props, onclick: () => this.load(at + 1) }, `Attempt ${at + 1}`);
    });
    return h("div.actions", { role: "group", "aria-label": "Attempts" }, buttons);
  }

  /** What is not there any more, and what came in its place, as one diff. */
  changes() {
    const { replaced, prefix, messages, first, edits } = this.request;
    const kept = prefix?.kept_messages ?? 0;
    const parts = edits.map((edit) => {
      const what = edit.is_lasting ? "changed the transcript" : "changed this request";
      return h("p", null, h("span.chip.accent", null, edit.plugin), ` ${what}`);
    });
    if (replaced.length) {
      const now = messages.filter((message) => message.index >= kept && message.index >= first);
      parts.push(textDiff(script(replaced), script(now.slice(0, replaced.length))));
    }
    if (!parts.length) return null;
    return h("section", { "aria-label": "What changed" }, h("h3", null, "What changed"), parts);
  }

  messages() {
    const { messages, first, total, prefix } = this.request;
    const kept = prefix?.possible_tokens ? prefix.kept_messages : 0;
    const list = h(
      "div.message-list",
      null,
      messages.map((each) => this.row(each, kept)),
    );
    const fresh = messages.filter((each) => each.is_new).length;
    const title = h("h3", null, `${plural(total, "message")}, ${number(fresh)} new`);
    const parts = [title];
    if (first > 0 && !api.isStatic) parts.push(this.earlier(list, first));
    else if (first > 0)
      parts.push(
        h("p.muted", null, `${plural(first, "message")} before these, as in the turns above.`),
      );
    parts.push(list);
    const last = messages.at(-1)?.index ?? first - 1;
    if (last + 1 < total && !api.isStatic) parts.push(this.later(list, last + 1, total));
    return h("section", { "aria-label": "Messages" }, parts);
  }

  earlier(list, first) {
    const start = Math.max(0, first - PAGE);
    const words = `Show ${plural(first - start, "message")} before`;
    const button = h(
      "button.link",
      { type: "button", onclick: () => this.page(button, list, start, first, true) },
      words,
    );
    return button;
  }

  later(list, from, total) {
    const end = Math.min(total, from + PAGE);
    const words = `Show ${plural(end - from, "message")} more`;
    const button = h(
      "button.link",
      { type: "button", onclick: () => this.page(button, list, from, end, false) },
      words,
    );
    return button;
  }

  async page(button, list, from, end, isBefore) {
    button.disabled = true;
    const { attempt, total } = this.request;
    try {
      const page = await api.request(this.runId, this.turn, {
        attempt,
        from,
        limit: end - from,
      });
      const rows = page.messages.map((each) => this.row(each, Infinity));
      if (isBefore) list.prepend(...rows);
      else list.append(...rows);
      const isMore = isBefore ? from > 0 : end < total;
      if (!isMore) button.remove();
      else button.replaceWith(isBefore ? this.earlier(list, from) : this.later(list, end, total));
    } catch (error) {
      button.disabled = false;
      button.after(h("p.form-error", null, error.message));
    }
  }

  row(message, kept) {
    const isNew = message.is_new && message.index >= Math.min(kept, message.index);
    const chips = [
      isNew ? h("span.chip.warn", null, "new") : h("span.chip.good", null, "kept"),
      message.is_error ? h("span.chip.bad", null, "error") : null,
    ];
    const first = h("span.first", null, firstLine(plainText(message)));
    const summary = [
      h("span.muted", null, `${message.index}`),
      h("b", null, roleName(message)),
      first,
      chips,
    ];
    const props = {
      class: `message-row ${isNew ? "new" : "kept"}`,
      open: isNew && message.role !== "system",
    };
    return details(summary, () => h("div", null, messageBody(this.runId, message)), props);
  }

  front() {
    const { system_prompt: system, tools, removed_tools: removed, settings } = this.request;
    const made = [];
    if (system.length) {
      made.push(details(["System prompt"], () => textView(this.runId, system, "plain")));
    }
    const fresh = tools.filter((tool) => tool.is_new).length;
    const gone = removed.length
      ? `, ${plural(removed.length, "tool")} removed: ${removed.join(", ")}`
      : "";
    const words = `${plural(tools.length, "tool")}${fresh ? `, ${number(fresh)} new or changed` : ""}${gone}`;
    made.push(
      details([words], () =>
        h(
          "div",
          null,
          tools.map((tool) => this.tool(tool)),
        ),
      ),
    );
    if (settings) made.push(details(["Settings"], () => textView(this.runId, settings)));
    return h(
      "section",
      { "aria-label": "Before the messages" },
      h("h3", null, "Before the messages"),
      made,
    );
  }

  tool(tool) {
    const chip = tool.is_new ? h("span.chip.warn", null, "new") : null;
    const summary = [
      h("code", null, tool.name),
      " ",
      h("span.muted", null, firstLine(tool.description.text, 120)),
      chip,
    ];
    const build = () => [
      textView(this.runId, tool.description, "plain"),
      textView(this.runId, tool.parameters),
    ];
    return details(summary, () => h("div", null, build()), { class: "message-row" });
  }
}

function script(messages) {
  return messages.map((message) => `${roleName(message)}:\n${plainText(message)}`).join("\n\n");
}

const PARTS = { tools: "the tools", system_prompt: "the system prompt", settings: "the settings" };

function prefixView({ prefix, total }) {
  if (!prefix) return null;
  if (!prefix.possible_tokens) {
    return h(
      "p.muted",
      null,
      `The first request: ${plural(total, "message")}, about ${number(prefix.tokens)} tokens.`,
    );
  }
  const share = `${(100 * prefix.reuse).toFixed(prefix.reuse === 1 ? 0 : 1)}%`;
  const kept = h("span.kept", { style: { width: share } });
  const bar = h(
    "div.prefix-bar",
    { role: "img", "aria-label": `${share} of the last request is kept` },
    kept,
  );
  const words = `${share} of the last request is the beginning of this one: ${plural(prefix.kept_messages, "message")}, `;
  const sizes = `${number(prefix.kept_tokens)} of ${number(prefix.possible_tokens)} tokens. This one has about ${number(prefix.tokens)}.`;
  return h("div.change", null, bar, h("p", null, words, sizes), breakView(prefix));
}

function breakView({ change, is_certain: isCertain }) {
  if (!change)
    return h(
      "p.muted",
      null,
      "Nothing that was sent before has changed: a provider can answer from its cache.",
    );
  const place = PARTS[change.part] ?? `message ${change.index}`;
  const name = change.name ? ` (${change.name})` : "";
  const causes = change.causes.map((cause) => [
    h(
      "span.chip.accent",
      null,
      [cause.kind.replaceAll("_", " "), cause.name].filter(Boolean).join(" "),
    ),
    " ",
  ]);
  const doubt = isCertain
    ? null
    : h("span.muted", null, " The log does not tell this for certain.");
  return h(
    "p",
    null,
    h("b", null, `The cached prefix breaks at ${place}${name}. `),
    "Changed by ",
    causes,
    doubt,
  );
}
