"""A stdio server that misbehaves as it is told. It writes its JSON by hand: an SDK would refuse.

    python faulty.py '{"tools/call": {"die": 3}}' journal.jsonl

The first argument says, for each method that it shall not answer as it should, what it does
instead. ``start`` stands for the time before the first message. What is under ``first`` counts only
for the first process that writes to the journal. An action has one or more of these keys, and does
them in this order:

    wait      seconds before anything else
    stderr    so many bytes to stderr
    flood     [n, notification]: sends a notification n times; "TOKEN" becomes the progress token
    line      sends a text and the end of the line; "ID" in it becomes the id of the request
    die       ends the process with this code; a negative one is a signal to itself
    silent    sends no answer
    result    answers with this, whatever it is
    error     answers with this as the error
    size      answers with a text of so many bytes
    image     answers with an image of so many bytes
    hold      keeps the answer until so many requests wait, and answers the last one first
    grow      has another tool from now on, and says so

The second argument is a file to which it appends, as JSON lines, its process id when it starts and
every message that it receives. It imports nothing but the standard library: it starts often.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

Json = dict[str, Any]

VERSION = "2025-06-18"
ECHO: Json = {
    "name": "echo",
    "description": "Return a text.",
    "inputSchema": {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
    },
}


class Faulty:
    """A server in this process, until its input ends."""

    def __init__(self, actions: Json, journal: str) -> None:
        self._journal = journal
        is_first = not os.path.exists(journal) or not os.path.getsize(journal)
        self._actions = {**actions, **(actions.get("first", {}) if is_first else {})}
        self._held: list[bytes] = []
        self._tools = [ECHO]

    def serve(self) -> None:
        self._note({"pid": os.getpid(), "at": time.monotonic()})
        self._act(self._actions.get("start", {}), {})
        for line in sys.stdin.buffer:
            message = json.loads(line)
            self._note(message)
            action = self._actions.get(message.get("method"), {})
            if not self._act(action, message) and "id" in message and "method" in message:
                self._answer(message, {"result": self._result(message)})

    def _result(self, message: Json) -> Json:
        params = message.get("params") or {}
        match message["method"]:
            case "initialize":
                return {
                    "protocolVersion": VERSION,
                    "capabilities": {"tools": {"listChanged": True}, "logging": {}},
                    "serverInfo": {"name": "faulty", "version": "1"},
                }
            case "tools/list":
                return {"tools": self._tools}
            case "tools/call":
                text = str(params.get("arguments", {}).get("text", ""))
                return {"content": [{"type": "text", "text": f"echo: {text}"}]}
            case _:
                return {}

    def _act(self, action: Json, message: Json) -> bool:
        """Do what an action says; whether the message needs no other answer."""
        if message.get("method") == "server/discover" and not action:
            action = {"error": {"code": -32601, "message": "Method not found"}}
        time.sleep(action.get("wait", 0))
        _write(2, b"x" * 99 + b"\n", action.get("stderr", 0) // 100)
        if "flood" in action:
            times, notification = action["flood"]
            token = ((message.get("params") or {}).get("_meta") or {}).get("progressToken")
            text = json.dumps({"jsonrpc": "2.0", **notification})
            _write(1, text.replace('"TOKEN"', json.dumps(token)).encode() + b"\n", times)
        if "line" in action:
            line = action["line"].replace("ID", json.dumps(message.get("id")))
            _write(1, line.encode("latin-1") + b"\n")
        if (code := action.get("die")) is not None:
            if code < 0:
                os.kill(os.getpid(), -code)
            os._exit(code)
        if "grow" in action:
            self._tools = [{**ECHO, "name": f"echo{len(self._tools)}"}, *self._tools]
            self._send({"method": "notifications/tools/list_changed"})
        if "result" in action:
            self._answer(message, {"result": action["result"]})
        elif "error" in action:
            self._answer(message, {"error": action["error"]})
        elif "size" in action:
            content = [{"type": "text", "text": "y" * action["size"]}]
            self._answer(message, {"result": {"content": content}})
        elif "image" in action:
            image = {
                "type": "image",
                "mimeType": "image/png",
                "data": "AAAA" * (action["image"] // 3),
            }
            self._answer(message, {"result": {"content": [image]}})
        elif "hold" in action:
            self._held.append(_encoded({"id": message["id"], "result": self._result(message)}))
            if len(self._held) >= action["hold"]:
                _write(1, b"".join(reversed(self._held)))
                self._held.clear()
        else:
            return "silent" in action or "line" in action
        return True

    def _answer(self, message: Json, answer: Json) -> None:
        self._send({"id": message["id"], **answer})

    def _send(self, message: Json) -> None:
        _write(1, _encoded(message))

    def _note(self, entry: Json) -> None:
        with open(self._journal, "a", encoding="utf-8") as journal:
            journal.write(json.dumps(entry) + "\n")


def _encoded(message: Json) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"


def _write(descriptor: int, data: bytes, times: int = 1) -> None:
    rest = memoryview(data * times)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


if __name__ == "__main__":
    Faulty(json.loads(sys.argv[1]), sys.argv[2]).serve()
