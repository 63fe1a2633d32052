"""The client of the SDK's first version. Run in the environment ``older``; prints JSON.

python first_sdk.py http://...    or    python first_sdk.py program argument ...
"""

import asyncio
import json
import sys

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamablehttp_client


async def answer(context, params):
    return types.ElicitResult(action="accept", content={"decision": "once"})


async def main(target):
    if target[0].startswith("http"):
        transport = streamablehttp_client(target[0])
    else:
        transport = stdio_client(StdioServerParameters(command=target[0], args=target[1:]))
    progress = []

    async def heard(amount, total, message):
        progress.append(message)

    said = {"progress": progress}
    async with (
        transport as streams,
        ClientSession(*streams[:2], elicitation_callback=answer) as session,
    ):
        begun = await session.initialize()
        said["server"] = begun.serverInfo.name
        said["version"] = begun.protocolVersion
        tools = (await session.list_tools()).tools
        said["tools"] = {tool.name: tool.inputSchema for tool in tools}
        said["read only"] = [
            tool.name for tool in tools if tool.annotations and tool.annotations.readOnlyHint
        ]
        for name, arguments in json.loads(sys.stdin.readline()):
            result = await session.call_tool(name, arguments, progress_callback=heard)
            said.setdefault("results", []).append(result.model_dump(mode="json"))
    print(json.dumps(said))


asyncio.run(main(sys.argv[1:]))
