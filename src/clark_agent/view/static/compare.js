// Two runs side by side, from their first difference on.

import { api } from "./api.js";
import { textDiff } from "./differences.js";
import { differenceView } from "./dialogs.js";
import { append, details, fill, h } from "./dom.js";
import { duration, plural } from "./format.js";
import { firstLine, messageBody, plainText, roleName } from "./parts.js";
import { statusView } from "./status.js";

const SIDES = {
  names: ["Left", "Right"],
  agents: ["The agent on the left", "The agent on the right"],
};

/** The page of two runs. */
export class ComparePage {
  title = "Side by side";

  constructor(place, route) {
    this.route = route;
    this.element = h("article", { "aria-label": "Side by side", "aria-busy": "true" });
    place.append(this.element);
  }

  async open(params = {}) {
    const { a, b } = this.route;
    try {
      const diff = await api.diff(a, b, params);
      if (!this.isClosed) this.show(diff);
    } catch (error) {
      if (error.error !== "too_large") throw error;
      const again = h(
        "button",
        { type: "button", onclick: () => this.open({ ...params, force: 1 }) },
        "Compare anyway",
      );
      fill(this.element, h("div.empty", null, h("p", null, error.message), again));
    } finally {
      this.element.removeAttribute("aria-busy");
    }
  }

  close() {
    this.isClosed = true;
  }

  show(diff) {
    const common = diff.common
      ? `The first ${plural(diff.common, "message")} are the same.`
      : "They differ from the first message on.";
    const isSame = diff.common === diff.a_total && diff.common === diff.b_total;
    const rows = h("div.sides");
    append(rows, [
      h("h1.both", null, isSame ? "The messages are the same" : "Side by side"),
      sideHead(diff.a),
      sideHead(diff.b),
      h("p.both.muted", null, isSame ? "" : common, " ", this.fromStart(diff)),
    ]);
    this.rows = rows;
    this.addRows(diff);
    const shown = diff.difference
      ? details(["The first difference of the logs"], () =>
          differenceView(diff.a.run_id, diff.difference, SIDES),
        )
      : h("p.muted", null, "The logs do not differ, apart from times and ids.");
    fill(this.element, rows, h("div.sides", null, h("div.both", null, shown)));
  }

  fromStart(diff) {
    if (!diff.rows.length || diff.rows[0].index === 0) return null;
    return h(
      "button.link",
      { type: "button", onclick: () => this.open({ from: 0 }) },
      "Show them from the beginning",
    );
  }

  addRows(diff) {
    for (const row of diff.rows) append(this.rows, rowViews(diff, row));
    if (diff.next === null) return;
    const more = h(
      "div.both.more",
      null,
      h("button", { type: "button", onclick: () => this.loadMore(more, diff.next) }, "More"),
    );
    this.rows.append(more);
  }

  async loadMore(more, from) {
    const page = await api.diff(this.route.a, this.route.b, { from });
    more.remove();
    this.addRows(page);
  }

  keys = {
    Escape: () => {
      location.hash = `#/run/${encodeURIComponent(this.route.b)}`;
    },
  };
}

function sideHead(run) {
  const href = `#/run/${encodeURIComponent(run.run_id)}`;
  const name = firstLine(run.task ?? run.run_id, 120);
  const facts = [run.model, duration(run.ms)].filter(Boolean).join(" · ");
  return h(
    "div.side-head",
    null,
    h("a", { href }, name),
    " ",
    statusView(run.status),
    h("p.muted", null, facts),
  );
}

function rowViews(diff, { a, b, is_same: isSame }) {
  const isText = !isSame && a && b && a.role === b.role && a.name === b.name;
  const both =
    isText && plainText(a).length + plainText(b).length > 600
      ? h(
          "div.both",
          null,
          details(["The difference line by line"], () => textDiff(plainText(a), plainText(b))),
        )
      : null;
  return [side(diff.a.run_id, a, isSame), side(diff.b.run_id, b, isSame), both];
}

function side(runId, message, isSame) {
  if (!message) return h("div.place-missing", null, "nothing here");
  const chip = isSame ? null : h("span.chip.warn", null, "different");
  const head = h("div.turn-head", null, h("h2", null, roleName(message)), chip);
  const body = h("div.turn-body", null, messageBody(runId, message));
  return h(
    "section.turn",
    { class: isSame ? "" : "is-different", "aria-label": roleName(message) },
    head,
    body,
  );
}
