// The list of runs: search, filters, and rows that are loaded as one scrolls.

import { api } from "./api.js";
import { announce, append, fill, h } from "./dom.js";
import { ago, cost, duration, moment, number, plural, short } from "./format.js";
import { firstLine } from "./parts.js";
import { statusView, statusWords } from "./status.js";
import { visible } from "./visible.js";

const PAGE = 100;
const NAMES = 5; // of files that cannot be read
const TYPING = 200; // milliseconds after the last key
const SOON = 700; // until the next look while the server still reads logs
const COLUMNS = ["Status", "Task", "Model", "Began", "Time", "Tokens", "Cost"];

/** The page with all runs. */
export class RunListPage {
  title = "Runs";

  constructor(place, route, session) {
    this.filters = { q: "", status: "", model: "", agent: "" };
    this.readFilters(route);
    this.rows = [];
    this.current = null;
    this.marked = null;
    this.pages = 0;
    this.build(place);
    this.timer = setInterval(() => this.refresh(), session.refresh_ms);
  }

  readFilters(route) {
    for (const name of Object.keys(this.filters)) this.filters[name] = route.query.get(name) ?? "";
  }

  build(place) {
    this.search = h("input", {
      type: "search",
      id: "search",
      placeholder: "Search runs",
      autocomplete: "off",
      value: this.filters.q,
    });
    this.search.addEventListener("input", () => this.typed());
    const label = h(
      "label.search",
      { for: "search" },
      h("span.visually-hidden", null, "Search runs"),
      this.search,
    );
    this.selects = ["status", "model", "agent"].map((name) => this.select(name));
    this.count = h("span.count", { role: "status" });
    const head = h(
      "form.list-head",
      { role: "search", onsubmit: (event) => event.preventDefault() },
      label,
    );
    append(head, [this.selects.map((each) => each.label), this.count]);
    const titles = COLUMNS.map((name, at) =>
      h("span", { role: "columnheader", class: at > 3 ? "end" : "" }, name),
    );
    this.body = h("div", { role: "rowgroup" });
    this.table = h("div.runs", { role: "treegrid", "aria-label": "Runs" });
    this.table.append(
      h("div", { role: "rowgroup" }, h("div.runs-head", { role: "row" }, titles)),
      this.body,
    );
    this.more = h(
      "div.more",
      { hidden: true },
      h("button", { type: "button", onclick: () => this.loadMore() }, "More"),
    );
    this.note = h("div.empty", { hidden: true });
    this.damaged = h("p.notice", { hidden: true });
    place.append(
      h(
        "div.list",
        null,
        h("h1.visually-hidden", null, "Runs"),
        head,
        this.damaged,
        this.table,
        this.note,
        this.more,
      ),
    );
    this.observer = new IntersectionObserver(
      (entries) => {
        if (entries.some((entry) => entry.isIntersecting)) this.loadMore();
      },
      { rootMargin: "800px" },
    );
    this.observer.observe(this.more);
  }

  select(name) {
    const input = h("select", { id: `filter-${name}` });
    input.addEventListener("change", () => {
      this.filters[name] = input.value;
      this.changed();
    });
    const words = name[0].toUpperCase() + name.slice(1);
    const label = h("label", { for: input.id }, h("span.visually-hidden", null, words), input);
    return { name, input, label, words };
  }

  async open() {
    await this.reload();
  }

  update(route) {
    this.readFilters(route);
    this.search.value = this.filters.q;
    this.reload();
  }

  close() {
    this.isClosed = true;
    clearInterval(this.timer);
    clearTimeout(this.typing);
    clearTimeout(this.soon);
    this.observer.disconnect();
    this.request?.abort();
  }

  typed() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => {
      this.filters.q = this.search.value;
      this.changed();
    }, TYPING);
  }

  changed() {
    const query = new URLSearchParams(Object.entries(this.filters).filter(([, value]) => value));
    history.replaceState(null, "", query.size ? `#/?${query}` : "#/");
    this.reload();
  }

  async reload() {
    this.request?.abort();
    this.request = new AbortController();
    this.table.setAttribute("aria-busy", "true");
    try {
      const page = await api.runs({ ...this.filters, limit: PAGE }, this.request.signal);
      if (!this.isClosed) this.show(page);
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
    } finally {
      this.table.removeAttribute("aria-busy");
    }
  }

  fail(error) {
    this.note.hidden = false;
    fill(this.note, h("p.form-error", null, error.message));
  }

  show(page) {
    clearTimeout(this.soon);
    this.shown = shapeOf(page);
    this.pages = 1;
    const kept = this.current?.run.run_id;
    const hadFocus = this.body.contains(document.activeElement);
    this.rows = [];
    this.current = null;
    this.body.replaceChildren();
    this.addRows(page.runs);
    const row = this.rows.find((each) => each.run.run_id === kept);
    if (row) this.mark(row, hadFocus);
    this.next = page.next;
    this.more.hidden = page.next === null;
    for (const select of this.selects) this.fillSelect(select, page);
    this.showCount(page);
    this.showNote(page);
    this.showDamaged(page);
    if (page.known < page.of) this.soon = setTimeout(() => this.refresh(), SOON);
  }

  fillSelect({ name, input, words, label }, page) {
    const values = page[{ status: "statuses", model: "models", agent: "agents" }[name]];
    const all = { status: "All states", model: "All models", agent: "All agents" }[name];
    const chosen = this.filters[name];
    const options = chosen && !values.includes(chosen) ? [...values, chosen] : values;
    const shown = (value) => (name === "status" ? statusWords(value) : value);
    fill(
      input,
      h("option", { value: "" }, all),
      options.map((value) => h("option", { value }, shown(value))),
    );
    input.value = chosen;
    input.setAttribute("aria-label", words);
    label.hidden = values.length < 2 && !chosen;
  }

  showCount({ total, known, of, search }) {
    const parts = [`${number(total)} ${total === 1 ? "run" : "runs"}`];
    if (known < of) parts.push(`reading ${number(known)} of ${number(of)} logs`);
    if (search?.kind === "scan")
      parts.push(`searched in the newest ${number(search.scanned)} logs`);
    this.count.textContent = parts.join(" · ");
  }

  showNote({ runs, of }) {
    this.note.hidden = runs.length > 0;
    const isFiltered = Object.values(this.filters).some(Boolean);
    if (isFiltered || of) {
      const clear = h(
        "button.link",
        { type: "button", onclick: () => this.clear() },
        "Show all runs",
      );
      fill(this.note, h("p", null, "No run matches."), h("p", null, clear));
    } else {
      const command = h("code", null, "clark-agent run --log …");
      fill(
        this.note,
        h("p", null, "There are no runs in this store yet."),
        h("p", null, "Start one: ", command),
      );
    }
  }

  showDamaged({ unreadable }) {
    this.damaged.hidden = !unreadable.length;
    const names = unreadable.slice(0, NAMES).map(visible).join(", ");
    const more = unreadable.length > NAMES ? ", …" : "";
    const files = plural(unreadable.length, "damaged log");
    this.damaged.textContent = `${files} cannot be listed, because the first record cannot be read: ${names}${more}`;
  }

  clear() {
    this.filters = { q: "", status: "", model: "", agent: "" };
    this.search.value = "";
    this.changed();
  }

  async loadMore() {
    if (!this.next || this.isLoading) return;
    this.isLoading = true;
    const { next, request } = this;
    try {
      const page = await api.runs({ ...this.filters, limit: PAGE, after: next }, request.signal);
      this.addRows(page.runs);
      this.showCount(page);
      this.pages += 1;
      this.next = page.next;
      this.more.hidden = page.next === null;
    } catch (error) {
      if (error.name !== "AbortError") announce(error.message, "error");
    } finally {
      this.isLoading = false;
    }
    this.observer.unobserve(this.more);
    this.observer.observe(this.more);
  }

  /** Ask again for the first page, unless more of the list is open. */
  async refresh() {
    if (document.hidden || this.pages !== 1 || this.hasUnfolded || this.isLoading) return;
    try {
      const page = await api.runs({ ...this.filters, limit: PAGE }, this.request?.signal);
      if (!this.isClosed && this.pages === 1 && shapeOf(page) !== this.shown) this.show(page);
    } catch {
      // The next one may work; what was loaded stays.
    }
  }

  addRows(runs, level = 1, behind = null) {
    const made = runs.map((run) => new Row(run, level, this));
    if (behind === null) this.rows.push(...made);
    else this.rows.splice(this.rows.indexOf(behind) + 1, 0, ...made);
    const elements = made.map((row) => row.element);
    if (behind === null) this.body.append(...elements);
    else behind.element.after(...elements);
    return made;
  }

  removeRows(rows) {
    for (const row of rows) {
      this.removeRows(row.below);
      row.element.remove();
    }
    this.rows = this.rows.filter((row) => !rows.includes(row));
  }

  mark(row, hasFocus = true) {
    this.current?.element.classList.remove("is-current");
    this.current = row;
    row.element.classList.add("is-current");
    if (hasFocus) row.link.focus({ preventScroll: true });
    row.element.scrollIntoView({ block: "nearest" });
  }

  move(by) {
    const at = this.current ? this.rows.indexOf(this.current) + by : 0;
    const row = this.rows[Math.max(0, Math.min(this.rows.length - 1, at))];
    if (row) this.mark(row);
  }

  compare() {
    const id = this.current?.run.run_id;
    if (!id) return;
    if (this.marked && this.marked !== id) {
      location.hash = `#/diff/${encodeURIComponent(this.marked)}/${encodeURIComponent(id)}`;
      return;
    }
    this.marked = this.marked === id ? null : id;
    announce(
      this.marked ? "Marked. Press x on another run to compare them." : "Not marked any more.",
    );
  }

  keys = {
    j: () => this.move(1),
    ArrowDown: () => this.move(1),
    k: () => this.move(-1),
    ArrowUp: () => this.move(-1),
    ArrowRight: () => this.current?.unfold(true),
    ArrowLeft: () => this.current?.unfold(false),
    Enter: () => (this.current ? this.current.link.click() : this.move(1)),
    "/": () => this.search.focus(),
    x: () => this.compare(),
    g: () => this.rows.length && this.mark(this.rows[0]),
    G: () => this.rows.length && this.mark(this.rows.at(-1)),
    Escape: () => {
      if (Object.values(this.filters).some(Boolean)) this.clear();
    },
  };
}

function shapeOf(page) {
  return JSON.stringify([
    page.runs,
    page.total,
    page.known,
    page.of,
    page.statuses,
    page.models,
    page.unreadable,
  ]);
}

class Row {
  constructor(run, level, page) {
    this.run = run;
    this.level = level;
    this.page = page;
    this.below = [];
    const href = runHref(run);
    this.link = h(
      "a",
      { href, title: run.task ?? run.run_id },
      firstLine(run.task ?? run.run_id) || run.run_id,
    );
    this.link.addEventListener("focus", () => page.current !== this && page.mark(this, false));
    const task = h("div.task", { role: "gridcell" }, this.fold(), this.link, this.snippet());
    const tokens = run.tokens;
    const input = tokens && tokens.input + tokens.cache_read + tokens.cache_write;
    const cells = [
      h("span", null, run.model ?? "–"),
      h(
        "time",
        { title: moment(run.began_at), datetime: isoTime(run.began_at) },
        ago(run.began_at),
      ),
      duration(run.ms),
      tokens ? `${short(input)} in, ${short(tokens.output)} out` : "–",
      cost(run.cost),
    ];
    const classes = ["model", "began", "end", "end tokens", "end"];
    const props = { role: "row", "aria-level": level, data: { run: run.run_id } };
    this.element = h(
      "div.run-row",
      props,
      h("div", { role: "gridcell" }, statusView(run.status)),
      task,
    );
    append(
      this.element,
      cells.map((cell, at) => h("div", { role: "gridcell", class: classes[at] }, cell)),
    );
    if (run.children) this.element.setAttribute("aria-expanded", "false");
  }

  fold() {
    if (!this.run.children) return null;
    const label = `Child runs: ${this.run.children}`;
    this.button = h(
      "button.quiet.unfold",
      { type: "button", "aria-label": label },
      `▸ ${this.run.children}`,
    );
    this.button.addEventListener("click", () => this.unfold(!this.below.length));
    return this.button;
  }

  snippet() {
    return this.run.snippet ? h("span.snippet", null, firstLine(this.run.snippet, 160)) : null;
  }

  async unfold(isOpen) {
    if (!this.run.children || isOpen === this.below.length > 0) return;
    if (isOpen) {
      try {
        const { runs } = await api.runs({ parent: this.run.run_id, limit: 200 });
        this.below = this.page.addRows(runs, this.level + 1, this);
      } catch (error) {
        announce(error.message, "error");
      }
    } else {
      this.page.removeRows(this.below);
      this.below = [];
    }
    this.page.hasUnfolded = this.page.rows.some((row) => row.below.length);
    this.button.textContent = `${this.below.length ? "▾" : "▸"} ${this.run.children}`;
    this.element.setAttribute("aria-expanded", String(this.below.length > 0));
  }
}

// A run that was found by its text opens where the text is.
function runHref(run) {
  const place = run.snippet_seq ? `?seq=${run.snippet_seq}` : "";
  return `#/run/${encodeURIComponent(run.run_id)}${place}`;
}

function isoTime(ms) {
  const at = new Date(ms);
  return Number.isNaN(at.getTime()) ? null : at.toISOString();
}
