"""A gateway in front of a model: callers have a token instead of the provider's key.

Needs the extra `gateway`. Here, server and client are in one program. In production, put
``app = gateway(...)`` into a module and serve it with ``uvicorn my_module:app``.
"""

import asyncio
import socket

import uvicorn

from clark_agent import AgentContext, LoopConfig, StreamError, run, tool
from clark_agent.gateway import gateway
from clark_agent.testing import ScriptedStream, call
from clark_agent.transports.proxy import ProxyStream


@tool
def weather(city: str) -> str:
    """Look up the weather of a city."""
    return f"22 °C and sunny in {city}"


async def ask(stream: ProxyStream) -> None:
    config = LoopConfig(stream=stream, tools=[weather])
    try:
        result = await run("Do I need an umbrella in Lisbon?", AgentContext("Be brief."), config)
        print(result.text)
    except StreamError as error:
        print(error)


async def main() -> None:
    model = ScriptedStream([call("weather", city="Lisbon"), "Sunny, 22 °C. Leave the umbrella."])
    app = gateway({"good": model}, tokens={"alice": "a-long-secret"})
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    serving = asyncio.create_task(server.serve(sockets=[listening]))

    await ask(ProxyStream(url, "a-long-secret", model="good"))
    await ask(ProxyStream(url, "a-wrong-secret", model="good"))

    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
