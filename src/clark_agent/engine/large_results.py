"""Results that are too large for the model: kept aside at the end of a call, and found again.

`clark_agent.plugins.LargeResults` decides what the model gets of them. This module keeps the rest
where the run keeps things, and decides which results a run may read.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from clark_agent._kept_text import Pieces, ReadPieces
from clark_agent.errors import ModelRetry
from clark_agent.plugins.large_results import KEPT_IN_MEMORY, LargeResults
from clark_agent.tools import ToolResult
from clark_agent.tools.kept import KeptResult
from clark_agent.types import TextContent, ToolResultMessage

if TYPE_CHECKING:
    from clark_agent.engine.call import Call
    from clark_agent.engine.run import Run

__all__ = ["find_kept", "shortened"]

logger = logging.getLogger(__name__)

_MARK = "kept_result"
_NAME = r"\d+-\d+"


def shortened(run: Run, plugin: LargeResults, call: Call, result: ToolResult) -> ToolResult:
    """The result as the transcript gets it. If it is too large, the whole of it is kept."""
    if result.details is not None:
        result = _without_foreign_mark(run, result)
    if plugin.fits(result, call.tool):
        return result
    try:
        return _shorten(run, plugin, call, result)
    except Exception:
        logger.exception("a large result could not be shortened, and stays as it is")
        return result


def _shorten(run: Run, plugin: LargeResults, call: Call, result: ToolResult) -> ToolResult:
    name = f"{run.turns}-{call.position}"
    result_id = f"{run.identify().run_id}/{name}"
    short = plugin.shorten(result, call.tool, result_id)
    _known(run).add(result_id)
    in_log = True
    if short.text is not None:
        in_log = _keep(run, plugin, name, short.text)
    for index, pieces in short.data:
        in_log = _keep(run, plugin, f"{name}-{index}", pieces) and in_log
    if in_log:
        texts = [b for b in result.content if isinstance(b, TextContent)]
        call.kept = KeptResult(
            digest=KeptResult.digest_of(result.content),
            name=name,
            texts=() if short.text is None else tuple([len(block.text) for block in texts]),
            data=tuple([index for index, _ in short.data]),
            is_given=call.given is None or call.given.content == result.content,
        )
    call.given = call.given or result
    details = result.details
    if details is None or isinstance(details, dict):
        mark = {"id": result_id, "chars": len(result.plain_text)}
        details = {**(details or {}), _MARK: mark}
    return replace(result, content=short.content, details=details)


def _keep(run: Run, plugin: LargeResults, name: str, pieces: Pieces) -> bool:
    """Keep pieces. Return whether they are in the log of the run, which need not repeat them."""
    run_id = run.identify().run_id
    in_folder = plugin.folder is not None and not run.journal.is_replay
    if not in_folder and run.journal.keep(name, pieces):
        if run.journal.may_lose:  # then the run goes on without its log
            KEPT_IN_MEMORY.keep(run_id, name, pieces)
        return True
    try:
        plugin.keep(run_id, name, pieces)
    except Exception:
        logger.exception("a large result could not be written; it is kept in memory")
        KEPT_IN_MEMORY.keep(run_id, name, pieces)
    return False


def _without_foreign_mark(run: Run, result: ToolResult) -> ToolResult:
    """The result without a mark that names another run: it would let this one read its results."""
    details = result.details
    if not isinstance(details, dict) or _MARK not in details:
        return result
    match details[_MARK]:
        case {"id": str(result_id)} if result_id.rpartition("/")[0] == run.identify().run_id:
            return result
        case _:
            own = {key: value for key, value in details.items() if key != _MARK}
            return replace(result, details=own)


# --- reading ----------------------------------------------------------------------------------


def find_kept(run: Run, result_id: str) -> tuple[ReadPieces, int]:
    """How to read the pieces of a kept result, and how many characters to show at once.

    Raises `ModelRetry` unless the run may read it.
    """
    run_id, _, name = result_id.rpartition("/")
    plugin = run.hooks.large_results
    if plugin is None or not re.fullmatch(_NAME, name) or not _may_read(run, run_id, result_id):
        raise ModelRetry(
            f"there is no result with the id {result_id!r}: copy the id from a shortened result"
        )
    store: Any = getattr(run.journals, "store", None)

    def read(start: int, stop: int) -> Pieces:
        found = plugin.kept(run_id, name, start, stop) if plugin.folder is not None else ()
        if not found and hasattr(store, "kept"):
            found = store.kept(run_id, name, start, stop)
        found = found or plugin.kept(run_id, name, start, stop)
        if not found:
            raise LookupError(result_id)
        return found

    return read, plugin.page_chars


def _may_read(run: Run, run_id: str, result_id: str) -> bool:
    """Whether it is a result of this run, of a run above it, or of one that either continues."""
    at: Run | None = run
    while at is not None:
        is_resumed = at.lineage.resumption is not None and at.identify().run_id == run_id
        if is_resumed or result_id in _known(at):
            return True
        at = at.lineage.parent
    return False


def _known(run: Run) -> set[str]:
    """The ids of the results that the run has kept, and of those in the messages that it began
    with.
    """
    if run.kept is None:
        marks = [_mark_of(message) for message in run.messages]
        run.kept = {mark for mark in marks if mark is not None}
    return run.kept


def _mark_of(message: object) -> str | None:
    if not isinstance(message, ToolResultMessage) or not isinstance(message.details, dict):
        return None
    match message.details.get(_MARK):
        case {"id": str(result_id)}:
            return result_id
        case _:
            return None
