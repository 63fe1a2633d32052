"""A scripted model streams an answer with a tool call; the pieces become one typed message."""

import asyncio
from collections.abc import AsyncIterator

from clark_agent import (
    AssistantMessage,
    CancellationToken,
    MessageAssembler,
    StopReason,
    StreamEvent,
    StreamRequest,
    UserMessage,
    encode_message,
)
from clark_agent.stream import Chunk, Done, Start, TextChunk, ToolCallChunk


async def model(request: StreamRequest, signal: CancellationToken) -> AsyncIterator[StreamEvent]:
    """A transport that always says the same: any async generator of this shape is one."""
    assembler = MessageAssembler()
    yield Start(AssistantMessage((), StopReason.OTHER))
    for chunk in (
        TextChunk("I look "),
        TextChunk("into the folder."),
        ToolCallChunk(0, "call_1", "list_files", '{"pa'),
        ToolCallChunk(0, None, None, 'th": "."}'),
    ):
        assembler.feed(chunk)
        yield Chunk(chunk)
    yield Done(assembler.message())


async def main() -> None:
    request = StreamRequest(system_prompt="", messages=[UserMessage("What is here?")])
    async for event in model(request, CancellationToken()):
        match event:
            case Chunk(TextChunk(delta)):
                print(delta, end="", flush=True)
            case Done(message):
                print(f"\n{encode_message(message).decode()}")
            case _:
                pass


asyncio.run(main())
