// The steps of a timeline that are not about one call.

import { decidedView } from "./call.js";
import { details, h, outLink } from "./dom.js";
import { cost, duration, number, plural } from "./format.js";
import { blockView, firstLine, messageBody, plainText, roleName, textView } from "./parts.js";

function step(kind, who, note, ...content) {
  const head = h("div.step-head", null, h("span.who", null, who), note);
  return h("div.step", { class: kind }, head, h("div.content", null, content));
}

function eventLine(...words) {
  return h("div.step.event", null, words);
}

/** The element of an item that is not about one call; null if there is nothing to show. */
export function stepView(runId, item, turn) {
  switch (item.kind) {
    case "began":
      return beganView(runId, item);
    case "added":
      return item.messages
        .map((message, at) => addedView(runId, item, message, at))
        .reduce(joined, null);
    case "steered":
      return steeredView(runId, item);
    case "context_changed":
      return contextView(runId, item);
    case "gated":
      return gatedView(item);
    case "tools_changed":
      return toolsView(item);
    case "request":
      return item.attempt > 1 ? eventLine(`↻ asked again: attempt ${item.attempt}`) : null;
    case "answer":
      return answerView(runId, item, turn);
    case "consulted":
      return consultedView(runId, item);
    case "batch_ended":
      return null;
    case "cancelled":
      return eventLine(`■ cancelled from outside${item.reason ? `: ${item.reason}` : ""}`);
    case "suspended":
      return eventLine("○ The run waits. No process works on it until it is resumed.");
    case "resumed":
      return eventLine(`▶ resumed${item.ms === null ? "" : ` after ${duration(item.ms)}`}`);
    case "decided":
      return h("div.step.event", null, decidedView(runId, item));
    case "ended":
      return endedView(item);
    case "failed":
      return failedView(runId, item);
    default:
      return otherView(runId, item);
  }
}

function joined(all, element) {
  const place = all ?? document.createDocumentFragment();
  place.append(element);
  return place;
}

function beganView(runId, item) {
  const place = document.createDocumentFragment();
  if (item.system_prompt.length) {
    const build = () => textView(runId, item.system_prompt, "plain");
    place.append(
      h("div.step", null, details(["System prompt"], build, { class: "quiet-details" })),
    );
  }
  const facts = [
    item.tools.length ? `Tools: ${item.tools.join(", ")}` : "No tools",
    item.plugins.length ? `Plugins: ${item.plugins.join(", ")}` : null,
    item.tool_source ? `Tools from: ${item.tool_source}` : null,
    item.history ? `Continues ${plural(item.history, "message")}` : null,
  ].filter(Boolean);
  for (const fact of facts) place.append(eventLine(fact));
  for (const message of item.messages) {
    place.append(step("user", roleName(message), null, messageBody(runId, message)));
  }
  return place;
}

const PURPOSES = {
  steering: "steering",
  follow_up: "follow-up",
  wrap_up: "few turns are left",
  budget: "little budget is left",
  nudge: "reminds the model of its tools",
  final_answer: "accepted as the answer",
  before_request: "before the request",
};

function addedView(runId, item, message, at) {
  if (message.blocks[0]?.kind === "compaction")
    return h("div.step", null, messageBody(runId, message));
  const purpose = item.purposes[at];
  const by = item.plugin ? `by ${item.plugin}` : null;
  const why = [purpose && (PURPOSES[purpose] ?? purpose), by].filter(Boolean).join(" · ");
  const kind = message.role === "user" ? "steering" : "note";
  return step(kind, roleName(message), why, messageBody(runId, message));
}

function steeredView(runId, item) {
  const when = item.when.replaceAll("_", " ");
  const words = firstLine(plainText(item.message), 120);
  return eventLine(`✎ message ${item.number} accepted (${when}): ${words}`);
}

function contextView(runId, item) {
  const what = item.is_lasting ? "changed the transcript" : "changed what the model sees";
  const count = item.changes.length + item.more;
  const words = [h("b", null, item.plugin), ` ${what} · ${plural(count, "place")}`];
  const build = () =>
    h(
      "div",
      null,
      item.changes.map((change) => changeView(runId, change)),
    );
  return h("div.step.event", null, details(words, build, { class: "quiet-details" }));
}

/** Messages of a request that were replaced by others. */
export function changeView(runId, change) {
  const count = change.inserted.length + change.more;
  const place =
    change.removed > 1
      ? `messages ${change.start}–${change.start + change.removed - 1}`
      : `message ${change.start}`;
  const words = change.removed
    ? `${place} replaced by ${count ? plural(count, "message") : "nothing"}`
    : `${plural(count, "message")} inserted at ${change.start}`;
  const shown = change.inserted.map((message) => [
    h("p.label", null, roleName(message)),
    messageBody(runId, message),
  ]);
  const more = change.more
    ? h("p.muted", null, `… and ${plural(change.more, "message")} more`)
    : null;
  return h("div.part", null, h("p", null, words), shown, more);
}

function gatedView(item) {
  const tools =
    item.allow === null ? "allows all tools" : `allows only ${item.allow.join(", ") || "no tools"}`;
  return eventLine(h("b", null, item.plugin), ` ${tools} from here on`);
}

function toolsView(item) {
  const words = [
    item.added.length ? `new tools: ${item.added.join(", ")}` : null,
    item.removed.length ? `tools removed: ${item.removed.join(", ")}` : null,
  ];
  return eventLine(words.filter(Boolean).join("; "));
}

function answerView(runId, item, turn) {
  const notes = [];
  if (item.ms !== null) notes.push(h("span", null, duration(item.ms)));
  if (item.tokens) notes.push(h("span", null, `${number(item.tokens.output)} tokens`));
  if (!["end_turn", "tool_use"].includes(item.stop_reason)) {
    notes.push(h("span.chip.warn", null, item.stop_reason.replaceAll("_", " ")));
  }
  if (item.discarded !== null)
    notes.push(h("span.chip.warn", null, `discarded: ${item.discarded}`));
  const said = item.blocks
    .filter((block) => block.kind !== "call")
    .map((block) => blockView(runId, block));
  const failure = item.error
    ? h("p.failure", null, [item.error, item.error_text].filter(Boolean).join(": "))
    : null;
  const kind = item.discarded === null ? "answer" : "answer discarded";
  const calls = turn.addCalls(item);
  return step(kind, "Assistant", notes, said, calls, failure, sourcesView(item.sources));
}

function consultedView(runId, item) {
  const facts = [duration(item.ms)];
  if (item.tokens) {
    const { input, output, cache_read: cached, cache_write: written } = item.tokens;
    facts.push(`${number(input + cached + written)} in`, `${number(output)} out`);
  }
  if (item.cost !== null) facts.push(cost(item.cost));
  const notes = [h("span", null, facts.join(" · "))];
  if (!["end_turn", "tool_use"].includes(item.stop_reason) && !item.error)
    notes.push(h("span.chip.warn", null, item.stop_reason.replaceAll("_", " ")));
  const who = `${item.plugin} asked ${item.model ?? "the model"}`;
  const failure = item.error
    ? h("div.failure", null, item.error, item.error_text && textView(runId, item.error_text, "plain"))
    : null;
  const said = item.blocks.map((block) => blockView(runId, block));
  const answer = said.length
    ? details(["Answer", h("span.muted", null, ` ${firstWords(item.blocks)}`)], () => said, {
        class: "quiet-details",
      })
    : null;
  return step("consulted", who, notes, answer, failure);
}

function firstWords(blocks) {
  const text = blocks.find((block) => block.kind === "text" && block.channel === "text");
  return text ? firstLine(text.text.text, 120) : "";
}

function sourcesView(sources) {
  if (!sources.length) return null;
  const lines = sources.map(({ title, url, quote }) => {
    const name = title ?? url ?? "source";
    const link = url ? outLink(url, name) : name;
    return h("li", null, link, quote ? h("span.muted", null, ` “${firstLine(quote)}”`) : null);
  });
  return h("div.part", null, h("p.label", null, "Sources"), h("ul", null, lines));
}

function endedView(item) {
  const limit = item.limit ? ` (${item.limit})` : "";
  return eventLine(`● The run ended: ${item.outcome.replaceAll("_", " ")}${limit}`);
}

function failedView(runId, item) {
  const partial = item.partial.length
    ? [
        h("p.label", null, "What the model had said"),
        item.partial.map((block) => blockView(runId, block)),
      ]
    : null;
  const lost = item.undelivered.length
    ? [
        h("p.label", null, "Not delivered"),
        item.undelivered.map((message) => messageBody(runId, message)),
      ]
    : null;
  const note = item.reason ? h("span.chip.bad", null, item.reason) : null;
  return step(
    "failed",
    `Failed: ${item.error}`,
    note,
    textView(runId, item.text, "plain"),
    partial,
    lost,
  );
}

// An item about a call whose answer is not in the page, or of a kind that this page does not know.
function otherView(runId, item) {
  const name = item.name ?? "";
  const words = `${item.kind.replaceAll("_", " ")} ${name}`;
  if (item.kind === "other") {
    const build = () => textView(runId, item.data);
    return h("div.step.event", null, details([`Record: ${name}`], build, { class: "quiet-details" }));
  }
  if (item.kind !== "tool_result") return eventLine(words);
  const text = item.result.blocks.map((block) => blockView(runId, block, "code"));
  return step("note", `Result of ${name}`, null, text);
}
