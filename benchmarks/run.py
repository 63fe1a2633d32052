"""What `make bench` runs. Every figure is a ratio or a rate within one run, on one machine."""

from __future__ import annotations

import compileall
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import msgspec

import clark_agent
from clark_agent import (
    AgentMessage,
    AssistantMessage,
    MessageAssembler,
    StreamChunk,
    ThinkingTagStreamFilter,
    ToolCall,
    ToolResultMessage,
    UserMessage,
    dump_transcript,
    load_transcript,
)
from clark_agent.stream import TextChunk, ToolCallChunk
from clark_agent.types import TextContent

MEGABYTE = 1_000_000


def main() -> None:
    print(f"Python {sys.version.split()[0]}, msgspec {msgspec.__version__}\n")
    imports()
    thinking()
    assembling()
    transcripts()


def best_of(repeats: int, work: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def imports() -> None:
    def start(statement: str) -> float:
        command = [sys.executable, "-c", statement]
        return best_of(1, lambda: subprocess.run(command, check=True))

    # As an installed package is: without this the compiler would be measured.
    compileall.compile_dir(Path(clark_agent.__file__).parent, quiet=1)
    statements = ("pass", "import asyncio, msgspec", "import clark_agent")
    rounds = [[start(statement) for statement in statements] for _ in range(20)]
    nothing, floor, ours = map(min, zip(*rounds, strict=True))
    floor, ours = floor - nothing, ours - nothing
    print("import")
    print(f"  asyncio, msgspec         {floor * 1000:6.1f} ms")
    print(f"  clark_agent              {ours * 1000:6.1f} ms   {ours / floor:.2f} x\n")


def thinking() -> None:
    def feed(deltas: Iterable[str]) -> None:
        stream = ThinkingTagStreamFilter()
        for delta in deltas:
            stream.feed(delta)
        stream.flush()

    prose = "Let me see. <thought>If x < 3, then y.</thought> It is <b>four</b>, so there. "
    shapes = {
        "prose": prose,
        "no tags": "all work and no play ",
        "unclosed thought": "<think>" + "hmm " * 200_000,
        "only <": "<",
        "<, then white space": "<" + " " * MEGABYTE,
        "almost tags": "<thinkin<reasonin",
    }
    print("thinking filter, seconds per 10 MB (and growth from 1 MB, 10.0 is linear)")
    for name, unit in shapes.items():
        small, large = (
            (unit * (size // len(unit) + 1))[:size] for size in (MEGABYTE, 10 * MEGABYTE)
        )
        whole, part = (best_of(3, partial(feed, [text])) for text in (large, small))
        cut, cut_part = (
            best_of(1, partial(feed, [text[i : i + 4] for i in range(0, len(text), 4)]))
            for text in (large, small)
        )
        print(
            f"  {name:<22} one delta {whole:6.3f} ({whole / part:4.1f})"
            f"   4-character deltas {cut:6.3f} ({cut / cut_part:4.1f})"
        )
    print()


def assembling() -> None:
    def fold(chunks: Sequence[StreamChunk]) -> None:
        assembler = MessageAssembler()
        for chunk in chunks:
            assembler.feed(chunk)
        assembler.message()

    print("message assembler, microseconds per chunk")
    for count in (1_000, 10_000, 100_000):
        text: Sequence[StreamChunk] = [TextChunk("abcd")] * count
        call = [ToolCallChunk(0, "c", "n", '{"a": "')]
        call += [ToolCallChunk(0, None, None, "abcd")] * count
        call += [ToolCallChunk(0, None, None, '"}')]
        each = [best_of(3, partial(fold, chunks)) / count * 1e6 for chunks in (text, call)]
        print(f"  {count:>7,} chunks   text {each[0]:.2f}   arguments {each[1]:.2f}")
    print()


def transcripts() -> None:
    messages: list[AgentMessage] = []
    for n in range(2_500):
        call = ToolCall(f"call_{n}", "read", {"path": f"/tmp/{n}", "lines": [n, n + 1]})
        messages += [
            UserMessage(f"question {n}", timestamp=n),
            msgspec.structs.replace(AssistantMessage.from_calls([call], "I look."), timestamp=n),
            ToolResultMessage(call.id, "read", (TextContent("text " * 20),), timestamp=n),
            msgspec.structs.replace(AssistantMessage.from_text("Here it is."), timestamp=n),
        ]
    data = dump_transcript(messages)
    decoder = msgspec.json.Decoder(AgentMessage)
    encoder = msgspec.json.Encoder()
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "read": (lambda: load_transcript(data), lambda: decoder.decode_lines(data)),
        "write": (lambda: dump_transcript(messages), lambda: encoder.encode_lines(messages)),
    }
    print(f"transcript of {len(messages):,} messages, {len(data) / MEGABYTE:.1f} MB")
    for name, (ours, floor) in pairs.items():
        a, b = best_of(9, ours), best_of(9, floor)
        print(f"  {name:<6} {a * 1000:6.1f} ms   msgspec alone {b * 1000:6.1f} ms   {a / b:.2f} x")


if __name__ == "__main__":
    main()
