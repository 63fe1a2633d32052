"""The whole text of a result that was too large for the model."""

from __future__ import annotations

from functools import partial
from typing import Any

from clark_agent._kept_text import KeptDamaged, KeptText
from clark_agent.errors import RunStoreError
from clark_agent.run_log.store import RunStore
from clark_agent.run_log.writer import RunLog, store_of

__all__ = ["kept_result"]


def kept_result(store: RunStore | RunLog, result_id: str) -> str:
    """Return the text of a large result, by the id in its note and in its ``details``.

    With ``-`` and the index of a block behind the id, the ``data:`` URL of an image or a file that
    was left out. Raises `RunStoreError` if the store has no such result, or if it is damaged.
    """
    keeps: Any = store_of(store)
    run_id, _, name = result_id.rpartition("/")
    try:
        if hasattr(keeps, "kept"):
            text = KeptText(partial(keeps.kept, run_id, name))
            return text.part(0, text.characters)
    except LookupError:
        pass
    except KeptDamaged as error:
        reason = f"the large result {result_id!r} cannot be read: {error}"
        raise RunStoreError(reason, run_id) from error
    raise RunStoreError(f"the store has no large result {result_id!r}", run_id)
