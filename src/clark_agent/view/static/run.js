// The page of one run: its head, the overview of its turns, its timeline, and what one can do.

import { api } from "./api.js";
import { act, openCompare, openFork, openReplay } from "./dialogs.js";
import { announce, byId, fill, h } from "./dom.js";
import { cost, duration, moment, plural } from "./format.js";
import { firstLine } from "./parts.js";
import { damageWords, isOpen, statusView } from "./status.js";
import { steerForm } from "./steer.js";
import { Timeline } from "./timeline.js";
import { totalsView } from "./totals.js";
import { waitingCard } from "./waiting.js";

const NEAR_END = 160; // pixels
const TURNS = 500;
const BEHIND_ALL = 2 ** 31 - 1;
const READING = 1_000; // milliseconds
const QUIET = 60_000; // after this, the process of a run may be dead
const PINNED = 400; // milliseconds in which scrolling is that of the page itself

/** The page of a run. */
export class RunPage {
  constructor(place, route, session) {
    this.runId = route.runId;
    this.route = route;
    this.session = session;
    this.head = h("header.run-head");
    this.outline = h("nav.outline", { "aria-label": "Turns" });
    this.waiting = h("section.stack", { "aria-label": "Waiting", hidden: true });
    const onFork = session.can_run ? (turn) => openFork(this.view, turn, session) : null;
    this.timeline = new Timeline(this.runId, {
      onFork,
      onTurn: (turn, isRequest) => this.link(turn, isRequest),
    });
    this.steer = h("div.steer-place");
    const follow = h("button.primary", { type: "button", onclick: () => this.toLast() }, "Follow it");
    this.goesOn = h("p.goes-on", { role: "status", hidden: true }, "The run has gone on. ", follow);
    this.missing = h("p.notice", { role: "status", hidden: true });
    const parts = [this.waiting, this.missing, this.timeline.element, this.goesOn, this.steer];
    const column = h("div.column", null, parts);
    this.element = h("article.run", { "aria-label": "Run" }, this.head, this.outline, column);
    place.append(this.element);
    this.onScroll = () => this.scrolled();
    window.addEventListener("scroll", this.onScroll, { passive: true });
  }

  async open() {
    const [view, turns] = await Promise.all([api.run(this.runId), api.turns(this.runId)]);
    if (this.isClosed) return;
    this.show(view);
    this.showTurns(turns);
    const isAnywhere = this.route.turn === null && this.route.seq === null;
    const isLive = view.run.status === "running" && isAnywhere;
    const hasTurn = this.route.turn !== null && (await this.openTurn(this.route.turn));
    if (!hasTurn) await this.timeline.open(this.firstPage(isLive));
    if (this.route.seq !== null) this.route.turn = Math.min(...this.timeline.turns.keys());
    if (hasTurn || this.route.seq !== null) await this.timeline.load("backward");
    if (this.isClosed) return;
    await this.go(this.route);
    if (isLive) toEnd();
    if (!api.isStatic && isOpen(view.run.status)) this.follow();
    this.watchReading().catch((error) => announce(error.message, "error"));
  }

  /** Show how the totals and the overview grow while the server reads a long log. */
  async watchReading() {
    while (!this.isClosed && !this.view.indexed.is_complete) {
      await new Promise((done) => setTimeout(done, READING));
      const [view, turns] = await Promise.all([api.run(this.runId), api.turns(this.runId)]);
      if (this.isClosed) return;
      this.show(view);
      if (this.turnRows.length <= TURNS) this.showTurns(turns);
    }
  }

  firstPage(isLive) {
    if (this.route.seq !== null) return { from: this.route.seq };
    return isLive ? { before: BEHIND_ALL } : {};
  }

  /** Show the part of the timeline with a turn. Return whether there is such a turn. */
  async openTurn(turn) {
    try {
      await this.timeline.open({ turn });
      return true;
    } catch (error) {
      if (error.status !== 404) throw error;
      return false;
    }
  }

  async update(route) {
    this.route = route;
    if (route.turn === null) return;
    const isShown = this.timeline.turns.has(route.turn);
    if (!isShown && (await this.openTurn(route.turn))) await this.timeline.load("backward");
    this.go(route);
  }

  close() {
    this.isClosed = true;
    window.removeEventListener("scroll", this.onScroll);
    this.following?.close();
    this.timeline.close();
    byId("connection").textContent = "";
    delete byId("connection").dataset.state;
  }

  // --- head ---

  show(view) {
    this.view = view;
    this.title = firstLine(view.run.task ?? view.run.run_id, 80) || view.run.run_id;
    document.title = `${this.title} · clark-agent`;
    fill(
      this.head,
      this.titleLine(),
      this.facts(),
      totalsView(view),
      this.actions(),
      this.warnings(),
    );
    this.showWaiting(view);
    this.showSteer(view);
  }

  titleLine() {
    const { run } = this.view;
    return h(
      "div.title",
      null,
      h("h1", null, firstLine(run.task ?? run.run_id, 600)),
      statusView(run.status),
    );
  }

  facts() {
    const { view } = this;
    const { run } = view;
    const fact = (name, value) => value && h("span", null, `${name} `, h("b", null, value));
    const tree = view.tree_cost !== view.cost ? ` (${cost(view.tree_cost)} with child runs)` : "";
    return h("div.facts", null, [
      fact("Model", run.model),
      fact("Agent", run.agent),
      fact("Began", moment(run.began_at)),
      fact("Took", duration(run.ms)),
      run.ms - view.worked_ms >= 1000 ? fact("Worked", duration(view.worked_ms)) : null,
      fact("", plural(view.turns, "turn")),
      fact("", plural(view.tool_calls, "tool call")),
      view.cost === null ? null : fact("Cost", cost(view.cost) + tree),
      h("span", null, "Id ", h("code", null, run.run_id)),
    ]);
  }

  actions() {
    const { view, session } = this;
    const { run } = view;
    const error = h("p.form-error", { role: "alert" });
    const button = (words, onclick, kind = "") =>
      h("button", { type: "button", class: kind, onclick }, words);
    const can = !api.isStatic;
    const links = [
      view.parents[0] && this.runLink(view.parents[0], "↑ the run above"),
      run.forked_from &&
        this.runLink(run.forked_from.run_id, `forked from turn ${run.forked_from.turn}`),
      run.forked_from && can && this.diffLink(run.forked_from.run_id, "Side by side"),
      view.forks.slice(0, 5).map((id, at) => this.runLink(id, `fork ${at + 1}`)),
    ];
    const isQuiet = run.status !== "running" || Date.now() - run.last_at > QUIET;
    const stop = (event) => act(event.currentTarget, error, () => this.stop());
    const resume = (event) => act(event.currentTarget, error, () => this.resume());
    const buttons = [
      isOpen(run.status) && session.can_write && button("■ Stop", stop, "danger"),
      run.status !== "done" && isQuiet && session.can_run && button("Resume", resume),
      session.can_run && button("Fork", () => openFork(view, view.turns, session)),
      can && button("Compare …", () => openCompare(view)),
      session.can_replay && !isOpen(run.status) && button("Replay", () => openReplay(run.run_id)),
      can && button("Copy link", () => copyLink(run.run_id), "quiet"),
    ];
    return h("div", null, h("div.actions", null, buttons, links), error);
  }

  runLink(id, words) {
    return h("a.button.quiet", { href: `#/run/${encodeURIComponent(id)}` }, words);
  }

  diffLink(id, words) {
    return h(
      "a.button",
      { href: `#/diff/${encodeURIComponent(id)}/${encodeURIComponent(this.runId)}` },
      words,
    );
  }

  warnings() {
    const { error, damage, indexed } = this.view;
    const omitted = api.isStatic ? (this.session.omitted ?? []) : [];
    return [
      error ? h("p.failure", { role: "alert" }, error) : null,
      damage
        .slice(0, 1)
        .map((each) => h("p.failure", null, damageWords(each))),
      indexed.is_complete
        ? null
        : h(
            "p.notice",
            null,
            `The totals count the first ${plural(indexed.records, "record")}; the rest is still being read.`,
          ),
      omitted.map((words) => h("p.notice", null, words)),
    ];
  }

  async stop() {
    const done = await api.cancel(this.runId, { reason: "stopped on the page" });
    announce(done.message ?? "The run was asked to stop.");
  }

  async resume() {
    const done = await api.resume(this.runId);
    announce(done.message ?? "The run goes on.");
    this.follow();
  }

  // --- what waits, and steering ---

  showWaiting(view) {
    const key = view.waiting.map((each) => each.request_id).join(" ");
    this.waiting.hidden = !view.waiting.length;
    if (key === this.waitingKey) return;
    this.waitingKey = key;
    const cards = view.waiting.map((request) =>
      waitingCard(request, this.session, () => this.decided()),
    );
    fill(this.waiting, cards);
  }

  async decided() {
    const view = await api.run(this.runId);
    if (this.isClosed) return;
    this.show(view);
    this.follow();
  }

  showSteer(view) {
    const can = this.session.can_write && view.run.status === "running" && !api.isStatic;
    if (!can) this.steer.replaceChildren();
    else if (!this.steer.firstChild) this.steer.append(steerForm(this.runId));
  }

  // --- turns ---

  showTurns(page) {
    this.turnRows = page.turns;
    this.drawTurns(page);
  }

  drawTurns(page) {
    const slowest = Math.max(1, ...this.turnRows.map((turn) => turn.ms ?? 0));
    const list = h(
      "ol",
      null,
      this.turnRows.map((turn) => this.turnLink(turn, slowest)),
    );
    const more =
      page.next === null
        ? null
        : h(
            "button.link",
            { type: "button", onclick: () => this.moreTurns(page.next) },
            "More turns",
          );
    const ends = h("div.actions", null, [
      h("button.quiet", { type: "button", onclick: () => this.toStart() }, "↑ Start"),
      h("button.quiet", { type: "button", onclick: () => this.toLast() }, "↓ End"),
    ]);
    fill(this.outline, h("h2", null, plural(page.total, "turn")), list, more, ends);
    this.scrolled();
  }

  turnLink(turn, slowest) {
    const names = turn.tools.join(", ");
    const what = names || (turn.discarded ? "asked again" : "answer");
    const flag = (kind, sign, words) =>
      h("span.flag", { class: kind, role: "img", "aria-label": words, title: words }, sign);
    const flags = h("span.flags", null, [
      turn.errors ? flag("bad", `✗${turn.errors}`, plural(turn.errors, "error")) : null,
      turn.discarded ? flag("warn", "↻", plural(turn.discarded, "discarded answer")) : null,
      turn.edited_by.length
        ? flag("accent", "✎", `request edited by ${turn.edited_by.join(", ")}`)
        : null,
      turn.is_compacted ? flag("accent", "⊟", "older turns became a summary before this turn") : null,
      turn.has_children ? flag("", "⤷", "has child runs") : null,
    ]);
    const bar = h("span.bar-of-time", {
      style: { width: `${(100 * (turn.ms ?? 0)) / slowest}%` },
    });
    const href = `#/run/${encodeURIComponent(this.runId)}/turn/${turn.turn}`;
    const label = `Turn ${turn.turn}: ${what}`;
    const link = h("a", { href, title: label, data: { turn: turn.turn } }, [
      h("span.n", null, turn.turn),
      h("span.what", null, what),
      flags,
      h("span.took", null, turn.ms === null ? "" : duration(turn.ms)),
      bar,
    ]);
    return h("li", { class: turn.errors ? "has-error" : "" }, link);
  }

  async moreTurns(from) {
    const page = await api.turns(this.runId, from);
    this.turnRows = [...this.turnRows, ...page.turns];
    this.drawTurns(page);
  }

  /** Ask again for the newest turns, at most once a second. */
  refreshTurns() {
    if (this.refreshing || this.isClosed) return;
    this.refreshing = setTimeout(
      async () => {
        this.refreshing = null;
        const last = this.turnRows.at(-1)?.turn ?? 0;
        try {
          const page = await api.turns(this.runId, Math.max(0, last));
          if (this.isClosed) return;
          this.turnRows = [...this.turnRows.filter((turn) => turn.turn < last), ...page.turns];
          this.drawTurns(page);
        } catch {
          // The next item asks again.
        }
      },
      this.turnRows.length > TURNS ? 5_000 : 400,
    );
  }

  scrolled() {
    if (this.drawing) return;
    this.drawing = requestAnimationFrame(() => {
      this.drawing = null;
      const turn = this.turnInView();
      if (this.timeline.hasEnd) this.goesOn.hidden = true;
      const isOurs = performance.now() < this.pinnedUntil;
      if (turn !== undefined && !isOurs) this.markTurn(turn);
    });
  }

  turnInView() {
    const turns = [...this.timeline.turns.values()].sort((a, b) => a.number - b.number);
    const above = turns.filter((turn) => turn.element.getBoundingClientRect().top < 140);
    return (above.at(-1) ?? turns[0])?.number;
  }

  /** Mark a turn that was chosen, also if it cannot be scrolled to the top. */
  pin(turn) {
    this.pinnedUntil = performance.now() + PINNED;
    this.markTurn(turn);
  }

  markTurn(turn) {
    this.currentTurn = turn;
    for (const link of this.outline.querySelectorAll("a[data-turn]")) {
      if (Number(link.dataset.turn) === turn) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }

  async go({ turn, isRequest, attempt }) {
    if (turn === null) return;
    const found = this.timeline.turns.get(turn);
    this.missing.hidden = found !== undefined;
    if (!found) {
      const where = api.isStatic ? "This file" : "This run";
      this.missing.textContent = `${where} has no turn ${turn}.`;
      this.missing.scrollIntoView({ block: "nearest" });
      return;
    }
    if (isRequest && !found.panel && found.requestButton) found.toggleRequest(attempt);
    await found.panel?.ready;
    found.element.scrollIntoView({ block: "start" });
    found.element.focus({ preventScroll: true });
    this.pin(turn);
  }

  link(turn, isRequest) {
    const place = `#/run/${encodeURIComponent(this.runId)}/turn/${turn}${isRequest ? "/request" : ""}`;
    history.replaceState(null, "", place);
  }

  move(by) {
    const numbers = [...this.timeline.turns.keys()].sort((a, b) => a - b);
    const at = numbers.indexOf(this.currentTurn ?? numbers[0]) + by;
    const turn = numbers[Math.max(0, Math.min(numbers.length - 1, at))];
    if (turn === undefined) return;
    this.link(turn, false);
    this.go({ turn, isRequest: false });
  }

  async toStart() {
    if (this.timeline.previous !== null) await this.timeline.open({});
    window.scrollTo(0, 0);
    this.pin(Math.min(...this.timeline.turns.keys()));
  }

  async toLast() {
    if (!this.timeline.hasEnd) await this.timeline.open({ before: BEHIND_ALL });
    this.goesOn.hidden = this.timeline.hasEnd;
    toEnd();
    this.pin(Math.max(...this.timeline.turns.keys()));
  }

  foldCalls() {
    const cards = [...this.timeline.list.querySelectorAll("details.call")];
    const isAnyOpen = cards.some((card) => card.open);
    for (const card of cards) card.open = !isAnyOpen;
  }

  // --- live ---

  follow() {
    if (this.following || api.isStatic) return;
    const after = this.timeline.hasEnd
      ? (this.timeline.lastSeq ?? this.view.last_seq)
      : this.view.last_seq;
    const say = (words, state) => {
      byId("connection").textContent = words;
      byId("connection").dataset.state = state;
    };
    this.following = api.follow(this.runId, after, {
      connected: () => say("", "open"),
      disconnected: () => say("reconnecting …", "lost"),
      refused: () =>
        say("The server was started again: open the address that it printed.", "lost"),
      item: (item) => this.itemCame(item),
      delta: (delta) => this.deltaCame(delta),
      run: (view) => this.viewCame(view),
      end: () => this.ended(),
      failed: (failure) => {
        this.following = null;
        announce(failure.message, "error");
      },
    });
  }

  itemCame(item) {
    this.refreshTurns();
    const { timeline } = this;
    if (item.seq <= (timeline.lastSeq ?? -1)) return;
    const isNext = timeline.lastSeq === null || item.seq === timeline.lastSeq + 1;
    if (!timeline.hasEnd || !isNext) {
      timeline.isBehind();
      this.goesOn.hidden = false;
      return;
    }
    const wasAtEnd = isAtEnd();
    timeline.append([item]);
    this.goesOn.hidden = true;
    if (wasAtEnd) toEnd();
  }

  deltaCame(delta) {
    const { timeline } = this;
    if (!timeline.hasEnd) return;
    const turn = [...timeline.turns.values()].at(-1);
    if (!turn || delta.seq <= timeline.lastSeq) return;
    const wasAtEnd = isAtEnd();
    turn.delta(delta);
    if (wasAtEnd) toEnd();
  }

  viewCame(view) {
    const wasAtEnd = view.run.status === "running" && isAtEnd();
    this.show(view);
    for (const child of view.children) this.timeline.addChild(child);
    if (wasAtEnd) toEnd();
  }

  async ended() {
    this.following = null;
    byId("connection").textContent = "";
    this.refreshTurns();
    try {
      const view = await api.run(this.runId);
      if (!this.isClosed) this.viewCame(view);
    } catch (error) {
      announce(error.message, "error");
    }
  }

  keys = {
    j: () => this.move(1),
    k: () => this.move(-1),
    g: () => this.toStart(),
    G: () => this.toLast(),
    e: () => this.foldCalls(),
    r: () => this.timeline.turns.get(this.currentTurn)?.requestButton?.click(),
    f: () =>
      this.session.can_run &&
      openFork(this.view, this.currentTurn ?? this.view.turns, this.session),
    s: () => byId("steer")?.focus(),
    Escape: () => {
      if (!api.isStatic) location.hash = "#/";
    },
  };
}

function isAtEnd() {
  const { scrollHeight } = document.documentElement;
  return window.scrollY + window.innerHeight >= scrollHeight - NEAR_END;
}

function toEnd() {
  window.scrollTo(0, document.documentElement.scrollHeight);
}

async function copyLink(runId) {
  const address = new URL(`#/run/${encodeURIComponent(runId)}`, location.href);
  address.search = "";
  try {
    await navigator.clipboard.writeText(address.href);
    announce("The link was copied.");
  } catch {
    announce(address.href);
  }
}
