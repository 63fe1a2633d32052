"""The reference server that has every feature of the protocol, as a server of HTTP.

It listens where `PORT` says, on all interfaces, and does not say which port it got. So Node runs a
few lines before it that have it listen on this machine only, print the port, and leave with us.
"""

from __future__ import annotations

import os
from typing import Literal, Self
from urllib.parse import quote

from tests.mcp.servers.install import node
from tests.transports.servers.child import Child

BEFORE = """
import net from 'node:net';
const listen = net.Server.prototype.listen;
net.Server.prototype.listen = function (port, ...others) {
    this.on('listening', () => console.log(`listening on port ${this.address().port} `));
    return listen.call(this, 0, '127.0.0.1', ...others);
};
process.stdin.resume().on('end', () => process.exit(0));
"""


class Everything:
    """A running server, to be used as a context manager."""

    def __init__(self, transport: Literal["streamableHttp", "sse"]) -> None:
        program, *arguments = node("server-everything")
        before = f"data:text/javascript,{quote(BEFORE)}"
        self.child = Child(
            [program, "--import", before, *arguments, transport],
            env={"PATH": os.environ.get("PATH", os.defpath)},
        )
        port = self.child.wait_for(r"listening on port (\d+) ", seconds=30)
        path = "mcp" if transport == "streamableHttp" else "sse"
        self.url = f"http://127.0.0.1:{port}/{path}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.child.stop()
