// Where the page gets its data: the server, or, in an exported file, the data inside the file.
// The shapes are those of `clark_agent/view/shapes.py`.

import { byId } from "./dom.js";

/** A request that failed: `error` is a word for programs, `message` a sentence for people. */
export class ApiError extends Error {
  constructor(status, error, message) {
    super(message);
    this.status = status;
    this.error = error;
  }
}

class Server {
  isStatic = false;

  async session() {
    this.about = await this.get("api/session");
    return this.about;
  }

  runs(params, signal) {
    return this.get("api/runs", params, signal);
  }

  run(id) {
    return this.get("api/run", { run: id });
  }

  turns(id, from = null) {
    return this.get("api/turns", { run: id, from });
  }

  items(id, params) {
    return this.get("api/items", { run: id, ...params });
  }

  piece(id, text, start, length) {
    return this.get("api/piece", { run: id, at: text.at, path: text.path, start, length });
  }

  request(id, turn, params) {
    return this.get("api/request", { run: id, turn, ...params });
  }

  diff(a, b, params) {
    return this.get("api/diff", { a, b, ...params });
  }

  waiting() {
    return this.get("api/waiting");
  }

  imageSource(id, image) {
    if (image.data !== null) return image.data;
    if (image.at === null) return null;
    return withParams("api/image", { run: id, at: image.at, path: image.path });
  }

  /** Follow a run: call `on[name](data)` for each event, until `close()`. */
  follow(id, after, on) {
    return new Following(id, after, on);
  }

  steer(id, body) {
    return this.act("steer", id, body);
  }

  cancel(id, body) {
    return this.act("cancel", id, body);
  }

  decide(id, body) {
    return this.act("decide", id, body);
  }

  resume(id) {
    return this.act("resume", id, {});
  }

  fork(id, body) {
    return this.act("fork", id, body);
  }

  replay(id) {
    return this.act("replay", id, {});
  }

  get(path, params = {}, signal = null) {
    return answerOf(
      fetch(withParams(path, params), { signal, headers: { accept: "application/json" } }),
    );
  }

  act(name, id, body) {
    const headers = { "content-type": "application/json", "x-clark-token": this.about.csrf };
    const path = withParams(`api/${name}`, { run: id });
    return answerOf(fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
  }
}

function withParams(path, params) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  return query.size ? `${path}?${query}` : path;
}

async function answerOf(fetching) {
  let response;
  try {
    response = await fetching;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "away", "The server does not answer. Is clark-agent view still running?");
  }
  if (response.ok) return response.json();
  const failure = await response.json().catch(() => null);
  const message = failure?.message ?? `the server answered ${response.status}`;
  throw new ApiError(response.status, failure?.error ?? "failed", message);
}

const EVENTS = ["item", "delta", "run", "end", "failed"];
const LONGEST_PAUSE = 15_000;

/** Server-sent events of one run, connected again wherever they were cut off. */
class Following {
  constructor(runId, after, on) {
    this.runId = runId;
    this.after = after;
    this.on = on;
    this.failures = 0;
    this.connect();
  }

  connect() {
    this.source = new EventSource(withParams("api/events", { run: this.runId, after: this.after }));
    for (const name of EVENTS) {
      this.source.addEventListener(name, (event) => this.take(name, event));
    }
    this.source.onopen = () => {
      this.failures = 0;
      this.on.connected?.();
    };
    this.source.onerror = () => this.retry();
  }

  take(name, event) {
    if (name === "item" && event.lastEventId) this.after = event.lastEventId;
    if (name === "end" || name === "failed") this.close();
    this.on[name]?.(JSON.parse(event.data || "{}"));
  }

  retry() {
    if (this.isClosed) return;
    this.source.close();
    this.on.disconnected?.();
    const pause = Math.min(LONGEST_PAUSE, 500 * 2 ** this.failures);
    this.failures += 1;
    this.timer = setTimeout(() => this.connect(), pause);
    this.checkSession();
  }

  // The server does not know this page any more, if it was started again: waiting does not help.
  async checkSession() {
    const error = await answerOf(fetch("api/session")).catch((failure) => failure);
    if (this.isClosed || error.status !== 401) return;
    this.close();
    this.on.refused?.(error);
  }

  close() {
    this.isClosed = true;
    clearTimeout(this.timer);
    this.source.close();
  }
}

/** The data of an exported file. */
class Embedded {
  isStatic = true;

  constructor(data) {
    this.data = data;
  }

  async session() {
    return this.data.session;
  }

  found(id) {
    const { runs } = this.data;
    if (Object.hasOwn(runs, id)) return runs[id];
    throw new ApiError(404, "not_found", "This run is not in this file.");
  }

  async run(id) {
    return this.found(id).view;
  }

  async turns(id) {
    const { turns, view } = this.found(id);
    return { turns, next: null, total: turns.length, indexed: view.indexed };
  }

  async items(id, { from = null, turn = null, before = null, limit = 100 }) {
    const { items, view } = this.found(id);
    let start = 0;
    let end = null;
    if (turn !== null && !items.some((item) => item.turn === turn))
      throw new ApiError(404, "not_found", `This file has no turn ${turn}.`);
    if (from !== null) start = places(items, (item) => item.seq >= from);
    else if (turn !== null) start = places(items, (item) => item.turn >= turn);
    else if (before !== null) {
      end = places(items, (item) => item.seq >= before);
      start = Math.max(0, end - limit);
    }
    end ??= start + limit;
    const page = items.slice(start, end);
    return {
      items: page,
      next: items[end]?.seq ?? null,
      previous: start > 0 ? (items[start]?.seq ?? null) : null,
      last_seq: page.at(-1)?.seq ?? null,
      children: view.children,
      damage: view.damage[0] ?? null,
    };
  }

  // Only the first of equal fronts (system prompt, tools, settings) is in the file.
  async request(id, turn, { attempt = null }) {
    const sent = this.found(id).requests;
    const all = sent.filter((each) => each.turn === turn);
    const request = attempt === null ? all.at(-1) : all.find((each) => each.attempt === attempt);
    if (!request)
      throw new ApiError(404, "not_found", "The request of this turn is not in this file.");
    const before = sent.slice(0, sent.indexOf(request) + 1);
    const [system, tools, settings] = before.findLast((each) => each.front !== null).front;
    const same = request.front === null ? tools.map((tool) => ({ ...tool, is_new: false })) : tools;
    return { ...request, attempts: all.length, system_prompt: system, tools: same, settings };
  }

  async piece() {
    throw new ApiError(404, "not_found", "The rest of this text is not in this file.");
  }

  imageSource(_id, image) {
    return image.data;
  }
}

function places(items, isThere) {
  const found = items.findIndex(isThere);
  return found < 0 ? items.length : found;
}

const embedded = byId("embedded");

/** The server, or the data of this file. */
export const api = embedded ? new Embedded(JSON.parse(embedded.textContent)) : new Server();
