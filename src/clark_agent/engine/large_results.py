"""Results that are too large for the model: kept aside at the end of a call, and found again.

`clark_agent.plugins.LargeResults` decides what the model gets of them. This module keeps the rest
where the run keeps things, and decides which results a run may read.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from clark_agent._kept_text import KeptDamaged, KeptText, OpenKept, Pieces, ReadPieces, digest_of
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
_NO_TEXT = ""
_NAME = r"\d+-\d+(?:\.[0-9a-f]{12})?"
_LONGEST_ID = 300


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
    if run.journals is None:  # then another run may have the same run id
        name += f".{_random_part()}"
    result_id = f"{run.identify().run_id}/{name}"
    short = plugin.shorten(result, call.tool, result_id)
    digest = _NO_TEXT if short.text is None else digest_of(short.text)
    _known(run)[result_id] = digest
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
        mark = {"id": result_id, "chars": len(result.plain_text), "digest": digest}
        details = {**(details or {}), _MARK: mark}
    return replace(result, content=short.content, details=details)


def _random_part() -> str:
    return os.urandom(6).hex()


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


def find_kept(run: Run, result_id: str) -> tuple[OpenKept, int]:
    """How to open a kept result, and how many characters to show at once.

    Raises `ModelRetry` unless the run may read it.
    """
    run_id, _, name = result_id.rpartition("/")
    plugin = run.hooks.large_results
    is_id = len(result_id) <= _LONGEST_ID and re.fullmatch(_NAME, name) is not None
    if plugin is None or not is_id or not _may_read(run, run_id, result_id):
        shown = result_id if len(result_id) <= _LONGEST_ID else f"{result_id[:_LONGEST_ID]}…"
        raise ModelRetry(
            f"there is no result with the id {shown!r}: copy the id from a shortened result"
        )
    digest = _digest_of(run, result_id)
    if digest == _NO_TEXT:
        raise ModelRetry(
            f"of the result {result_id}, only images or files were left out; they cannot be read"
        )
    return partial(_open, run, plugin, result_id, digest), plugin.page_chars


def _open(run: Run, plugin: LargeResults, result_id: str, digest: str | None) -> KeptText:
    """The text with this digest, wherever it is. Raises `LookupError` or `KeptDamaged`."""
    damaged: KeptDamaged | None = None
    for read in _sources(run, plugin, result_id, digest):
        try:
            text = KeptText(read)
        except LookupError:
            continue
        except KeptDamaged as error:
            damaged = error
            continue
        if digest is None or text.digest == digest:
            return text
    raise damaged or LookupError(result_id)


def _sources(
    run: Run, plugin: LargeResults, result_id: str, digest: str | None
) -> Iterator[ReadPieces]:
    run_id, _, name = result_id.rpartition("/")
    if plugin.folder is not None:
        yield plugin.kept_in_folder(run_id, name, digest)
    store: Any = getattr(run.journals, "store", None)
    if hasattr(store, "kept"):
        yield partial(store.kept, run_id, name)
    yield partial(KEPT_IN_MEMORY.kept, run_id, name)


def _may_read(run: Run, run_id: str, result_id: str) -> bool:
    """Whether it is a result of this run, of a run above it, or of one that either continues."""
    return any(
        result_id in _known(at)
        or (at.lineage.resumption is not None and at.identify().run_id == run_id)
        for at in _upwards(run)
    )


def _digest_of(run: Run, result_id: str) -> str | None:
    """The digest of its text, if that is known."""
    return next((_known(at)[result_id] for at in _upwards(run) if result_id in _known(at)), None)


def _upwards(run: Run) -> Iterator[Run]:
    at: Run | None = run
    while at is not None:
        yield at
        at = at.lineage.parent


def _known(run: Run) -> dict[str, str]:
    """The digests of the results that the run has kept, and of those in the messages that it began
    with, by their ids.

    A tool may have made a mark in the messages. It cannot have the digest of a text that it has
    not seen, so it gives no right to read another one.
    """
    if run.kept is None:
        run.kept = {}
        for message in run.messages:
            if (mark := _mark_of(message)) is not None:
                run.kept.setdefault(*mark)  # a later one may be forged
    return run.kept


def _mark_of(message: object) -> tuple[str, str] | None:
    if not isinstance(message, ToolResultMessage) or not isinstance(message.details, dict):
        return None
    match message.details.get(_MARK):
        case {"id": str(result_id), "digest": str(digest)}:
            return result_id, digest
        case _:
            return None
