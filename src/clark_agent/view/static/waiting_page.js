// All open requests, of all runs.

import { api } from "./api.js";
import { fill, h } from "./dom.js";
import { waitingCard } from "./waiting.js";

/** The page with everything that waits for a decision. */
export class WaitingPage {
  title = "Waiting";

  constructor(place, _route, session) {
    this.session = session;
    this.list = h("div.stack");
    place.append(h("div.waiting-page", null, h("h1", null, "Waiting"), this.list));
    const refresh = () => !document.hidden && this.open().catch(() => {});
    this.timer = setInterval(refresh, session.refresh_ms);
  }

  async open() {
    const { waiting } = await api.waiting();
    const key = waiting.map((each) => each.request_id).join(" ");
    if (this.isClosed || key === this.key) return;
    this.key = key;
    const cards = waiting.map((request) => {
      const run = h(
        "a",
        { href: `#/run/${encodeURIComponent(request.run_id)}/turn/${request.turn}` },
        "Open its run ",
        h("code", null, request.run_id),
      );
      const card = waitingCard(request, this.session, () => this.open());
      card.append(h("p", null, run));
      return card;
    });
    fill(this.list, cards.length ? cards : h("p.empty", null, "Nothing is waiting."));
  }

  close() {
    this.isClosed = true;
    clearInterval(this.timer);
  }

  keys = {
    Escape: () => {
      location.hash = "#/";
    },
  };
}
