"""`make bench-parts`: rates of two parts that see every delta, and how they grow with its size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from time import perf_counter

from clark_agent.messages import ThinkingTagStreamFilter
from clark_agent.stream import MessageAssembler, StreamChunk, TextChunk, ToolCallChunk

MEGABYTE = 1_000_000


def main() -> None:
    thinking()
    assembling()


def best_of(rounds: int, work: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(rounds):
        started = perf_counter()
        work()
        times.append(perf_counter() - started)
    return min(times)


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


if __name__ == "__main__":
    main()
