"""Log a run, resume it after a failure, replay it, and count what it used."""

import asyncio
from tempfile import TemporaryDirectory

from clark_agent import AgentContext, LoopConfig, LoopError, RunIdentity, run, tool
from clark_agent.replay import replay
from clark_agent.run_log import JsonlStore, RunLog, resume, usage_tree
from clark_agent.testing import ScriptedStream, call


@tool
def book(room: str) -> str:
    """Book a room. It must not happen twice."""
    print(f"booking {room}")
    return f"{room} is booked"


async def main(folder: str) -> None:
    store = JsonlStore(folder)
    model = ScriptedStream([call("book", room="room 5"), ConnectionError("the line went dead")])
    config = LoopConfig(stream=model, tools=[book], run_log=RunLog(store))
    context = AgentContext("Be brief.", identity=RunIdentity.root("holiday"))
    try:
        await run("Book room 5.", context, config)
    except LoopError as error:
        print(error)

    config = config.replace(stream=ScriptedStream(["Room 5 is yours."]))
    result = await resume(store, "holiday", config)  # in this process or another
    print(result.text)
    print(await replay(store, "holiday", config))  # calls neither model nor tool
    print(usage_tree(store, "holiday").tool_calls, "tool call")


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        asyncio.run(main(folder))
