"""Send a message to an agent while it works, and see when it takes effect.

The agent looks up two cities, one after the other. The message arrives during the first call.
"""

import asyncio

from clark_agent import (
    AgentContext,
    ChannelSteering,
    ExecutionMode,
    LoopConfig,
    SteerWhen,
    run,
    tool,
)
from clark_agent.testing import ScriptedStream, call

started = asyncio.Event()


@tool
async def find_hotels(city: str) -> str:
    """Find hotels in a city."""
    started.set()
    await asyncio.sleep(0.02)
    return f"3 hotels in {city}"


async def intervene(steering: ChannelSteering, when: SteerWhen) -> None:
    await started.wait()
    # Wait until the message is delivered or expired.
    receipt = await steering.handle.steer("Make it Faro, please.", when)
    print(f"  [{receipt.status} in turn {receipt.turn}]")


async def plan_a_trip(when: SteerWhen) -> None:
    started.clear()
    steering = ChannelSteering()
    batch = [call("find_hotels", city="Porto"), call("find_hotels", city="Lisbon")]
    config = LoopConfig(
        stream=ScriptedStream([batch, "Faro it is."]),
        tools=[find_hotels],
        plugins=[steering],
        default_execution_mode=ExecutionMode.SEQUENTIAL,
    )
    print(f"{when}:")
    user = asyncio.create_task(intervene(steering, when))
    result = await run("Where can I stay?", AgentContext("You plan trips."), config)
    await user
    for message in result.messages[2:]:
        print(f"  {message.plain_text}")


async def main() -> None:
    for when in SteerWhen:
        await plan_a_trip(when)


if __name__ == "__main__":
    asyncio.run(main())
