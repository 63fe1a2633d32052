"""Programs of others that the MCP support is tested against, in folders of their own.

    .cache/mcp/node      server-everything, server-filesystem, and the inspector's command line
    .cache/mcp/current   servers and a client in Python, on the current SDK
    .cache/mcp/older     a server in Python, on the first version of the SDK

They need other versions of packages than ours, so nothing of them is in our environment. What is
in a folder is pinned in `package.json` and `requirements-*.txt`, next to this file.

`make test` installs them; `missing` says what is not there. Run as a module, it installs: twice
does no harm, and two at once wait for each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.transports.servers.aimock import OLDEST_NODE
from tests.transports.servers.child import CACHE

FOLDER = (CACHE / "mcp").resolve()
HERE = Path(__file__).parent
MANIFESTS = {
    "node": HERE / "package.json",
    "current": HERE / "requirements-current.txt",
    "older": HERE / "requirements-older.txt",
}


def python(environment: str) -> str:
    """The interpreter of an environment."""
    folder = FOLDER / environment
    return str(folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python")


def script(environment: str, name: str) -> str:
    """A program that a package has put into an environment."""
    return str(Path(python(environment)).with_name(name))


def node(package: str, program: str = "dist/index.js") -> list[str]:
    """The command that starts a program of a package of `@modelcontextprotocol`."""
    modules = FOLDER / "node" / "node_modules" / "@modelcontextprotocol"
    return ["node", str(modules / package / program)]


def missing(name: str) -> str | None:
    """What is not there, in a sentence, or None if the programs of a folder can be started."""
    if name == "node" and (reason := _node_missing()):
        return reason
    if name != "node" and not Path(python(name)).exists():  # also a link that leads nowhere
        return f"the environment {name!r} of foreign MCP programs is not installed: run `make test`"
    try:
        installed = (FOLDER / name / ".stamp").read_text()
    except OSError:
        installed = ""
    if installed != _wanted(name):
        return f"the foreign MCP programs {name!r} are not installed: run `make test`"
    return None


def install() -> list[str]:
    """Install what is missing; what was in the way, in sentences."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with _alone(), ThreadPoolExecutor() as threads:
        return [trouble for trouble in threads.map(_install, MANIFESTS) if trouble]


def _install(name: str) -> str | None:
    if missing(name) is None:
        return None
    began = time.monotonic()
    print(f"installing foreign MCP programs: {name} ...", flush=True)
    trouble = _install_node() if name == "node" else _install_python(name)
    if trouble is None:
        (FOLDER / name / ".stamp").write_text(_wanted(name))
        trouble = missing(name)
    took = time.monotonic() - began
    print(f"foreign MCP programs: {name}: {trouble or 'installed'} ({took:.0f} s)", flush=True)
    return trouble


def _install_node() -> str | None:
    if reason := _node_missing():
        return reason
    if shutil.which("npm") is None:
        return "npm is not installed"
    folder = FOLDER / "node"
    folder.mkdir(exist_ok=True)
    shutil.copy(MANIFESTS["node"], folder)
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--silent"]
    if trouble := _run(command, cwd=folder):
        return trouble
    # The inspector's command line reads the manifest of the inspector, from where it is a part of
    # it. The inspector itself is a web page with three times as many packages.
    packages = folder / "node_modules" / "@modelcontextprotocol"
    shutil.copy(packages / "inspector-cli" / "package.json", packages)
    return None


def _install_python(name: str) -> str | None:
    # Our own pip installs into it, which saves the time to install another one.
    venv.create(FOLDER / name, clear=True, with_pip=False, symlinks=os.name != "nt")
    pip = [sys.executable, "-m", "pip", "--python", python(name), "--quiet", "--quiet"]
    install = ["install", "--disable-pip-version-check", "--requirement", str(MANIFESTS[name])]
    return _run([*pip, *install], cwd=HERE)


def _run(command: list[str], *, cwd: Path) -> str | None:
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return f"{' '.join(command)} failed:\n{done.stdout.strip()}" if done.returncode else None


def _node_missing() -> str | None:
    wanted = ".".join(map(str, OLDEST_NODE))
    program = shutil.which("node")
    if program is None:
        return f"Node {wanted} or newer is not installed"
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = said.stdout.strip().lstrip("v")
    parts = version.split(".")[:2]
    if not all(part.isdecimal() for part in parts) or tuple(map(int, parts)) < OLDEST_NODE:
        return f"Node {wanted} or newer is needed, this is {version or 'broken'}"
    return None


def _wanted(name: str) -> str:
    """What the stamp of an installed folder says: its manifest, and the place it was made for."""
    manifest = hashlib.sha256(MANIFESTS[name].read_bytes()).hexdigest()
    return json.dumps([manifest, str(FOLDER / name)])


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other process installs."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with (FOLDER / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    if install():
        sys.exit("some tests of MCP will be skipped")
