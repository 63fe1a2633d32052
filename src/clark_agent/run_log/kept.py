"""The whole text of a result that was too large for the model."""

from __future__ import annotations

from functools import partial
from typing import Any

from clark_agent._kept_text import KeptDamaged, KeptText, Pieces, ReadPieces
from clark_agent.errors import RunStoreError
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog, store_of

__all__ = ["kept_result", "pieces_of"]


def kept_result(store: RunStore | RunLog, result_id: str) -> str:
    """Return the text of a large result, by the id in its note and in its ``details``.

    With ``-`` and the index of a block behind the id, the ``data:`` URL of an image or a file that
    was left out. Raises `RunStoreError` if the store has no such result, or if it is damaged.
    """
    run_id, _, name = result_id.rpartition("/")
    try:
        text = KeptText(pieces_of(store_of(store), run_id, name))
        return text.part(0, text.characters)
    except LookupError:
        raise RunStoreError(f"the store has no large result {result_id!r}", run_id) from None
    except KeptDamaged as error:
        reason = f"the large result {result_id!r} cannot be read: {error}"
        raise RunStoreError(reason, run_id) from error


def pieces_of(store: RunStore, run_id: str, name: str) -> ReadPieces:
    """Return how to read the pieces of a large result. A store that keeps none has none."""
    keeps: Any = store
    return partial(keeps.kept, run_id, name) if hasattr(keeps, "kept") else _none


def _none(start: int, stop: int) -> Pieces:
    return ()
