// Dialogs: keyboard shortcuts, forking, replaying, comparing.

import { api } from "./api.js";
import { announce, byId, fill, h } from "./dom.js";
import { firstLine, textView } from "./parts.js";
import { statusWords } from "./status.js";

/** Open the dialog with these contents. */
export function openDialog(title, ...content) {
  const dialog = byId("dialog");
  const close = h(
    "button.quiet",
    { type: "button", onclick: () => dialog.close(), "aria-label": "Close" },
    "✕",
  );
  const head = h("div.dialog-head", null, h("h2", { id: "dialog-title" }, title), close);
  fill(dialog, head, ...content);
  if (!dialog.open) dialog.showModal();
  return dialog;
}

const SHORTCUTS = [
  ["j / k", "next and previous run or turn"],
  ["Enter", "select the first run, or open the selected one"],
  ["/", "search"],
  ["x", "mark a run to compare it"],
  ["r", "what the model saw in this turn"],
  ["e", "fold or unfold all calls"],
  ["f", "fork from this turn"],
  ["s", "write to the run"],
  ["g / G", "the beginning and the end"],
  ["t", "light or dark"],
  ["Esc", "back"],
  ["?", "this list"],
];

/** The list of keys. */
export function showHelp() {
  const rows = SHORTCUTS.map(([keys, what]) => [
    h(
      "dt",
      null,
      keys.split(" / ").map((key, at) => [at ? " " : null, h("kbd", null, key)]),
    ),
    h("dd", null, what),
  ]);
  openDialog("Keyboard shortcuts", h("dl.keys", null, rows));
}

/** Run an action of the page: the button waits, and an error is shown beside it. */
export async function act(button, place, action) {
  button.disabled = true;
  place.textContent = "";
  try {
    return await action();
  } catch (error) {
    place.textContent = error.message;
    return null;
  } finally {
    button.disabled = false;
  }
}

/** Ask for the prompt and the model of a fork, and start it. */
export function openFork(view, turn, session) {
  const prompt = h("textarea", { id: "fork-prompt", rows: 4 });
  const model = h("input", {
    id: "fork-model",
    placeholder: session.model ?? view.run.model ?? "",
    autocomplete: "off",
  });
  const system = h("textarea", { id: "fork-system", placeholder: "unchanged" });
  const instead = h("input", { id: "fork-instead", type: "checkbox", checked: true });
  const error = h("p.form-error", { role: "alert" });
  const button = h("button.primary", { type: "submit" }, "Fork");
  const words = turn
    ? `A new run begins with everything up to the end of turn ${turn}.`
    : "A new run begins before the first turn.";
  const start = async (event) => {
    event.preventDefault();
    const body = {
      turn,
      prompt: prompt.value || null,
      model: model.value.trim() || null,
      system_prompt: system.value || null,
      replace_prompt: turn === 0 && instead.checked && prompt.value !== "",
    };
    const done = await act(button, error, () => api.fork(view.run.run_id, body));
    if (!done) return;
    byId("dialog").close();
    announce(done.message ?? "The fork has started.");
    location.hash = `#/run/${encodeURIComponent(done.run_id)}`;
  };
  const swap = h("label.inline", null, instead, " in place of the prompt of this run");
  const form = h(
    "form",
    { onsubmit: start },
    h("p.muted", null, words),
    h("label", { for: "fork-prompt" }, turn ? "What to say next" : "Prompt", prompt),
    turn ? null : swap,
    h("label", { for: "fork-model" }, "Model", model),
    h("label", { for: "fork-system" }, "System prompt", system),
    error,
    h("div.actions", null, button),
  );
  openDialog(turn ? `Fork after turn ${turn}` : "Fork before the first turn", form);
  prompt.focus();
}

/** Replay the run, and show whether it is the same. */
export async function openReplay(runId) {
  const place = h(
    "div.stack",
    { role: "status", "aria-busy": "true" },
    h("p", null, "Replaying …"),
  );
  openDialog("Replay", place);
  try {
    const { is_identical: isSame, difference } = await api.replay(runId);
    fill(
      place,
      isSame
        ? h(
            "p",
            null,
            h("span.chip.good", null, "identical"),
            " The agent of this server does the same again.",
          )
        : differenceView(runId, difference, REPLAYED),
    );
  } catch (error) {
    fill(place, h("p.form-error", null, error.message));
  } finally {
    place.removeAttribute("aria-busy");
  }
}

const REPLAYED = {
  names: ["In the log", "In the replay"],
  agents: ["The agent of the run", "The agent of this server"],
};

/** The first difference of two logs; `names` and `agents` say which they are. */
export function differenceView(runId, difference, { names, agents }) {
  const { turn, kind, path, first, second } = difference;
  const href = `#/run/${encodeURIComponent(runId)}/turn/${turn}`;
  const link = h("a", { href }, turn ? `turn ${turn}` : "Start");
  const tool = toolThatDiffers(difference);
  const sides = [first, second].map((text, at) =>
    tool?.lacks[at]
      ? null
      : h("div.part", null, h("p.label", null, names[at]), textView(runId, text)),
  );
  return h(
    "div.stack",
    null,
    tool && h("p", null, toolWords(tool, agents)),
    h("p", null, "The first difference is in ", link, `: ${kind} `, h("code", null, path)),
    sides,
  );
}

/** The tool that two runs declare differently, if that is how they differ, and which lacks it. Without
 * a name, one of them has no tools at all. */
function toolThatDiffers({ kind, path, first, second, run_id: child }) {
  const [part, name, ...inside] = path.split(".");
  if (kind !== "run_began" || part !== "tools" || child !== null) return null;
  return { name, lacks: [first, second].map(({ text }) => !inside.length && text === "null") };
}

function toolWords({ name, lacks }, agents) {
  const missing = lacks.indexOf(true);
  if (!name) return `${agents[missing]} has no tools.`;
  const tool = h("code", null, name);
  if (missing >= 0) return [`${agents[missing]} has no tool `, tool, "."];
  return [`${agents[1]} has another declaration of the tool `, tool, "."];
}

/** Ask with which run to compare this one. */
export async function openCompare(view) {
  const list = h("div.stack", null, h("p.muted", null, "Loading …"));
  const search = h("input", {
    type: "search",
    id: "compare-search",
    "aria-label": "Search runs",
  });
  let newest = 0;
  const load = async () => {
    newest += 1;
    const mine = newest;
    try {
      const { runs } = await api.runs({
        q: search.value,
        limit: 20,
        all: search.value ? 1 : null,
      });
      if (mine === newest)
        fill(list, runs.filter((run) => run.run_id !== view.run.run_id).map(choice));
    } catch (error) {
      fill(list, h("p.form-error", null, error.message));
    }
  };
  const choice = (run) => {
    const href = `#/diff/${encodeURIComponent(view.run.run_id)}/${encodeURIComponent(run.run_id)}`;
    const words = firstLine(run.task ?? run.run_id, 120);
    return h(
      "p",
      null,
      h("a", { href, onclick: () => byId("dialog").close() }, words),
      " ",
      h("span.muted", null, statusWords(run.status)),
    );
  };
  search.addEventListener("input", load);
  const related = [view.run.forked_from?.run_id, ...view.forks].filter(Boolean).map((id) => {
    const href = `#/diff/${encodeURIComponent(view.run.run_id)}/${encodeURIComponent(id)}`;
    const name =
      id === view.run.forked_from?.run_id ? "the run it was forked from" : `fork ${id.slice(0, 8)}`;
    return h("p", null, h("a", { href, onclick: () => byId("dialog").close() }, name));
  });
  openDialog("Compare with", h("div.stack", null, related, search, list));
  search.focus();
  await load();
}
