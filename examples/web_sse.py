"""Stream an agent to a web page as server-sent events. Needs the extra `gateway`.

Each user has a conversation. If the client leaves, its run stops. Run as a script, this file is the
server and a client in one. In production, put ``app = make_app(...)`` into a module of your own and
serve it with ``uvicorn my_module:app``.
"""

import asyncio
import json
import logging
import socket
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from clark_agent import Agent, CancellationToken, LoopError, RunAborted, tool
from clark_agent.events import public_events
from clark_agent.messages import encode_json
from clark_agent.testing import ScriptedStream, call

logger = logging.getLogger(__name__)

PAGE = """<!doctype html>
<form><input name="text" autofocus><button>Send</button></form><pre></pre>
<script>
document.forms[0].onsubmit = async (submit) => {
  submit.preventDefault();
  const text = new FormData(submit.target).get("text");
  const response = await fetch("/chat", {method: "POST", body: text});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const {done, value} = await reader.read();
    if (done) break;
    const frames = (rest + value).split("\\n\\n");
    rest = frames.pop();
    for (const frame of frames) {
      const event = JSON.parse(frame.slice("data: ".length));
      if (event.type === "message_update" && event.chunk.kind === "text")
        document.querySelector("pre").append(event.chunk.delta);
    }
  }
};
</script>"""


class EventStream(StreamingResponse):
    """A response that cancels a token when the client leaves."""

    def __init__(self, content: AsyncGenerator[bytes], signal: CancellationToken) -> None:
        super().__init__(content, media_type="text/event-stream")
        self.content, self.signal = content, signal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watch() -> None:
            await self.listen_for_disconnect(receive)
            self.signal.cancel("the client left")

        watching = asyncio.create_task(watch())
        try:
            async with aclosing(self.content):
                await self.stream_response(send)
        finally:
            watching.cancel()


class Chat:
    """The conversation of one user. Messages that arrive during an answer wait for its end."""

    def __init__(self, agent: Agent) -> None:
        self.conversation = agent.conversation()
        self.lock = asyncio.Lock()

    async def answer(self, prompt: str, signal: CancellationToken) -> AsyncGenerator[bytes]:
        try:
            async with self.lock, self.conversation.stream(prompt, signal) as stream:
                async for event in public_events(stream):
                    yield b"data: " + encode_json(event) + b"\n\n"
        except RunAborted:
            pass  # the conversation keeps what was said so far
        except LoopError:
            logger.exception("a run failed")  # the details are not for the browser
            yield b'data: {"type": "failed"}\n\n'


def user_of(request: Request) -> str:
    return request.headers.get("x-user", "guest")  # replace this with your authentication


def make_app(agent: Agent) -> Starlette:
    chats = defaultdict[str, Chat](lambda: Chat(agent))

    async def page(request: Request) -> Response:
        return HTMLResponse(PAGE)

    async def chat(request: Request) -> Response:
        prompt = (await request.body()).decode()
        if not prompt.strip():
            return PlainTextResponse("the message is empty", 400)
        signal = CancellationToken()
        return EventStream(chats[user_of(request)].answer(prompt, signal), signal)

    return Starlette(routes=[Route("/", page), Route("/chat", chat, methods=["POST"])])


async def send(client: httpx2.AsyncClient, user: str, text: str, leave_at: str = "") -> None:
    """Print an answer as it arrives. Leave at the first event of a type."""
    print(f"{user}: {text}")
    headers = {"x-user": user}
    async with client.stream("POST", "/chat", content=text, headers=headers) as response:
        async for line in response.aiter_lines():
            event = json.loads(line.removeprefix("data: ") or "{}")
            if event.get("type") == leave_at:
                return
            if event.get("type") == "message_update" and event["chunk"]["kind"] == "text":
                print(event["chunk"]["delta"], end="", flush=True)
    print()


async def main() -> None:
    stopped = asyncio.Event()

    @tool
    async def research(topic: str) -> str:
        """Do research. It takes an hour."""
        try:
            await asyncio.sleep(3600)
            return f"{topic} is large"
        finally:
            stopped.set()

    model = ScriptedStream(
        ["Hello Ada.", "Hello Bob.", call("research", topic="Space"), "It is large, Ada."]
    )
    app = make_app(Agent(model, tools=[research], system_prompt="Be brief."))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    serving = asyncio.create_task(server.serve(sockets=[listening]))

    async with httpx2.AsyncClient(base_url=url, timeout=30) as client:
        await send(client, "ada", "I am Ada.")
        await send(client, "bob", "I am Bob.")
        await send(client, "ada", "How large is space?", leave_at="tool_execution_start")
        await stopped.wait()
        print("(Ada left, and the tool was stopped)")
        await send(client, "ada", "Never mind. Guess!")
    print(f"({len(model.requests[-1].messages)} messages of Ada's conversation were sent)")

    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
