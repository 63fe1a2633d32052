"""Approve tool calls and answer questions on a web page. Needs the extra `gateway`.

Runs wait in a database, not in the server: it keeps nothing that matters in memory. A restart, a
crash or a second server in the middle of a run changes nothing.

    python approval_web.py --port 8000 --db runs.db

serves the page with a scripted model, which needs no key. Without a terminal, or with ``--demo``,
this file is the server and its clients in one, and ends by itself.

In production, the page needs what `user_of` and `check_origin` only stand for: authentication, the
right to decide (for instance that the user is in the group of the ``assignee``), TLS, and a token
or ``SameSite`` cookies against requests from other sites.
"""

import argparse
import asyncio
import logging
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from msgspec import to_builtins
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from clark_agent import (
    Agent,
    AgentTool,
    AssistantMessage,
    CancellationToken,
    ClarkAgentError,
    StopReason,
    TextContent,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolResultMessage,
    UserMessage,
    tool,
)
from clark_agent.cancellation import LET_GO
from clark_agent.errors import (
    AlreadyDecided,
    DecisionNotApplicable,
    InvalidArgumentsError,
    RequestExpired,
    RequestNotFound,
    RunBusy,
    RunLetGo,
    RunNotFound,
    ToolError,
)
from clark_agent.events import EventSink
from clark_agent.messages import encode_json
from clark_agent.run_log import (
    Allow,
    Deny,
    GiveArguments,
    GiveResult,
    RunLog,
    SqliteStore,
    WaitingRequest,
    advance,
    decide,
    ready_runs,
    sse,
    waiting_for,
)
from clark_agent.run_log.records import RunBegan, RunEnded, RunFailed
from clark_agent.stream import Chunk, Done, Start, StreamEvent, StreamRequest, TextChunk
from clark_agent.toolkit import SUSPEND, ApprovalGate, ask_user_tool
from clark_agent.waiting import Decision

logger = logging.getLogger(__name__)


# --- the agent ------------------------------------------------------------------------------------


@tool(reads_only=True)
def look_up(order: int) -> str:
    """Look up an order."""
    return f"order {order}: a kettle for 120 €, bought by ada@example.com, arrived broken"


@tool
def refund(order: int, amount: float) -> str:
    """Pay an amount back to the customer."""
    return f"refunded {amount:g} € for order {order}"


EMAIL: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("to", "subject", "body")},
    "required": ["to", "subject", "body"],
}


class SendEmail(AgentTool):
    """A tool with a preview, which the page shows to the person who decides."""

    name = "send_email"
    description = "Send an email to a customer."
    parameters_schema = EMAIL

    def validate(self, args: Any) -> None:
        for name in EMAIL["required"]:
            if not isinstance(args.get(name), str):
                raise InvalidArgumentsError(self.name, f"{name} must be a text")

    def preview(self, args: Any) -> str:
        return f"To: {args['to']}\nSubject: {args['subject']}\n\n{args['body']}"

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult.text(f"sent to {args['to']}")


async def scripted_model(
    request: StreamRequest, signal: CancellationToken
) -> AsyncGenerator[StreamEvent]:
    """A model whose answer depends on the messages alone, so that any process can go on."""
    asked = max(i for i, m in enumerate(request.messages) if isinstance(m, UserMessage))
    number = re.search(r"\d+", request.messages[asked].plain_text)
    order = int(number[0]) if number else 7
    since = request.messages[asked + 1 :]
    results = [m.plain_text for m in since if isinstance(m, ToolResultMessage)]
    turn = sum(isinstance(m, AssistantMessage) for m in since)
    body = f"Dear Ada,\n\nwe are sorry about order {order}.\nYou get your money back.\n"
    email = {"to": "ada@example.com", "subject": f"Your order {order}", "body": body}
    question = "Should Ada also get a voucher?"
    script: list[tuple[str, list[tuple[str, dict[str, Any]]]]] = [
        (f"I look at order {order} first.", [("look_up", {"order": order})]),
        (
            "The kettle arrived broken. I pay the money back and write to Ada.",
            [("refund", {"order": order, "amount": 120}), ("send_email", email)],
        ),
        ("", [("ask_user", {"question": question, "choices": ["10 €", "none"]})]),
        (f"All done: {'; '.join(results[1:])}.", []),
    ]
    text, calls = script[min(turn, 3)]
    yield Start(AssistantMessage((), StopReason.END_TURN))
    for word in re.findall(r"\S+\s*", text):
        await asyncio.sleep(0.02)
        yield Chunk(TextChunk(word))
    blocks = [ToolCall(f"call_{turn}_{n}", *each) for n, each in enumerate(calls)]
    reason = StopReason.TOOL_USE if calls else StopReason.END_TURN
    said = (TextContent(text),) if text else ()
    yield Done(AssistantMessage((*said, *blocks), reason))


def make_agent(store: SqliteStore, minutes: float = 60) -> Agent:
    return Agent(
        scripted_model,  # or "openai:gpt-5.1"
        tools=[look_up, refund, SendEmail(), ask_user_tool(SUSPEND, timeout=minutes * 60)],
        plugins=[ApprovalGate(SUSPEND, timeout=minutes * 60, assignee="support")],
        run_log=RunLog(store, live=True),
    )


# --- the server -----------------------------------------------------------------------------------


class Worker:
    """Runs and resumes. It knows nothing that is not in the store."""

    def __init__(self, store: SqliteStore, agent: Agent) -> None:
        self.store, self.agent = store, agent
        self.stop = CancellationToken()
        self.tasks: set[asyncio.Task[None]] = set()

    def go_on(self, run_id: str) -> None:
        """Continue a run in the background."""
        _ = self._start(self._advance(run_id))

    async def begin(self, run_id: str, prompt: str) -> None:
        """Begin a run in the background. Returns with its first event: then the log has it."""
        begun = asyncio.Event()
        task = self._start(self._advance(run_id, prompt, lambda _: begun.set()))
        task.add_done_callback(lambda _: begun.set())
        await begun.wait()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)  # a task needs a reference
        task.add_done_callback(self.tasks.discard)
        return task

    async def _advance(
        self, run_id: str, prompt: str | None = None, sink: EventSink | None = None
    ) -> None:
        try:
            await advance(self.store, run_id, self.agent, prompt, self.stop, sink=sink)
        except (RunBusy, RunLetGo):
            pass  # another task or server has it, or will take it
        except ClarkAgentError:
            logger.exception("run %s", run_id)

    async def sweep(self, every: float) -> None:
        """Continue what a dead server has left, and what the time has decided."""
        while True:
            for run_id in await run_in_threadpool(self._left):
                self.go_on(run_id)
            await asyncio.sleep(every)

    def _left(self) -> list[str]:
        runs = self.store.runs()
        interrupted = [run.run_id for run in runs if run.outcome is None and not run.depth]
        return [*interrupted, *ready_runs(self.store)]

    async def close(self) -> None:
        """Let the runs go: they do not end, and the next server continues them."""
        self.stop.cancel(LET_GO)
        await asyncio.gather(*self.tasks)


def user_of(request: Request) -> str:
    return request.headers.get("x-user") or "guest"  # replace this with your authentication


def check_origin(request: Request) -> None:
    """Refuse what another site sends. A form cannot send JSON, and a script names its origin."""
    origin = request.headers.get("origin")
    is_json = request.headers.get("content-type", "").partition(";")[0] == "application/json"
    if not is_json or (origin and origin.partition("://")[2] != request.headers.get("host")):
        raise HTTPException(403, "requests from other sites are not accepted")


def json_response(value: object, status: int = 200) -> Response:
    return Response(encode_json(value), status, media_type="application/json")


async def body_of(request: Request) -> dict[str, Any]:
    check_origin(request)
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return body


def make_app(store: SqliteStore, agent: Agent, *, sweep_every: float = 2.0) -> Starlette:
    worker = Worker(store, agent)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncGenerator[None]:
        sweeping = asyncio.create_task(worker.sweep(sweep_every))
        yield
        sweeping.cancel()
        await worker.close()

    async def page(request: Request) -> Response:
        nonce = secrets.token_urlsafe()
        policy = (
            f"default-src 'none'; connect-src 'self'; script-src 'nonce-{nonce}'; "
            f"style-src 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        )
        headers = {"content-security-policy": policy, "cache-control": "no-store"}
        return HTMLResponse(PAGE.replace("{nonce}", nonce), headers=headers)

    async def state(request: Request) -> Response:
        """What waits, and the newest runs."""
        return json_response(await run_in_threadpool(_state, store))

    async def begin(request: Request) -> Response:
        prompt = (await body_of(request)).get("prompt")
        if not isinstance(prompt, str) or not prompt.strip():
            raise HTTPException(400, "the task is empty")
        run_id = secrets.token_hex(8)
        await worker.begin(run_id, prompt.strip())
        return json_response({"run_id": run_id}, 202)

    async def decision(request: Request) -> Response:
        body = await body_of(request)
        request_id, run_id = str(body.get("request_id")), str(body.get("run_id"))
        choice = _decision(agent, body)
        try:
            left = await decide(store, run_id, request_id, choice, by=user_of(request))
        except AlreadyDecided as late:
            said = str(late.decision.__struct_config__.tag).replace("_", " ")
            raise HTTPException(409, f"{late.by or 'somebody'} was faster: {said}") from late
        except RequestExpired as late:
            raise HTTPException(410, "the time to decide is over") from late
        except RequestNotFound as error:
            raise HTTPException(404, "there is no such request") from error
        except DecisionNotApplicable as error:
            raise HTTPException(400, "the call has run: it needs a result") from error
        except RunBusy as error:
            raise HTTPException(
                503, "the run still works: try again", {"retry-after": "2"}
            ) from error
        if not left:
            worker.go_on(str(body.get("root_run_id") or run_id))
        return json_response({"open": len(left)})

    async def events(request: Request) -> Response:
        """The events of a run. A browser that reconnects says where it was."""
        run_id = request.path_params["run_id"]
        after = request.headers.get("last-event-id") or request.query_params.get("after")
        try:
            last = (await run_in_threadpool(store.load, run_id)).records[-1]
            frames = sse(store, run_id, after=after)
        except RunNotFound as error:
            raise HTTPException(404, "there is no such run") from error
        except ValueError as error:
            raise HTTPException(400, "Last-Event-ID is not a position") from error
        has_ended = isinstance(last.entry, (RunEnded, RunFailed))
        if has_ended and after and int(after.partition(".")[0]) >= last.seq:
            return Response(status_code=204)  # tells the browser not to connect again

        async def content() -> AsyncGenerator[bytes]:
            yield b"retry: 500\n\n"
            async for frame in frames:
                yield frame

        headers = {"cache-control": "no-store"}
        return StreamingResponse(content(), media_type="text/event-stream", headers=headers)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/state", state),
            Route("/runs", begin, methods=["POST"]),
            Route("/runs/{run_id}/events", events),
            Route("/decisions", decision, methods=["POST"]),
        ],
        lifespan=lifespan,
    )


def _decision(agent: Agent, body: dict[str, Any]) -> Decision:
    """Read a decision. Changed arguments are checked now, while there is a person to tell."""
    value = body.get("value")
    match body.get("decision"):
        case "allow":
            return Allow()
        case "deny" if value is None or isinstance(value, str):
            return Deny(value or None)
        case "result" if isinstance(value, str) and value.strip():
            return GiveResult(value.strip())
        case "arguments" if isinstance(value, dict):
            changed = agent.config.registry.find(str(body.get("tool_name")))
            if changed is not None:
                try:
                    changed.validate(changed.prepare_arguments(value))
                except ToolError as error:
                    raise HTTPException(422, str(error)) from error
            return GiveArguments(value)
        case _:
            raise HTTPException(400, "the decision is not complete")


def _state(store: SqliteStore) -> dict[str, Any]:
    waiting = waiting_for(store, limit=100)
    open_runs = {request.root_run_id for request in waiting}
    runs = [run for run in store.runs(limit=100) if not run.depth][:20]
    states = {
        run.run_id: run.outcome or "running"
        if run.outcome != "suspended" or run.run_id in open_runs
        else "ready"
        for run in runs
    }
    return {
        "waiting": [_shown(request, _prompt(store, request.root_run_id)) for request in waiting],
        "runs": [
            {"run_id": run.run_id, "state": states[run.run_id], "began_at": run.began_at}
            | {"prompt": _prompt(store, run.run_id)}
            for run in runs
        ],
    }


def _shown(request: WaitingRequest, prompt: str) -> dict[str, Any]:
    return {**to_builtins(request), "prompt": prompt}


def _prompt(store: SqliteStore, run_id: str) -> str:
    began = store.load(run_id).records[0].entry
    prompts = began.prompts if isinstance(began, RunBegan) else ()
    return " ".join([message.plain_text for message in prompts])


# --- the page -------------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Approvals</title>
<style nonce="{nonce}">
  :root { color-scheme: light; --line: #d9dee5; --soft: #667085; --ink: #1d2433; --blue: #1f5fd1;
    --red: #b3261e; --green: #16794a; --amber: #9a6200; }
  * { box-sizing: border-box; }
  body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: #f5f7fa; }
  header { display: flex; gap: 1rem; align-items: center; flex-wrap: wrap; background: #fff;
    padding: .8rem 1.5rem; border-bottom: 1px solid var(--line); }
  h1 { font-size: 1.15rem; margin: 0; }
  h2 { font-size: .95rem; margin: 0 0 .7rem; color: var(--soft); font-weight: 600; }
  main { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 1.5rem;
    padding: 1.5rem; max-width: 1300px; margin: 0 auto; }
  @media (max-width: 850px) { main { grid-template-columns: minmax(0, 1fr); } }
  input, textarea, button { font: inherit; border-radius: 6px; border: 1px solid #b9c1cc;
    padding: .35rem .6rem; background: #fff; color: inherit; }
  input:focus, textarea:focus, button:focus-visible { outline: 2px solid var(--blue);
    outline-offset: 1px; }
  button { cursor: pointer; } button:hover { background: #eef2f7; }
  button:disabled { opacity: .5; cursor: default; }
  button.go { background: var(--blue); border-color: var(--blue); color: #fff; }
  button.no { color: var(--red); border-color: var(--red); }
  textarea { width: 100%; min-height: 8rem; font-family: ui-monospace, monospace;
    font-size: .85rem; }
  #start { display: flex; gap: .5rem; flex: 1; min-width: 16rem; }
  #start input { flex: 1; }
  #user { width: 7rem; }
  .card, .panel { background: #fff; border: 1px solid var(--line); border-radius: 10px;
    padding: 1rem; margin-bottom: 1rem; }
  .card h3 { margin: 0; font-size: 1rem; font-family: ui-monospace, monospace; }
  .meta { color: var(--soft); font-size: .85rem; margin: .15rem 0 .6rem;
    overflow-wrap: anywhere; }
  .meta:has(+ pre) { margin: .5rem 0 .2rem; }
  .meta + pre { margin-top: 0; }
  .question { font-size: 1.05rem; margin: .5rem 0; }
  dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .2rem .8rem;
    margin: .5rem 0; }
  dt { color: var(--soft); } dd { margin: 0; }
  dd, pre { font-family: ui-monospace, monospace; font-size: .85rem; white-space: pre-wrap;
    overflow-wrap: anywhere; }
  pre { background: #f5f7fa; border: 1px solid var(--line); border-radius: 6px; padding: .6rem;
    margin: .5rem 0; max-height: 20rem; overflow: auto; }
  .row { display: flex; gap: .5rem; flex-wrap: wrap; margin-top: .6rem; align-items: center; }
  .row input { flex: 1; min-width: 9rem; }
  .error { color: var(--red); margin: .5rem 0 0; }
  .empty { color: var(--soft); }
  #runs { display: grid; gap: .3rem; margin-bottom: 1rem; }
  #runs button { display: flex; gap: .6rem; align-items: center; text-align: left; width: 100%; }
  #runs button[aria-current=true] { border-color: var(--blue); box-shadow: 0 0 0 1px var(--blue); }
  #runs span:first-child { flex: 1; overflow: hidden; text-overflow: ellipsis;
    white-space: nowrap; }
  .state { font-size: .75rem; padding: .05rem .5rem; border-radius: 99px; background: #e8ecf2; }
  .state.suspended { background: #fdf0d5; color: var(--amber); }
  .state.done { background: #ddf3e6; color: var(--green); }
  .state.failed { background: #fbe4e2; color: var(--red); }
  .said { margin: .5rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
  .said.user { background: #e9f0fd; border-radius: 8px; padding: .4rem .7rem;
    width: fit-content; max-width: 100%; }
  .call { border-left: 3px solid var(--line); padding-left: .7rem; margin: .4rem 0;
    font-family: ui-monospace, monospace; font-size: .85rem; overflow-wrap: anywhere; }
  .call .result { color: var(--soft); white-space: pre-wrap; }
  .call.failed .result { color: var(--red); }
  #note { position: fixed; bottom: 1rem; left: 50%; transform: translateX(-50%);
    background: var(--ink); color: #fff; padding: .6rem 1rem; border-radius: 8px; margin: 0; }
  [hidden] { display: none !important; }
</style>
<header>
  <h1>Approvals</h1>
  <form id="start"><input name="prompt" aria-label="Task" required
    value="Refund order 7 and write to the customer."><button class="go">Start</button></form>
  <label>You are <input id="user" value="guest"></label>
</header>
<main>
  <section><h2>Waiting for a decision</h2><div id="waiting"></div>
    <p class="empty" id="nothing">Nothing waits.</p></section>
  <section><h2>Runs</h2><div id="runs"></div>
    <div class="panel" id="log" aria-live="polite" hidden></div></section>
</main>
<p id="note" role="status" hidden></p>
<script nonce="{nonce}">
"use strict";
// Text from models, tools and people is only ever set as text, never as HTML.
const $ = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const time = (ms) => new Date(ms).toLocaleString([], {dateStyle: "medium", timeStyle: "short"});
const shown = (value) => typeof value === "string" ? value : JSON.stringify(value, null, 2);
let noteTimer;
function note(text) {
  $("note").textContent = text;
  $("note").hidden = false;
  clearTimeout(noteTimer);
  noteTimer = setTimeout(() => { $("note").hidden = true; }, 6000);
}
$("user").value = localStorage.getItem("user") || "guest";
$("user").onchange = () => localStorage.setItem("user", $("user").value);

async function post(path, body) {
  const headers = {"content-type": "application/json", "x-user": $("user").value};
  const response = await fetch(path, {method: "POST", headers, body: JSON.stringify(body)});
  const text = await response.text();
  if (!response.ok) throw Object.assign(new Error(text), {status: response.status});
  return JSON.parse(text);
}

// --- what waits
const cards = new Map();

function card(request) {
  const error = make("p", {className: "error", hidden: true});
  const asked = request.request || {};
  const isQuestion = asked.kind === "question";
  const times = [`since ${time(request.asked_at)}`];
  if (request.expires_at) times.push(`expires ${time(request.expires_at)}`);
  if (request.until) times.push(`goes on by itself at ${time(request.until)}`);
  const who = `${request.asked_by} asks ${request.assignee || "anybody"}`;
  const element = make("article", {className: "card"},
    make("h3", {}, isQuestion ? "A question" : request.tool_name),
    make("p", {className: "meta"}, `Task: ${request.prompt}`, make("br"), who, make("br"),
      times.join(" · ")));
  element.dataset.tool = request.tool_name;
  if (isQuestion) {
    element.append(make("p", {className: "question"}, asked.question));
  } else {
    const list = make("dl");
    for (const [name, value] of Object.entries(request.arguments || {}))
      list.append(make("dt", {}, name), make("dd", {}, shown(value)));
    element.append(list);
    if (asked.preview)
      element.append(make("div", {className: "meta"}, "Preview"), make("pre", {}, asked.preview));
    else if (asked.kind !== "approval" && request.request)
      element.append(make("pre", {}, shown(request.request)));
  }

  async function send(decision, value) {
    const {request_id, run_id, root_run_id, tool_name} = request;
    error.hidden = true;
    for (const button of element.querySelectorAll("button")) button.disabled = true;
    try {
      await post("/decisions", {request_id, run_id, root_run_id, tool_name, decision, value});
    } catch (failure) {
      for (const button of element.querySelectorAll("button")) button.disabled = false;
      if ([404, 409, 410].includes(failure.status)) note(`Too late: ${failure.message}.`);
      else { error.textContent = failure.message; error.hidden = false; return; }
    }
    await refresh();
  }

  const reason = make("input", {placeholder: "Why not?", ariaLabel: "Reason"});
  const deny = make("button", {className: "no", onclick: () => send("deny", reason.value)}, "Deny");
  if (request.needs === "permission") {
    const args = make("textarea", {hidden: true, spellcheck: false, ariaLabel: "Arguments",
      value: JSON.stringify(request.arguments, null, 2)});
    const change = make("button", {onclick: () => {
      if (args.hidden) {
        args.hidden = false;
        allow.hidden = true;
        change.textContent = "Allow with these";
        change.className = "go";
        args.focus();
        return;
      }
      let value;
      try { value = JSON.parse(args.value); }
      catch (problem) { error.textContent = problem.message; error.hidden = false; return; }
      send("arguments", value);
    }}, "Change");
    const allow = make("button", {className: "go", onclick: () => send("allow")}, "Allow");
    element.append(args, make("div", {className: "row"}, allow, change),
      make("div", {className: "row"}, reason, deny));
  } else {
    const answer = make("input", {placeholder: "Your answer", ariaLabel: "Answer"});
    const choices = (asked.choices || []).map((choice) =>
      make("button", {onclick: () => send("result", choice)}, choice));
    const give = make("button", {className: "go", onclick: () => send("result", answer.value)},
      "Answer");
    element.append(make("div", {className: "row"}, ...choices),
      make("div", {className: "row"}, answer, give),
      make("div", {className: "row"}, reason, deny));
  }
  element.append(error);
  return element;
}

// --- runs
let selected = null, source = null, lastId = null, retry = null;
const states = new Map();

async function refresh() {
  let state;
  try { state = await (await fetch("/state")).json(); }
  catch { return; }  // the server is down: what is shown stays
  const ids = new Set(state.waiting.map((request) => request.request_id));
  for (const [id, element] of cards) if (!ids.has(id)) { element.remove(); cards.delete(id); }
  for (const request of state.waiting) if (!cards.has(request.request_id)) {
    cards.set(request.request_id, card(request));  // what is typed into the others stays
    $("waiting").append(cards.get(request.request_id));
  }
  $("nothing").hidden = ids.size > 0;
  states.clear();
  $("runs").replaceChildren(...state.runs.map((run) => {
    states.set(run.run_id, run.state);
    const button = make("button", {onclick: () => select(run.run_id)},
      make("span", {}, run.prompt), make("span", {className: `state ${run.state}`}, run.state));
    button.setAttribute("aria-current", run.run_id === selected);
    return button;
  }));
  if (!selected && state.runs.length) select(location.hash.slice(1) || state.runs[0].run_id);
}

function select(runId) {
  selected = runId;
  location.hash = runId;
  lastId = null;
  view.clear();
  connect();
  refresh();
}

function connect() {
  if (source) source.close();
  clearTimeout(retry);
  const after = lastId === null ? "" : `?after=${lastId}`;
  source = new EventSource(`/runs/${encodeURIComponent(selected)}/events${after}`);
  const mine = source;
  source.onmessage = (message) => {
    lastId = message.lastEventId || lastId;
    view.show(JSON.parse(message.data));
  };
  source.onopen = () => view.live("");  // deltas may be missing
  source.onerror = () => {  // it connects again by itself, unless an answer was an error
    if (mine.readyState === EventSource.CLOSED && ["running", "ready", "suspended", undefined]
        .includes(states.get(selected))) retry = setTimeout(connect, 1000);
  };
}

const view = {
  clear() { this.last = ""; this.text = ""; this.bubble = null; this.calls = new Map();
    $("log").replaceChildren(); $("log").hidden = false; },
  live(text) {
    if (!text) { if (this.bubble) this.bubble.remove(); this.bubble = null; return; }
    if (!this.bubble) $("log").append(this.bubble = make("div", {className: "said"}));
    this.bubble.textContent += text;
  },
  text_of: (content) => typeof content === "string" ? content :
    content.filter((block) => block.type === "text").map((block) => block.text).join(""),
  show(event) {
    const chunk = event.type === "message_update" ? event.chunk : {};
    if (chunk.kind === "text") this.live(chunk.delta);
    if (event.type === "message_discarded") this.live("");
    if (event.type === "message_end") this.message(event.message);
    if (event.type === "tool_execution_end" && this.calls.has(event.tool_call_id)) {
      const row = this.calls.get(event.tool_call_id);
      row.classList.toggle("failed", event.is_error);
      row.lastChild.textContent = `→ ${this.text_of(event.result.content)}`;
    }
    if (["agent_start", "agent_end"].includes(event.type)) refresh();
  },
  message(message) {
    const written = JSON.stringify(message);
    if (message.role === "user")
      $("log").append(make("div", {className: "said user"}, this.text_of(message.content)));
    if (message.role !== "assistant" || written === this.last) return;  // announced again
    this.last = written;
    this.live("");
    const text = this.text_of(message.content);
    if (text) $("log").append(make("div", {className: "said"}, text));
    for (const call of message.content.filter((block) => block.type === "tool_call")) {
      const row = make("div", {className: "call"},
        make("div", {}, `${call.name} ${JSON.stringify(call.arguments)}`),
        make("div", {className: "result"}));
      this.calls.set(call.id, row);
      $("log").append(row);
    }
  },
};

$("start").onsubmit = async (submit) => {
  submit.preventDefault();
  try { select((await post("/runs", {prompt: submit.target.prompt.value})).run_id); }
  catch (failure) { note(failure.message); }
};
refresh();
setInterval(refresh, 1500);
</script>
</html>"""


# --- as a script ----------------------------------------------------------------------------------


class Server:
    """The server in this process, to be stopped and started again."""

    def __init__(self, db: Path, listening: socket.socket, minutes: float = 60) -> None:
        self.store = SqliteStore(db)
        app = make_app(self.store, make_agent(self.store, minutes))
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.listening = listening

    async def serve(self) -> None:
        await self.server.serve(sockets=[self.listening])
        self.store.close()


async def post(client: httpx2.AsyncClient, path: str, body: object, user: str = "") -> str:
    response = await client.post(path, json=body, headers={"x-user": user})
    return f"{response.status_code} {response.text}"


async def waiting(client: httpx2.AsyncClient, tools: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Wait until calls of these tools wait."""
    while True:
        state = (await client.get("/state")).json()
        found = {request["tool_name"]: request for request in state["waiting"]}
        if set(tools) == set(found):
            return found
        await asyncio.sleep(0.05)


def choice(request: dict[str, Any], decision: str, value: object = None) -> dict[str, object]:
    names = ("request_id", "run_id", "root_run_id", "tool_name")
    return {name: request[name] for name in names} | {"decision": decision, "value": value}


async def demo(db: Path) -> None:
    """Start a run, restart the server, let two people decide, and answer a question."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
            first = Server(db, listening.dup())
            serving = asyncio.create_task(first.serve())
            print("ada:", (await post(client, "/runs", {"prompt": "Refund order 7."}))[:3])
            await waiting(client, ["refund", "send_email"])
            first.server.should_exit = True
            await serving
            print("(the server is restarted)")

            second = Server(db, listening.dup())
            serving = asyncio.create_task(second.serve())
            calls = await waiting(client, ["refund", "send_email"])
            pay = calls["refund"]
            print(f"{pay['asked_by']} asks {pay['assignee']}: refund {pay['arguments']}")
            wrong = choice(pay, "arguments", {"order": 7, "amount": "much"})
            print("bob:", (await post(client, "/decisions", wrong, "bob"))[:3])
            less = choice(pay, "arguments", {"order": 7, "amount": 60})
            print("bob:", await post(client, "/decisions", less, "bob"))
            print("eve:", await post(client, "/decisions", choice(pay, "allow"), "eve"))
            later = choice(calls["send_email"], "deny", "Call her instead.")
            print("bob:", await post(client, "/decisions", later, "bob"))
            question = (await waiting(client, ["ask_user"]))["ask_user"]
            print(f"{question['request']['question']} {question['request']['choices']}")
            print(
                "ada:", await post(client, "/decisions", choice(question, "result", "10 €"), "ada")
            )
            async with client.stream("GET", f"/runs/{pay['root_run_id']}/events") as response:
                text = "".join([part async for part in response.aiter_text()])
            print(re.findall(r'"text":"(All done[^"]*)"', text)[-1])
            second.server.should_exit = True
            await serving


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__ and __doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--db", type=Path, default=Path("approvals.db"))
    parser.add_argument("--minutes", type=float, default=60, help="how long requests stay open")
    parser.add_argument("--demo", action="store_true", help="end by itself")
    options = parser.parse_args()
    if options.demo or (len(sys.argv) == 1 and not sys.stdin.isatty()):
        with tempfile.TemporaryDirectory() as folder:
            await demo(Path(folder, "runs.db"))
        return
    with socket.create_server(("127.0.0.1", options.port)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        await Server(options.db, listening, options.minutes).serve()


if __name__ == "__main__":
    asyncio.run(main())
