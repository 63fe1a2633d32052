// The timeline of a run: its items by turns, loaded page by page in both directions.

import { api } from "./api.js";
import { CallCard, childView } from "./call.js";
import { append, h } from "./dom.js";
import { cost, duration, moment, short } from "./format.js";
import { blockView } from "./parts.js";
import { RequestPanel } from "./request.js";
import { damageWords } from "./status.js";
import { stepView } from "./steps.js";

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
    this.list.append(h("p.failure.damage", null, damageWords(damage)));
  }

  /** There are items behind those that are shown, which are to be loaded. */
  isBehind() {
    this.next ??= (this.lastSeq ?? -1) + 1;
    this.hasEnd = false;
    this.showButtons();
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
    const answers = this.items.filter(({ kind }) => kind === "answer" || kind === "consulted");
    const first = this.items[0];
    const began = first.at - (first.kind === "consulted" ? first.ms : 0);
    const parts = [moment(began)];
    const took = this.items.at(-1).at - began;
    if (this.number) parts.push(duration(took));
    const sums = { input: 0, output: 0, cached: 0, cost: 0 };
    const paid = answers.filter(({ tokens }) => tokens !== null);
    let isPriced = paid.length > 0;
    for (const { tokens, cost: price } of paid) {
      sums.input += tokens.input + tokens.cache_read + tokens.cache_write;
      sums.cached += tokens.cache_read;
      sums.output += tokens.output;
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
