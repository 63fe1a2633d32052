// The timeline of a run: its items by turns, loaded page by page in both directions.

import { api } from "./api.js";
import { CallCard, childView, decidedView } from "./call.js";
import { append, details, h, outLink } from "./dom.js";
import { cost, duration, moment, number, plural, short } from "./format.js";
import { blockView, firstLine, messageBody, plainText, roleName, textView } from "./parts.js";
import { RequestPanel } from "./request.js";

const PAGE = 100; // items
const MOST_ITEMS = 800; // in the page at once; those far away are dropped, and loaded again
const NEAR = "1200px";

/** Turns of one run in an element, and around them what loads more. */
export class Timeline {
  constructor(runId, { isChild = false, onFork = null, onTurn = null } = {}) {
    this.runId = runId;
    this.isChild = isChild;
    this.onFork = onFork;
    this.onTurn = onTurn;
    this.turns = new Map();
    this.children = new Map();
    this.previous = null;
    this.next = null;
    this.lastSeq = null;
    this.hasEnd = false;
    this.before = h(
      "div.more",
      { hidden: true },
      this.moreButton("Show what is before", "backward"),
    );
    this.after = h("div.more", { hidden: true }, this.moreButton("Show what follows", "forward"));
    this.list = h("div.timeline");
    this.element = h("div.timeline-frame", null, this.before, this.list, this.after);
    if (!isChild) this.watch();
  }

  moreButton(words, way) {
    return h("button", { type: "button", onclick: () => this.load(way) }, words);
  }

  watch() {
    const seen = (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting && !target.hidden)
          this.load(target === this.before ? "backward" : "forward");
      }
    };
    this.observer = new IntersectionObserver(seen, { rootMargin: NEAR });
    this.observer.observe(this.before);
    this.observer.observe(this.after);
  }

  close() {
    this.isClosed = true;
    this.observer?.disconnect();
    for (const turn of this.turns.values()) turn.close();
  }

  /** Show the page that begins with these parameters of `items`, instead of what is shown. */
  async open(params) {
    const page = await api.items(this.runId, { limit: PAGE, ...params });
    if (this.isClosed) return;
    for (const turn of this.turns.values()) turn.close();
    this.turns.clear();
    this.list.replaceChildren();
    this.hasEnd = false;
    this.previous = page.previous;
    this.takePage(page, "forward");
  }

  /** Load the next page in a direction, if there is one. */
  load(way) {
    this.loading ??= this.loadPage(way).finally(() => {
      this.loading = null;
      this.watchAgain();
    });
    return this.loading;
  }

  async loadPage(way) {
    const isBack = way === "backward";
    const place = isBack ? this.previous : this.next;
    if (place === null) return;
    try {
      const params = isBack ? { before: place } : { from: place };
      const page = await api.items(this.runId, { limit: PAGE, ...params });
      if (this.isClosed) return;
      if (isBack) this.previous = page.previous;
      this.keepInPlace(() => {
        this.takePage(page, way);
        this.drop(isBack ? "forward" : "backward");
      });
    } catch (error) {
      append(isBack ? this.before : this.after, [h("p.form-error", null, error.message)]);
    }
  }

  /** Change what is above and below without moving what one sees. */
  keepInPlace(change) {
    const turns = [...this.list.children];
    const seen = turns.find((turn) => turn.getBoundingClientRect().bottom > 0);
    const before = seen?.getBoundingClientRect().top;
    change();
    if (seen?.isConnected && !this.isChild)
      window.scrollBy(0, seen.getBoundingClientRect().top - before);
  }

  // An observer reports changes only: what is still near after a page was added is not reported.
  watchAgain() {
    for (const place of this.observer ? [this.before, this.after] : []) {
      this.observer.unobserve(place);
      this.observer.observe(place);
    }
  }

  takePage(page, way) {
    for (const child of page.children) this.children.set(child.run.run_id, child);
    if (way === "backward") this.prepend(page.items);
    else {
      this.append(page.items);
      this.next = page.next;
      this.lastSeq = page.last_seq ?? this.lastSeq;
      this.hasEnd = page.next === null;
    }
    this.placeChildren(page.children);
    if (page.damage && this.hasEnd) this.showDamage(page.damage);
    this.showButtons();
  }

  showButtons() {
    this.before.hidden = this.previous === null;
    this.after.hidden = this.next === null;
  }

  showDamage(damage) {
    if (this.list.querySelector(".failure.damage")) return;
    const text = `The log is damaged from here on: ${damage.reason} (${damage.where})`;
    this.list.append(h("p.failure.damage", null, text));
  }

  /** Add items behind those that are shown. */
  append(items) {
    for (const item of items) {
      this.turnOf(item.turn, false).take(item);
      this.lastSeq = item.seq;
    }
  }

  prepend(items) {
    const groups = Map.groupBy(items, (item) => item.turn);
    for (const [number, group] of [...groups].reverse()) this.turnOf(number, true).prepend(group);
  }

  turnOf(number, isBefore) {
    let turn = this.turns.get(number);
    if (turn) return turn;
    turn = new Turn(number, this);
    this.turns.set(number, turn);
    if (isBefore) this.list.prepend(turn.element);
    else this.list.append(turn.element);
    return turn;
  }

  placeChildren(children) {
    for (const child of children) this.turns.get(child.turn ?? -1)?.child(child);
    for (const child of children.filter((each) => each.turn === null)) {
      for (const turn of this.turns.values()) turn.child(child);
    }
  }

  addChild(child) {
    this.children.set(child.run.run_id, child);
    this.placeChildren([child]);
  }

  childrenOf(turn) {
    return [...this.children.values()].filter((each) => each.turn === turn || each.turn === null);
  }

  /** Drop turns at one end if there are too many items. */
  drop(way) {
    const turns = () => [...this.turns.values()].sort((a, b) => a.number - b.number);
    let count = 0;
    for (const turn of this.turns.values()) count += turn.items.length;
    for (const turn of way === "forward" ? turns().reverse() : turns()) {
      if (count <= MOST_ITEMS || this.turns.size < 3) break;
      count -= turn.items.length;
      if (way === "forward") {
        this.next = turn.items[0].seq;
        this.hasEnd = false;
      } else this.previous = turn.items.at(-1).seq + 1;
      turn.close();
      turn.element.remove();
      this.turns.delete(turn.number);
    }
    this.showButtons();
  }

  childTimeline(runId) {
    const timeline = new Timeline(runId, { isChild: true });
    const place = h("div", { "aria-busy": "true" }, h("p.muted", null, "Loading …"));
    timeline
      .open({})
      .then(() => place.replaceChildren(timeline.element))
      .catch((error) => place.replaceChildren(h("p.form-error", null, error.message)))
      .finally(() => place.removeAttribute("aria-busy"));
    return place;
  }
}

/** One turn: its items in order, and the request as the model saw it. */
class Turn {
  constructor(number, timeline) {
    this.number = number;
    this.timeline = timeline;
    this.runId = timeline.runId;
    this.items = [];
    this.calls = new Map();
    this.facts = h("span.num");
    this.body = h("div.turn-body");
    this.draft = null;
    const title = number ? `Turn ${number}` : "Start";
    const href = `#/run/${encodeURIComponent(this.runId)}/turn/${number}`;
    const id = timeline.isChild ? null : `turn-${number}`;
    const head = h("h2", { id: id && `${id}-title` }, h("a", { href }, title));
    this.requestButton = number ? this.button("Request", () => this.toggleRequest()) : null;
    const fork = timeline.onFork && this.button("Fork", () => timeline.onFork(number));
    if (fork)
      fork.setAttribute(
        "aria-label",
        number ? `Fork after turn ${number}` : "Fork before the first turn",
      );
    const end = h("div.end", null, this.requestButton, fork);
    this.element = h(
      "section.turn",
      { id, tabindex: -1, "aria-label": title, data: { turn: number } },
      h("div.turn-head", null, head, this.facts, end),
      this.body,
    );
    this.requestButton?.setAttribute("aria-pressed", "false");
    this.requestButton?.setAttribute("aria-label", `What the model saw in turn ${number}`);
  }

  button(words, onclick) {
    return h("button.quiet", { type: "button", onclick }, words);
  }

  close() {
    this.panel?.close();
  }

  take(item) {
    this.items.push(item);
    this.draw(item);
    this.showFacts();
  }

  prepend(items) {
    this.items = [...items, ...this.items];
    this.calls.clear();
    this.body.replaceChildren();
    for (const item of this.items) this.draw(item);
    for (const child of this.timeline.childrenOf(this.number)) this.child(child);
    this.showFacts();
  }

  draw(item) {
    if (item.kind === "answer") this.dropDraft();
    const card = this.cardOf(item);
    if (card) card.take(item);
    else {
      const shown = stepView(this.runId, item, this);
      if (shown) this.body.insertBefore(shown, this.draft?.element ?? null);
    }
  }

  cardOf(item) {
    const isAboutCall = CALL_ITEMS.has(item.kind) && item.position !== null;
    return isAboutCall ? this.calls.get(item.position) : undefined;
  }

  addCalls(answer) {
    const blocks = answer.blocks.filter((block) => block.kind === "call");
    if (answer.discarded !== null) return blocks.map((block) => blockView(this.runId, block));
    this.calls.clear();
    return blocks.map((block) => {
      const card = new CallCard(this.runId, block, this.timeline);
      this.calls.set(block.position, card);
      card.id = block.id;
      return card.element;
    });
  }

  child(child) {
    const cards = [...this.calls.values()];
    const card = this.calls.get(child.position) ?? cards.find((each) => each.id === child.call_id);
    if (card) card.child(child);
    else if (child.turn === this.number) this.looseChild(child);
  }

  looseChild(child) {
    const id = CSS.escape(child.run.run_id);
    if (!this.body.querySelector(`[data-run="${id}"]`))
      this.body.append(childView(child, this.timeline));
  }

  showFacts() {
    const answers = this.items.filter((item) => item.kind === "answer");
    const first = this.items[0];
    const parts = [moment(first.at)];
    const took = this.items.at(-1).at - first.at;
    if (this.number) parts.push(duration(took));
    const sums = { input: 0, output: 0, cached: 0, cost: 0 };
    let isPriced = answers.length > 0;
    for (const { tokens, cost: price } of answers) {
      sums.input += (tokens?.input ?? 0) + (tokens?.cache_read ?? 0) + (tokens?.cache_write ?? 0);
      sums.cached += tokens?.cache_read ?? 0;
      sums.output += tokens?.output ?? 0;
      if (price === null) isPriced = false;
      else sums.cost += price;
    }
    if (sums.input || sums.output) {
      const cached = sums.cached ? ` (${short(sums.cached)} cached)` : "";
      parts.push(`${short(sums.input)} in${cached}, ${short(sums.output)} out`);
    }
    if (isPriced) parts.push(cost(sums.cost));
    this.facts.textContent = parts.join(" · ");
  }

  // --- an answer that is being streamed ---

  delta(delta) {
    if (delta.channel === "start") this.dropDraft();
    this.draft ??= this.newDraft();
    this.draft.take(delta);
  }

  newDraft() {
    const draft = new Draft();
    this.body.append(draft.element);
    return draft;
  }

  dropDraft() {
    this.draft?.element.remove();
    this.draft = null;
  }

  // --- the request ---

  toggleRequest(attempt = null) {
    const isShown = this.panel === undefined || this.panel === null;
    if (isShown) {
      this.panel = new RequestPanel(this.runId, this.number, attempt);
      this.element.append(this.panel.element);
    } else {
      this.panel.close();
      this.panel.element.remove();
      this.panel = null;
    }
    this.body.hidden = isShown;
    this.requestButton.setAttribute("aria-pressed", String(isShown));
    this.requestButton.textContent = isShown ? "Steps" : "Request";
    this.timeline.onTurn?.(this.number, isShown);
  }
}

const CALL_ITEMS = new Set([
  "tool_started",
  "tool_withdrawn",
  "tool_progress",
  "tool_result",
  "waits",
  "decided",
]);

/** The answer that is being streamed: its text so far, drawn once a frame. */
class Draft {
  constructor() {
    this.parts = [];
    this.content = h("div.content");
    const who = h("div.step-head", null, h("span.who", null, "Assistant"), "streaming");
    this.element = h("div.step.draft", { "aria-busy": "true" }, who, this.content);
  }

  take({ channel, text, index, name }) {
    if (channel === "start") return;
    const key = channel === "call" ? `call ${index}` : channel;
    let part = this.parts.at(-1);
    if (part?.key !== key) {
      part =
        this.parts.find((each) => each.key === key && channel === "call") ?? this.add(key, channel);
    }
    if (name) part.name.append(name);
    part.text.append(text);
  }

  add(key, channel) {
    const text = h(channel === "call" ? "code" : "span");
    const name = h("b");
    const kind = { text: "plain", call: "plain mono" }[channel] ?? "plain thought";
    const element = h("div", { class: kind }, channel === "call" ? [name, " "] : null, text);
    this.content.querySelector(".cursor")?.classList.remove("cursor");
    element.classList.add("cursor");
    this.content.append(element);
    const part = { key, text, name };
    this.parts.push(part);
    return part;
  }
}

// --- steps ---------------------------------------------------------------------------------------

function step(kind, who, note, ...content) {
  const head = h("div.step-head", null, h("span.who", null, who), note);
  return h("div.step", { class: kind }, head, h("div.content", null, content));
}

function eventLine(...words) {
  return h("div.step.event", null, words);
}

/** The element of an item that is not about one call; null if there is nothing to show. */
function stepView(runId, item, turn) {
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
};

function addedView(runId, item, message, at) {
  const purpose = item.purposes[at];
  const why = purpose ? (PURPOSES[purpose] ?? purpose) : null;
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
  if (item.kind !== "tool_result") return eventLine(words);
  const text = item.result.blocks.map((block) => blockView(runId, block, "code"));
  return step("note", `Result of ${name}`, null, text);
}
