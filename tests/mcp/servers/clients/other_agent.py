"""An agent of another framework, with a scripted model. Run in the environment ``current``; prints
JSON.

    python other_agent.py http://...    or    python other_agent.py program argument ...
"""

import asyncio
import json
import sys

from fastmcp.client.transports import StdioTransport
from pydantic_ai import Agent
from pydantic_ai.mcp import MCPToolset
from pydantic_ai.messages import ModelResponse, TextPart, ToolCallPart, ToolReturnPart
from pydantic_ai.models.function import FunctionModel

CALLS = json.loads(sys.stdin.readline())


async def main(target):
    http = target[0].startswith("http")
    toolset = MCPToolset(
        target[0] if http else StdioTransport(command=target[0], args=target[1:]),
        tool_error_behavior="failed",
    )
    offered = {}

    def model(messages, info):
        offered.update({tool.name: tool.parameters_json_schema for tool in info.function_tools})
        if len(messages) > 1:
            return ModelResponse(parts=[TextPart("done")])
        return ModelResponse(parts=[ToolCallPart(name, arguments) for name, arguments in CALLS])

    agent = Agent(FunctionModel(model), toolsets=[toolset])
    async with agent:
        result = await agent.run("go")
    returned = [
        [part.tool_name, str(part.content)]
        for message in result.all_messages()
        for part in message.parts
        if isinstance(part, ToolReturnPart)
    ]
    print(json.dumps({"tools": offered, "returned": returned, "output": result.output}))


asyncio.run(main(sys.argv[1:]))
