"""The public API as a user's type checker sees it. Never run."""

from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, assert_type

from msgspec import Struct
from temporalio.client import Client
from temporalio.worker import Worker

from clark_agent import (
    AfterToolCallContext,
    AfterToolDecision,
    Agent,
    AgentBuilder,
    AgentContext,
    AgentMessage,
    AgentTool,
    Answer,
    AssistantMessage,
    BeforeToolCallContext,
    Block,
    Budget,
    CancellationToken,
    ChannelSink,
    ChannelSteering,
    Compaction,
    Conversation,
    FanOutSink,
    FileContent,
    FunctionPlugin,
    ImageContent,
    LargeResults,
    LoopConfig,
    LoopDetector,
    LoopError,
    LoopOutcome,
    MaxTokensRecovery,
    ModelRetry,
    OpeningGate,
    Price,
    ProviderContent,
    Rewrite,
    RunContext,
    RunIdentity,
    RunResult,
    RunStream,
    SteeringReceipt,
    StopReason,
    StreamError,
    StreamErrorKind,
    StreamEvent,
    StreamRequest,
    Suspend,
    SystemMessage,
    TextContent,
    TokenBudget,
    ToolCall,
    ToolContext,
    ToolGateContext,
    ToolRegistry,
    ToolResult,
    ToolResultBudget,
    ToolSuspended,
    TransformContext,
    TypedTool,
    UniqueToolCallIds,
    Usage,
    UserMessage,
    agent_tool,
    dump_transcript,
    events,
    finish_tool,
    load_transcript,
    run,
    run_child,
    run_continue,
    run_sync,
    stream_run,
    tool,
)
from clark_agent.budget import Spent
from clark_agent.cancellation import LET_GO
from clark_agent.durable import dbos
from clark_agent.durable.temporal import (
    ClarkPlugin,
    RunHandle,
    handle,
    remote_agent_tool,
    start,
)
from clark_agent.errors import AlreadyDecided, RequestError, RequestExpired, RunLetGo
from clark_agent.events import public_event, public_events
from clark_agent.history import repair_history
from clark_agent.messages import Transcript, decode_message
from clark_agent.plugins.base import BeforeToolDecision
from clark_agent.prices import price_of
from clark_agent.rate_limit import LimitedStream, RateLimit, limited
from clark_agent.run_log import (
    Allow,
    Deny,
    FollowedEvent,
    GiveArguments,
    GiveResult,
    MemoryStore,
    RunLog,
    RunStore,
    RunSummary,
    RunTail,
    SqliteStore,
    WaitingRequest,
    advance,
    cancel,
    decide,
    deliver,
    follow,
    follow_up,
    kept_result,
    ready_runs,
    resume,
    sse,
    steer,
    waiting_for,
)
from clark_agent.run_log.postgres import PostgresStore
from clark_agent.steering import SteeringStatus
from clark_agent.stream import (
    AnnotationChunk,
    BlockChunk,
    Chunk,
    Done,
    MessageAssembler,
    Start,
    TextChunk,
)
from clark_agent.testing import (
    FakeClock,
    RecordingSink,
    ScriptedStream,
    call,
    check_events,
    fold_events,
    say,
)
from clark_agent.toolkit import SUSPEND, ApprovalGate, ask_user_tool
from clark_agent.tools import FinishTool
from clark_agent.transports import Anthropic, OpenAIChat
from clark_agent.types import Annotation
from clark_agent.waiting import Decision
from clark_agent.waiting import Verdict as Decided

# --- tools ------------------------------------------------------------------------------------


@tool
async def search(query: str, limit: int = 10) -> list[str]:
    return [query] * limit


@tool(name="add_numbers", timeout=5, parallel_safe_per_turn=True, reads_only=True)
def add(left: int, right: int, ctx: ToolContext) -> int:
    return left + right


async def use_tools(ctx: ToolContext) -> None:
    assert_type(await search("x", limit=3), list[str])
    assert_type(add(1, 2, ctx), int)
    assert_type(await search.execute({"query": "x"}, ctx), ToolResult)
    await ctx.update("half done")
    assert_type(ctx.identity, RunIdentity)


class ReadFile(TypedTool):
    name = "read_file"

    async def run(self, path: str, ctx: ToolContext) -> str:
        return path


class Raw(AgentTool):
    name = "raw"
    max_result_chars = "never"

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult.text("ok").with_narration("Did it.")


def plain(x: int) -> int:
    return x


assert_type(tool(plain)(1), int)
registry = ToolRegistry([search, add, ReadFile(), Raw(), plain])
assert_type(registry["search"], AgentTool)
assert_type(registry.names, tuple[str, ...])


# --- plugins ----------------------------------------------------------------------------------


class Guard:
    name = "guard"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
        if ctx.tool_call.name == "rm":
            return Block("no")
        return Rewrite({"path": "/tmp"}) if ctx.args else Answer(ToolResult.text("cached"))

    async def on_after_tool_call(self, ctx: AfterToolCallContext) -> AfterToolDecision | None:
        return AfterToolDecision(mark_error=True) if ctx.is_error else None


class Window:
    async def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        return messages[-10:] if ctx.estimated_tokens > 1000 else messages


class Inbox:
    def next_steering_messages(self) -> Iterable[AgentMessage]:
        return [UserMessage("hurry")]

    async def next_follow_up_messages(self) -> list[UserMessage]:
        return []


class Opening:
    def next_turn_tool_allowlist(self, ctx: ToolGateContext) -> set[str] | None:
        return {"search"} if ctx.iteration == 0 else None


class Printer:
    observes = (events.TurnEnd,)

    def on_event(self, event: events.AgentEvent) -> None:
        if isinstance(event, events.TurnEnd):
            print(event.tool_results)


# --- a transport ------------------------------------------------------------------------------


async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
    assembler = MessageAssembler()
    yield Start(AssistantMessage((), StopReason.OTHER))
    chunk = TextChunk("hello")
    assembler.feed(chunk)
    yield Chunk(chunk)
    yield Done(assembler.message(usage=Usage(1, 2)))


# --- config and run ---------------------------------------------------------------------------

channel = ChannelSink()
steering = ChannelSteering()
config = LoopConfig(
    stream=model,
    tools=[search, add, plain],
    plugins=[
        Guard(),
        Window(),
        Inbox(),
        Opening(),
        Printer(),
        steering,
        Compaction(window=100_000, model=model, pinned=lambda message: True),
        TokenBudget(10_000),
        ToolResultBudget(),
        UniqueToolCallIds(),
        OpeningGate(["search"]),
        FunctionPlugin("event_observer", print),
    ],
    event_sink=FanOutSink(channel, print),
    max_iterations=10,
    max_output_tokens_recovery=MaxTokensRecovery.doubling(ceiling=8192),
    clock=FakeClock(),
)
assert_type(config.registry, ToolRegistry)
assert_type(config.child(max_iterations=3), LoopConfig)
built = (
    AgentBuilder()
    .stream(model)
    .tool(search)
    .before_tool_call(lambda ctx: Block() if ctx.tool_call.name == "rm" else None)
    .event_observer(print)
    .plugin(Guard())
    .max_iterations(3)
    .build()
)
assert_type(built, LoopConfig)
receipt = steering.handle.steer("now")
_ = assert_type(receipt, SteeringReceipt)


def script_of_one() -> ScriptedStream:
    return ScriptedStream(["one"])


async def main() -> None:
    context = AgentContext("You help.", identity=RunIdentity.root())
    result = await run("Hi", context, config, CancellationToken())
    assert_type(result, RunResult)
    assert_type(result.messages, tuple[AgentMessage, ...])
    assert_type(result.outcome, LoopOutcome)
    assert_type(result.usage, Usage)
    try:
        await run_continue(context.extend(result), config)
    except StreamError as error:
        assert_type(error.kind, StreamErrorKind)
    except LoopError as error:
        assert_type(error.messages, tuple[AgentMessage, ...])
        assert_type(error.partial, AssistantMessage | None)
        context.extend(error)
    async for event in channel:
        assert_type(event, events.AgentEvent)
    assert_type(run_sync("Hi", context, config), RunResult)
    async with stream_run("Hi", context, config) as stream:
        assert_type(stream, RunStream)
        async for event in public_events(stream):
            assert_type(event, events.AgentEvent)
    assert_type(stream.result.spent, Spent | None)
    assert_type(stream.result.cost, float | None)
    conversation = Conversation(config, "You help.")
    assert_type(await conversation.send("Hi"), RunResult)
    assert_type(conversation.stream("Hi"), RunStream)
    settled = await steering.handle.steer(UserMessage("stop"), when="now")
    assert_type(settled.status, SteeringStatus)
    assert_type(settled.turn, int | None)


# --- agents below agents ------------------------------------------------------------------------

assert_type(agent_tool("ask", "Asks.", config, max_depth=2, timeout=3), AgentTool)
assert_type(finish_tool(str), FinishTool[str])
assert_type(finish_tool(list[int]).output(None), list[int])
assert_type(finish_tool(int | None), FinishTool[Any])
assert_type(limited(script_of_one(), RateLimit(concurrency=3)), LimitedStream)
assert_type(price_of("gpt-5", "openai"), Price | None)
budget = Budget(turns=3, cost=1, prices={"m": Price(input=1, output=2.5)})
LoopConfig(
    stream=script_of_one(),
    plugins=[LoopDetector(2, None), LargeResults(9)],
    budget=budget,
    model_id="m",
)


@tool
async def delegate(task: str, ctx: ToolContext) -> str:
    result = await run_child(ctx, task, config)
    assert_type(result.tree_usage, Usage)
    assert_type(result.tree_cost, float | None)
    return result.text


# --- data -------------------------------------------------------------------------------------

message = decode_message(b"{}")
match message:
    case AssistantMessage():
        assert_type(message.tool_calls, tuple[ToolCall, ...])
        assert_type(message.annotations, tuple[Annotation, ...])
    case UserMessage(content=str(text)):
        assert_type(text, str)
    case SystemMessage(content):
        assert_type(content, str)
    case _:
        pass
UserMessage((TextContent("x"), ImageContent("data:,"), FileContent("data:,", name="a.pdf")))
BlockChunk(ProviderContent("anthropic", {"type": "x"}))
AnnotationChunk(Annotation("url", url="u", start=0, end=1))
Anthropic("claude-sonnet-5", cache="1h", thinking_tags="anywhere")
OpenAIChat("gpt-5.1", prompt_cache_key="k", thinking_tags=False)
assert_type(load_transcript(b""), Transcript)
assert_type(dump_transcript([UserMessage((TextContent("x"),))]), bytes)
assert_type(repair_history([]).messages, tuple[AgentMessage, ...])
sink = RecordingSink()
assert_type(sink.of(events.TurnEnd), list[events.TurnEnd])
check_events(sink.events)
assert_type(fold_events(sink.events), tuple[AgentMessage, ...])
assert_type(sink.events[0].type, str)
assert_type(public_event(sink.events[0]), events.AgentEvent | None)
script = ScriptedStream(["text", call("search", query="x"), say("and", call("add")), OSError()])
assert_type(script.requests, list[StreamRequest])

# --- agents -----------------------------------------------------------------------------------


class Verdict(Struct):
    score: int


class Shop:
    name: str = "Alba"


@tool
def item_stock(ctx: ToolContext[Shop], item: str) -> int:
    assert_type(ctx.deps, Shop)
    return len(item)


@tool(timeout=5)
async def order(ctx: ToolContext[Shop], item: str) -> str:
    return item


class Price2(TypedTool[Shop]):
    name = "price"

    def run(self, ctx: ToolContext[Shop]) -> str:
        return ctx.deps.name


def prompt(ctx: RunContext[Shop]) -> str:
    return ctx.deps.name


def check(value: Verdict, ctx: RunContext[Shop]) -> None:
    raise ModelRetry("Again.")


assert_type(item_stock(ToolContext(tool_call_id="c", tool_name="t"), item="x"), int)
plain_agent = Agent(script, tools=[add], temperature=0.5)
shop_agent = Agent(
    script,
    tools=[item_stock, order, add, Price2()],
    system_prompt=prompt,
    output=Verdict,
    output_validators=[check],
    deps_type=Shop,
    max_iterations=3,
)
assert_type(shop_agent, Agent[Verdict, Shop])


def plain_function(text: str) -> str:
    return text


assert_type(Agent(script), Agent[str, None])
assert_type(Agent(script, tools=[plain_function]), Agent[str, None])
assert_type(Agent(script, output=Verdict, system_prompt=lambda ctx: "x"), Agent[Verdict, None])
union_agent: Agent[int | str, None] = Agent(script, output=int | str, deps_type=type(None))


async def use_agents() -> None:
    assert_type((await plain_agent.run("x")).output, str)
    assert_type((await shop_agent.run("x", deps=Shop())).output, Verdict)
    assert_type((await shop_agent.run("x", deps=Shop(), messages=[])).output.score, int)
    assert_type(shop_agent.run_sync("x", deps=Shop()).output, Verdict)
    assert_type((await union_agent.run("x")).output, int | str)
    async with shop_agent.stream("x", deps=Shop()) as agent_stream:
        async for delta in agent_stream.text_stream():
            assert_type(delta, str)
    assert_type(agent_stream.result.output, Verdict)
    talk = shop_agent.conversation(deps=Shop())
    assert_type((await talk.send("x")).output, Verdict)
    Agent(script, tools=[shop_agent.as_tool("Sells.", name="shop")], deps_type=Shop)


# --- runs that wait ---------------------------------------------------------------------------


class Manager:
    name = "manager"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend | Block | None:
        if ctx.tool_call.name == "rm":
            return Block("no")
        return Suspend({"may": ctx.args}, expires_in=3600, assignee="managers")


class Later:
    async def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
        return Suspend(until=datetime.now(UTC), event="paid")


@tool(idempotent=True)
def pay(ctx: ToolContext, amount: float) -> str:
    assert_type(ctx.idempotency_key, str)
    raise ToolSuspended({"amount": amount}, until=1_700_000_000_000, assignee="ada")


class Transfer(TypedTool):
    name = "transfer"

    def run(self, amount: float) -> str:
        return f"{amount}"

    async def did_it_happen(self, key: str) -> ToolResult | None:
        return ToolResult.text(key)


class Post(AgentTool):
    name = "post"

    def did_it_happen(self, key: str) -> ToolResult | None:
        return None

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult.text("posted")


def who(ctx: BeforeToolCallContext) -> str | None:
    return None if ctx.identity is None else ctx.identity.conversation_id


store: RunStore = MemoryStore()
waiter = Agent(
    script,
    tools=[pay, Transfer(), Post(), ask_user_tool(SUSPEND, timeout=60, assignee="ada")],
    plugins=[Manager(), Later(), ApprovalGate(SUSPEND, tools=["pay"], assignee=who)],
    run_log=RunLog(store, mail_every=1, live=True),
)


def judge(request: WaitingRequest) -> Decision:
    assert_type(request.needs, Literal["permission", "result"])
    assert_type(request.expires_at, int | None)
    if request.needs == "result":
        return GiveResult("a text") if request.event is None else GiveResult({"any": ["JSON"]})
    return GiveArguments({"amount": 3}) if request.assignee else Deny("too much")


def say_how(decided: Decided) -> str:
    match decided:
        case Deny(reason):
            return reason or ""
        case Allow() | GiveArguments() | GiveResult():
            return "a person"
        case _:
            return "time or an event"


async def wait_for_people() -> None:
    result = await waiter.run("x", signal=CancellationToken())
    assert_type(result.waiting, tuple[WaitingRequest, ...])
    assert_type(waiting_for(store, assignee="ada", limit=3), list[WaitingRequest])
    for request in waiting_for(SqliteStore("runs.db"), "run-1"):
        try:
            left = await decide(store, request.run_id, request.request_id, judge(request), by="ada")
            assert_type(left, tuple[WaitingRequest, ...])
        except AlreadyDecided as error:
            assert_type(error.by, str | None)
        except RequestExpired as error:
            assert_type(error.at, int)
        except RequestError as error:
            assert_type(error.request_id, str)
    assert_type(ready_runs(store), list[str])
    assert_type(kept_result(store, "run/1-0"), str)
    assert_type(await resume(store, "run-1", waiter.config), RunResult)
    stop = CancellationToken()
    stop.cancel(LET_GO)
    try:
        assert_type(await advance(store, "run-1", waiter, "x", stop), RunResult[str])
        await advance(
            store, "run-2", shop_agent, [UserMessage("x")], deps=Shop(), retry_failed=True
        )
        await advance(RunLog(store), "run-3", waiter)
    except RunLetGo as error:
        assert_type(error.messages, tuple[AgentMessage, ...])
    assert_type(steer(store, "run-1", "Faster.", "now", id="m-1"), bool)
    postgres = PostgresStore("postgresql://db/shop")
    queue = dbos.connect(RunLog(postgres, live=True), queue="agents")
    assert_type(queue, dbos.RunQueue)
    assert_type(queue.submit("run-1", waiter, "x", tenant="acme"), bool)
    assert_type(await queue.result("run-1", waiter), RunResult[str])
    worker = dbos.install(postgres, [waiter, shop_agent], deps={"shop": Shop()}, per_tenant=2)
    assert_type(worker, dbos.Worker)
    worker.stop(grace=5.0)
    assert_type(follow_up(store, "run-1", UserMessage("And?")), bool)
    assert_type(cancel(store, "run-1", "the user has left"), bool)
    assert_type(deliver(store, "run-1", "paid", {"amount": 3}, id="p-1"), bool)
    assert_type(waiter.conversation().suspended_run_id, str | None)
    assert_type(store.runs(outcome="suspended"), Sequence[RunSummary])
    assert_type(store.tail("run-1", after=3), RunTail)
    async for followed in follow(store, "run-1", after="12.3", until_suspended=True):
        assert_type(followed, FollowedEvent)
        assert_type(followed.event, events.AgentEvent)
        assert_type(followed.id, str | None)
    async for frame in sse(store, "run-1", after=None, public=False, heartbeat=5):
        assert_type(frame, bytes)


# --- Temporal -------------------------------------------------------------------------------------


async def in_temporal(client: Client, verdicts: Agent[list[int]], shop: Agent[str, Shop]) -> None:
    store = SqliteStore("runs.db")

    def deps(run_id: str) -> Shop:
        return Shop()

    plugin = ClarkPlugin(store, agents=[verdicts, shop], deps=deps)
    Worker(client, task_queue="agents", plugins=[plugin])
    run = await start(client, verdicts, "x", id="run-1", task_queue="agents", heartbeat=5)
    assert_type(run, RunHandle[list[int]])
    assert_type(await run.result(), RunResult[list[int]])
    assert_type(await handle(client, shop, "run-2", store=store).result(), RunResult[str])
    assert_type(await run.steer("Faster.", "now", id="m-1"), bool)
    assert_type(await run.follow_up(UserMessage("And?")), bool)
    assert_type(await run.cancel("the user has left"), bool)
    assert_type(await run.deliver("paid", {"amount": 3}, id="p-1"), bool)
    for request in await run.waiting():
        await run.decide(request.request_id, Allow(), by="ada")
    async for followed in run.events(after="3.1"):
        assert_type(followed, FollowedEvent)
    assert_type(await run.problem(), str | None)
    remote = remote_agent_tool("gpu", "Computes.", verdicts, task_queue="gpu", expires_in=60)
    Agent("openai:gpt-5.1", name="chief", tools=[remote])
