"""The command line, ``clark-agent``. It needs the extra ``cli``; see `clark_agent.cli.app`."""

from __future__ import annotations

import gc
import sys
from importlib.util import find_spec

from clark_agent._extras import how_to_install

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its exit code."""
    missing = [name for name in ("click", "rich", "prompt_toolkit") if find_spec(name) is None]
    if missing:
        names = ", ".join(missing)
        sys.stderr.write(f"clark-agent: the command line needs {names}: {how_to_install('cli')}\n")
        sys.exit(2)
    gc.set_threshold(50_000)  # the SDKs create many objects at import, and none are garbage
    from clark_agent.cli.app import run_command_line

    sys.exit(run_command_line())
