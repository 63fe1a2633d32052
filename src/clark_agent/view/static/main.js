// The frame of the page: which view is shown, keys, colours.

import { api } from "./api.js";
import { ComparePage } from "./compare.js";
import { showHelp } from "./dialogs.js";
import { byId, fill, h } from "./dom.js";
import { RunListPage } from "./list.js";
import { RunPage } from "./run.js";
import { WaitingPage } from "./waiting_page.js";

const content = byId("content");
let session = null;
let view = null;
let shown = null;

/** Read the address: `#/`, `#/run/ID/turn/7/request`, `#/diff/A/B`, `#/waiting`. */
function routeOf(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decoded);
  const params = new URLSearchParams(query);
  const [name = "list", first, second, third, fourth, fifth] = parts;
  if (name === "run" && first) {
    const turn = second === "turn" && /^\d{1,9}$/.test(third ?? "") ? Number(third) : null;
    const isRequest = turn !== null && fourth === "request";
    const attempt = isRequest && /^\d{1,6}$/.test(fifth ?? "") ? Number(fifth) : null;
    const seq = /^\d{1,9}$/.test(params.get("seq") ?? "") ? Number(params.get("seq")) : null;
    return { name, key: `run ${first}`, runId: first, turn, isRequest, attempt, seq };
  }
  if (name === "diff" && first && second)
    return { name, key: `diff ${first} ${second}`, a: first, b: second };
  if (name === "waiting") return { name, key: "waiting" };
  return { name: "list", key: "list", query: params };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

const PAGES = { list: RunListPage, run: RunPage, diff: ComparePage, waiting: WaitingPage };

async function show() {
  const isRoot = api.isStatic && !location.hash.startsWith("#/run/");
  const route = routeOf(isRoot ? `#/run/${encodeURIComponent(session.root)}` : location.hash);
  if (shown?.key === route.key && view.update) {
    view.update(route);
    return;
  }
  view?.close();
  shown = route;
  byId("dialog").close();
  content.replaceChildren();
  window.scrollTo(0, 0);
  const opened = new PAGES[route.name](content, route, session);
  view = opened;
  try {
    await opened.open();
    if (view === opened) named(opened, route);
  } catch (error) {
    if (view === opened) failed(error);
  }
}

function named(opened, route) {
  document.title = `${opened.title} · clark-agent`;
  const words = { run: opened.title, diff: "Side by side" }[route.name];
  fill(byId("crumbs"), words ? h("span", { "aria-current": "page" }, words) : null);
}

function failed(error) {
  console.error(error);
  document.title = "Not shown · clark-agent";
  fill(byId("crumbs"));
  const isUnknown = error.status === undefined;
  const words = isUnknown ? `The page has an error: ${error.message}` : error.message;
  fill(
    content,
    h(
      "div.empty",
      { role: "alert" },
      h("p.form-error", null, words),
      h("p", null, h("a", { href: "#/" }, "All runs")),
    ),
  );
}

// --- colours -------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const words = { system: "as the system", light: "light", dark: "dark" }[theme];
  byId("theme").setAttribute("aria-label", `Colours: ${words}`);
  byId("theme").title = `Colours: ${words}`;
  byId("theme").textContent = { system: "◐", light: "☀", dark: "☾" }[theme];
}

function storedTheme() {
  try {
    const theme = localStorage.getItem("clark-agent-theme");
    return THEMES.includes(theme) ? theme : "system";
  } catch {
    return "system"; // a browser may forbid it, in files above all
  }
}

function nextTheme() {
  const now = document.documentElement.dataset.theme ?? "system";
  const theme = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  setTheme(theme);
  try {
    localStorage.setItem("clark-agent-theme", theme);
  } catch {
    // It lasts as long as the page, then.
  }
}

// --- keys ----------------------------------------------------------------------------------------

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
  if (byId("dialog").open) return;
  const { target } = event;
  if (target.closest("input, textarea, select")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  const isPress = event.key === "Enter" || event.key === " ";
  if (isPress && target.closest("a, button, summary")) return;
  const action = { "?": showHelp, t: nextTheme }[event.key] ?? view?.keys?.[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

async function start() {
  setTheme(storedTheme());
  byId("theme").addEventListener("click", nextTheme);
  byId("help").addEventListener("click", showHelp);
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    content.focus();
  });
  document.addEventListener("keydown", pressed);
  try {
    session = await api.session();
  } catch (error) {
    failed(error);
    return;
  }
  byId("pages").hidden = api.isStatic;
  window.addEventListener("hashchange", show);
  await show();
}

start();
