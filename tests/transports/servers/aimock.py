"""A mock of the providers: aimock, a program for Node that speaks all their protocols.

One process serves all tests of a session. It has a control API, and `reset` takes everything back:
fixtures, how often each was used, the journal. So every test starts with `reset` (the `aimock`
fixture of pytest does), loads what it wants to hear, and reads in the journal what was asked:

    aimock.play({"response": {"content": "Hello!"}})
    ... talk to f"{aimock.url}/v1" ...
    [entry] = aimock.journal()

A fixture is a `match` and a `response`; the first that matches answers, whatever the protocol of
the request. A request that none matches gets a 404. Tests run one after the other, so they need no
`X-Test-Id`, and their messages need not be unique.

`make test` installs it; `missing` says what is not there. Run as a module, it installs.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec

from tests.transports.servers.child import CACHE, Child

FOLDER = CACHE / "aimock"
MANIFEST = Path(__file__).with_name("package.json")
PACKAGE = FOLDER / "node_modules" / "@copilotkit" / "aimock"
OLDEST_NODE = (20, 15)

# Node leaves when its input ends, that is, when the tests died.
LEAVE_WITH_US = "data:text/javascript,process.stdin.resume().on('end',()=>process.exit(0))"

Fixture = dict[str, Any]


class Outcome(msgspec.Struct, frozen=True, rename="camel"):
    """How a request was answered, as far as the server knows."""

    status: int
    interrupted: bool = False
    interrupt_reason: str | None = None


class Entry(msgspec.Struct, frozen=True):
    """A request that was answered. Header names are lower case; keys read `[REDACTED]`.

    The body is the request as OpenAI's chat protocol would say it, also if it came by another:
    to see the bytes of a request, use a `ByteServer`.
    """

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    response: Outcome


class Aimock:
    """A running server, to be used as a context manager."""

    def __init__(self) -> None:
        self._home = tempfile.TemporaryDirectory()  # no fixtures in it: they come by `load`
        self._child = Child(
            [
                *("node", "--import", LEAVE_WITH_US, str(PACKAGE / "dist" / "cli.js")),
                *("--port", "0", "--fixtures", self._home.name),
            ],
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
        try:
            self.url = self._child.wait_for(r"listening on (http://\S+:\d+)\s", seconds=30)
        except BaseException:
            self._home.cleanup()
            raise

    @property
    def child(self) -> Child:
        return self._child

    def load(self, *fixtures: Fixture) -> None:
        """Add fixtures behind those that are there."""
        self._control("POST", "fixtures", {"fixtures": fixtures})

    def replace(self, *fixtures: Fixture) -> None:
        """Have these fixtures and no others; the journal and the counts stay."""
        self._control("DELETE", "fixtures")
        self.load(*fixtures)

    def play(self, *turns: Fixture) -> None:
        """Answer the next requests since the last reset with these, in turn, whatever they ask.

        A turn is a fixture without a `match`.
        """
        self.load(*({**turn, "match": {"sequenceIndex": n}} for n, turn in enumerate(turns)))

    def journal(self) -> list[Entry]:
        """The requests since the last reset, but for those to the control API."""
        return msgspec.json.decode(self._control("GET", "journal"), type=list[Entry])

    def reset(self) -> None:
        """Forget the fixtures, their counts and the journal."""
        self._control("POST", "reset")

    def stop(self) -> None:
        self._child.stop()
        self._home.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _control(self, method: str, path: str, body: object = None) -> bytes:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=10)
        try:
            connection.request(method, f"/__aimock/{path}", None if body is None else _json(body))
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(f"aimock refused {method} {path}: {content.decode()}")
        return content


def missing() -> str | None:
    """What is not there, in a sentence, or None if a server can be started."""
    if reason := _node_missing():
        return reason
    try:
        installed = json.loads((PACKAGE / "package.json").read_bytes())["version"]
    except (OSError, ValueError, KeyError):
        installed = None
    wanted = json.loads(MANIFEST.read_bytes())["dependencies"]["@copilotkit/aimock"]
    if installed != wanted:
        return f"aimock {wanted} is not installed; `make test` installs it"
    return None


def install() -> str | None:
    """Install the server into the cache; what is in the way, in a sentence, or None."""
    if reason := _node_missing():
        return reason
    if shutil.which("npm") is None:
        return "npm is not installed"
    FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.copy(MANIFEST, FOLDER)
    subprocess.run(
        ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--silent"],
        cwd=FOLDER,
        check=False,
    )
    return missing()


def _node_missing() -> str | None:
    wanted = ".".join(map(str, OLDEST_NODE))
    try:
        said = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return f"Node {wanted} or newer is not installed"
    version = said.stdout.strip().lstrip("v")
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_NODE:
        return f"Node {wanted} or newer is needed, this is {version}"
    return None


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


if __name__ == "__main__":
    if trouble := install():
        sys.exit(f"no mock provider for the tests: {trouble}")
