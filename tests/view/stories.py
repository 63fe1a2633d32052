"""Real runs for the page: what an agent may do, and what a hostile model would write."""

from __future__ import annotations

import asyncio
import struct
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from clark_agent import (
    Agent,
    AssistantMessage,
    BeforeToolCallContext,
    Block,
    CancellationToken,
    ChannelSteering,
    MaxTokensRecovery,
    Rewrite,
    RunIdentity,
    StopReason,
    TextContent,
    ToolContext,
    ToolResult,
    UserMessage,
    tool,
)
from clark_agent.errors import LoopError, StreamError
from clark_agent.plugins import Compaction, ToolResultBudget
from clark_agent.plugins.base import BeforeRequestContext, BeforeToolDecision
from clark_agent.run_log import RunLog
from clark_agent.run_log.store import RunStore
from clark_agent.stream import Chunk, Done, Start, StreamEvent, StreamFn, StreamRequest, TextChunk
from clark_agent.testing import FakeClock, ScriptedStream, call
from clark_agent.toolkit import SUSPEND, ApprovalGate, Workspace, file_tools
from clark_agent.types import (
    AgentMessage,
    Annotation,
    CustomMessage,
    FileContent,
    ImageContent,
    ReasoningContent,
    ThinkingContent,
    ToolCall,
    Usage,
)

MODEL = "claude-sonnet-4-5"
TASK = "The order page shows 0.30000000000000004 €. Find out why, and fix it."

PRICES = '''"""Prices of the shop."""


def total(prices: list[float]) -> float:
    """Add the prices of an order."""
    result = 0.0
    for price in prices:
        result += price
    return result


def shown(amount: float) -> str:
    """Format an amount for people."""
    return f"{amount} €"
'''
FAILURE = """\
============================= test session starts ==============================
collected 12 items

tests/test_prices.py ...F........                                         [100%]

    def test_total_is_exact():
>       assert shown(total([0.1, 0.2])) == "0.30 €"
E       AssertionError: assert '0.30000000000000004 €' == '0.30 €'

========================= 1 failed, 11 passed in 0.21s =========================
"""


def picture(width: int = 240, height: int = 90) -> str:
    """A chart as a PNG, in a data: URL."""
    rows = bytearray()
    for y in range(height):
        rows.append(0)
        for x in range(width):
            bar = height - 12 - (x // 24 * 37) % 60
            is_bar = y > bar and x % 24 > 5
            rows += bytes((42, 85, 196) if is_bar else (236, 240, 250))

    def chunk(name: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    png += chunk(b"IDAT", zlib.compress(bytes(rows))) + chunk(b"IEND", b"")
    return f"data:image/png;base64,{b64encode(png).decode()}"


@tool(reads_only=True)
def run_tests(path: str) -> ToolResult:
    """Run the tests below a path."""
    if path == "tests/missing":
        return ToolResult.error("there is no folder tests/missing")
    return ToolResult.text(FAILURE).with_narration("1 of 12 tests failed.")


@tool(reads_only=True)
def chart(what: str) -> ToolResult:
    """Draw a chart."""
    image = ImageContent(picture(), "image/png", f"A chart of {what}")
    return ToolResult((TextContent(f"the chart of {what}"), image))


@tool
def delete(path: str) -> str:
    """Delete a file."""
    return f"{path} is gone"


@tool
def refund(order: int, amount: float, reason: str) -> str:
    """Pay an amount back to the customer."""
    return f"refunded {amount:g} € for order {order}: {reason}"


class Guard:
    """Keeps deletions inside the workspace."""

    name = "guard"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
        if ctx.tool_call.name != "delete":
            return None
        if ctx.args["path"].startswith("/"):
            return Block("Only files inside the workspace can be deleted.")
        return Rewrite({"path": f"build/{ctx.args['path']}"})


def answer(
    text: str,
    *calls: ToolCall,
    thinking: str = "",
    reasoning: str = "",
    usage: tuple[int, int, int] = (900, 120, 0),
) -> AssistantMessage:
    """An answer with usage: input, output and cached tokens."""
    blocks: list[Any] = []
    if reasoning:
        blocks.append(ReasoningContent(reasoning))
    if thinking:
        blocks.append(ThinkingContent(thinking))
    if text:
        blocks.append(TextContent(text))
    given, output, cached = usage
    tokens = Usage(given, output, 0, cached)
    reason = StopReason.TOOL_USE if calls else StopReason.END_TURN
    return AssistantMessage((*blocks, *calls), reason, usage=tokens)


CUT = AssistantMessage(
    (TextContent("The loop adds floats, so the sum is not ex"),),
    StopReason.MAX_TOKENS,
    usage=Usage(400, 64, 0, 3_900),
)
FINAL = """\
## What was wrong

`total` added **floats**, and `0.1 + 0.2` is not exactly `0.3`. It adds cents now.

| amount | before | now |
|---|---|---|
| 0.1 + 0.2 | 0.30000000000000004 € | 0.30 € |
| 19.99 × 3 | 59.97 € | 59.97 € |

1. `shop/prices.py` adds integers.
2. `shown` always has two decimals.

```python
assert shown(total([0.1, 0.2])) == "0.30 €"
```

More about it: [floating point](https://docs.python.org/3/tutorial/floatingpoint.html).
"""


def workspace(folder: Path) -> Workspace:
    (folder / "shop").mkdir(parents=True, exist_ok=True)
    (folder / "shop" / "prices.py").write_text(PRICES)
    return Workspace(folder)


def fixing(store: RunStore, folder: Path) -> Agent[str, None]:
    """An agent that mends a shop: every kind of step is in its run."""
    reviewer = Agent(
        ScriptedStream(
            [
                answer("", call("run_tests", path="tests"), usage=(700, 40, 0)),
                answer("The change is right. Add a test for 19.99 × 3.", usage=(300, 30, 700)),
            ]
        ),
        name="reviewer",
        model_id=MODEL,
        tools=[run_tests],
        system_prompt="You review changes.",
    )
    old = "    result = 0.0\n    for price in prices:\n        result += price\n    return result\n"
    new = "    return sum(round(100 * price) for price in prices) / 100\n"
    edit = {"path": "shop/prices.py", "old": old, "new": new}
    steering = ChannelSteering()

    def look(request: StreamRequest) -> AssistantMessage:
        _ = steering.handle.steer("Keep the signature of total, please.")
        return answer(
            "I look at the code, and run its tests.",
            call("read_file", path="shop/prices.py"),
            call("run_tests", path="tests"),
            thinking="The number looks like a sum of floats. Where is it added?",
            usage=(2_100, 96, 0),
        )

    script: list[Any] = [
        look,
        CUT,
        answer(
            "`total` adds floats. It should add cents.",
            call("edit_file", **edit),
            call("delete", path="cache.txt"),
            call("delete", path="/etc/hosts"),
            reasoning="Cents are integers, so their sum is exact.",
            usage=(700, 310, 3_900),
        ),
        answer(
            "Another pair of eyes, and a chart for the ticket.",
            call("review", task="Look at shop/prices.py"),
            call("chart", what="orders"),
            call("run_tests", path="tests/missing"),
            usage=(450, 120, 4_600),
        ),
        answer(FINAL, usage=(820, 240, 5_000)),
    ]
    tools = [
        *file_tools(workspace(folder)),
        run_tests,
        chart,
        delete,
        reviewer.as_tool("Reviews a change.", name="review"),
    ]
    return Agent(
        ScriptedStream(script),
        tools=tools,
        system_prompt="You mend the code of a shop. Say in one sentence what you do next.",
        plugins=[Guard(), ToolResultBudget(200), steering],
        model_id=MODEL,
        run_log=RunLog(store),
        name="fixer",
        max_output_tokens=2_000,
        max_output_tokens_recovery=MaxTokensRecovery.doubling(),
    )


async def run_fix(store: RunStore, folder: Path, run_id: str = "fix") -> None:
    """The run of `fixing`, with a message while it works."""
    await fixing(store, folder).run(TASK, identity=RunIdentity.root(run_id))


def refunding(store: RunStore) -> Agent[str, None]:
    """An agent whose call waits for a person. Its answer depends on the messages alone."""

    def after(request: StreamRequest) -> Any:
        said = [m for m in request.messages if isinstance(m, AssistantMessage)]
        if not said:
            body: dict[str, Any] = {"order": 7, "amount": 120.0, "reason": "arrived broken"}
            return answer(
                "The kettle arrived broken. I pay the money back.", call("refund", **body)
            )
        return answer(f"Done: {request.messages[-1].plain_text}")

    return Agent(
        ScriptedStream([after], at_end="repeat"),
        tools=[refund],
        plugins=[ApprovalGate(SUSPEND, assignee="support")],
        model_id=MODEL,
        run_log=RunLog(store),
    )


class LiveModel:
    """A model that says what a test puts into its queue: a text, calls, or None for the end."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[str | Sequence[ToolCall] | None] = asyncio.Queue()
        self.asked = asyncio.Event()

    async def __call__(
        self, request: StreamRequest, signal: CancellationToken
    ) -> AsyncIterator[StreamEvent]:
        self.asked.set()
        yield Start(AssistantMessage((), StopReason.OTHER))
        text, calls = "", tuple[ToolCall, ...]()
        while (part := await self.said.get()) is not None:
            if not isinstance(part, str):
                calls = tuple(part)
                break
            text += part
            yield Chunk(TextChunk(part))
        yield Done(answer(text, *calls))


class Adviser:
    """A plugin that asks another model before the first two requests, and adds what it says."""

    name = "adviser"

    def __init__(self, model: StreamFn) -> None:
        self.model = model

    async def before_request(self, ctx: BeforeRequestContext) -> list[AgentMessage] | None:
        if ctx.iteration > 1:
            return None
        try:
            said = await ctx.ask_model("What is risky here?", stream=self.model)
        except StreamError:
            return None
        advice: list[AgentMessage] = [UserMessage(f"Advice: {said.plain_text}")]
        return [*advice, CustomMessage("advice", {"of": "another model"})]


LOG = "".join([f"{n:06} {'failed' if n == 9_000 else 'ok'} the order\n" for n in range(15_000)])
"""What `read_log` returns: 300,004 characters."""
SUMMARY = "## So far\n\nThe log has **one** failure, entry 9000. The pages 1 and 2 are fine."
OTHER_MODEL = "gpt-5-mini"


class Audit:
    """An agent whose run has a model that a plugin asks, a large result, and compactions."""

    def __init__(self, store: RunStore) -> None:
        self.clock = FakeClock()
        self.sent: list[Sequence[AgentMessage]] = []
        """The messages of each request of a turn."""

        @tool(reads_only=True)
        def read_log() -> str:
            """Read the log of the night."""
            return LOG

        @tool(reads_only=True)
        def read_page(number: int) -> str:
            """Read a page of the orders."""
            return f"Page {number}. " + "An order of a kettle, paid and sent. " * 100

        adviser: Any = ScriptedStream([self.advise, ConnectionError("no route to " + "x" * 9_000)])
        adviser.model = OTHER_MODEL
        self.agent = Agent(
            ScriptedStream([self.say], at_end="repeat"),
            tools=[read_log, read_page],
            plugins=[Adviser(adviser), Compaction(8_000)],
            model_id=MODEL,
            clock=self.clock,
            run_log=RunLog(store),
            name="auditor",
        )
        calls = [call("read_log"), *[call("read_page", number=n) for n in range(1, 6)]]
        self.steps = iter([*[answer("", each) for each in calls], answer("One order has failed.")])

    def advise(self, request: StreamRequest) -> AssistantMessage:
        self.clock.time_ms += 1_500
        return answer("Look at the *night* first.", usage=(200, 10, 0))

    def say(self, request: StreamRequest) -> AssistantMessage:
        self.clock.time_ms += 400
        given = sum([len(message.plain_text) for message in request.messages]) // 4
        if "Write a summary" in request.messages[-1].plain_text:
            return answer(SUMMARY, usage=(given, 60, 0))
        self.sent.append(request.messages)
        return replace(next(self.steps), usage=Usage(given, 40))

    async def run(self, run_id: str = "audit") -> None:
        await self.agent.run("Is every order paid?", identity=RunIdentity.root(run_id))


EVIL = "<img src=x onerror=alert(1)><script>alert(2)</script>"
"""What must never become an element."""
EVIL_MARKDOWN = f"""\
{EVIL} <svg onload=alert(3)><iframe src="javascript:alert(4)"></iframe>

[click](javascript:alert(5)) [data](data:text/html,<script>alert(6)</script>)
[v](vbscript:x) ![remote](https://evil.example/pixel.png) ![svg](data:image/svg+xml;base64,PHN2Zz4=)
[x]: javascript:alert(7) <https://evil.example" onmouseover="alert(8)>

| {EVIL} | b |
|---|---|
| `{EVIL}` | **{EVIL}** |

```{EVIL}
{EVIL}</code></pre><script>alert(9)</script>
```
<javascript:alert(10)> https://evil.example/"onclick=alert(11) \u2028 \u2029 </script><!-- <script>
"""


class EvilGuard:
    """A plugin with a hostile name."""

    name = EVIL

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> BeforeToolDecision | None:
        return Block(EVIL) if ctx.args.get("block") else None


async def run_evil(store: RunStore, run_id: str) -> None:
    """A run in which everything that can be text is hostile."""

    @tool
    async def leak(ctx: ToolContext, block: bool = False) -> ToolResult:
        """<script>alert(12)</script>"""
        await ctx.update(ToolResult.text(EVIL).with_narration(EVIL))
        svg = "data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9YWxlcnQoMSk+PC9zdmc+"
        content = (
            TextContent(EVIL_MARKDOWN),
            TextContent(f"--- {EVIL}\n+++ {EVIL}\n@@ -1 +1 @@\n-{EVIL}\n+{EVIL}"),
            ImageContent(svg, "image/svg+xml", EVIL),
            ImageContent("https://evil.example/pixel.png", "image/png", EVIL),
            ImageContent("javascript:alert(13)", "text/html", EVIL),
            FileContent("javascript:alert(14)", "text/html", EVIL),
        )
        return ToolResult(content, details={EVIL: EVIL, "diff": EVIL}, narration=EVIL)

    calls = [
        call("leak", call_id=EVIL),
        call("leak", call_id="b", block=True),
        ToolCall("c", EVIL, {EVIL: EVIL, "__proto__": {"x": EVIL}}),
    ]
    first = answer(EVIL_MARKDOWN, *calls, thinking=EVIL_MARKDOWN, reasoning=EVIL)
    sources = (Annotation("url", "javascript:alert(15)", EVIL, EVIL),)
    agent = Agent(
        ScriptedStream([first, replace(answer(EVIL), annotations=sources), RuntimeError(EVIL)]),
        tools=[leak],
        plugins=[EvilGuard()],
        system_prompt=EVIL_MARKDOWN,
        model_id=EVIL,
        conversation_id=EVIL,
        agent_name=EVIL,
        run_log=RunLog(store),
    )
    prompts: list[AgentMessage] = [UserMessage(EVIL_MARKDOWN), CustomMessage(EVIL, {EVIL: EVIL})]
    await agent.run(prompts, identity=replace(RunIdentity.root(run_id), conversation_id=EVIL))


async def run_evil_failure(store: RunStore, run_id: str) -> None:
    """A run that fails with a hostile text."""
    agent = Agent(ScriptedStream([RuntimeError(EVIL)]), run_log=RunLog(store), model_id=EVIL)
    with suppress(LoopError):
        await agent.run(EVIL, identity=RunIdentity.root(run_id))
