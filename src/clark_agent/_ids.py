"""Random ids, from a library that takes longer to import than most of this package."""

from __future__ import annotations

__all__ = ["random_id"]


def random_id() -> str:
    """A random UUID."""
    from uuid import uuid4

    return str(uuid4())
