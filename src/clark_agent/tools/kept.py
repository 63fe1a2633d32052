"""KeptResult: what the record of a call says about a result that is kept beside the log."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from clark_agent._kept_text import KeptDamaged, KeptText, ReadPieces
from clark_agent.tools.base import ToolResult
from clark_agent.types import TextContent, ToolResultBlock

__all__ = ["KeptResult"]


class KeptResult(Struct, frozen=True, omit_defaults=True):
    """Where a result is whose record would be too large. A record leaves its texts and data out."""

    digest: str
    """Of its whole content."""
    name: str
    """The name under which the store has its text; data has the index of its block behind it."""
    texts: tuple[int, ...] = ()
    """How long its texts are, which are kept in one; empty if they are in the record."""
    data: tuple[int, ...] = ()
    """The indices of the images and files that are kept."""
    is_given: bool = False
    """Whether it is also what the tool returned: no hook has changed its content."""

    @staticmethod
    def digest_of(content: tuple[ToolResultBlock, ...]) -> str:
        """The digest of the content of a result."""
        from hashlib import blake2b  # only large results need it

        digest = blake2b(digest_size=12)
        for block in content:
            text = block.text if isinstance(block, TextContent) else block.source
            data = text.encode("utf-8", "surrogatepass")
            digest.update(b"%d " % len(data))
            digest.update(data)
        return digest.hexdigest()

    def leave_out(self, result: ToolResult) -> ToolResult:
        """The result without what is kept."""
        return replace(
            result,
            content=tuple(
                [self._emptied(index, block, "") for index, block in enumerate(result.content)]
            ),
        )

    def fill_in(self, result: ToolResult, read: Callable[[str], ReadPieces]) -> ToolResult:
        """The result as it was. ``read`` returns the pieces of a name. Raises `LookupError`
        or `KeptDamaged`.
        """
        whole, at = "", 0
        if self.texts:
            whole = _all_of(read(self.name))
        texts, content = list(self.texts), list[ToolResultBlock]()
        for index, block in enumerate(result.content):
            if isinstance(block, TextContent) and self.texts:
                length = texts.pop(0)
                content.append(self._emptied(index, block, whole[at : at + length]))
                at += length
            elif index in self.data:
                content.append(self._emptied(index, block, _all_of(read(f"{self.name}-{index}"))))
            else:
                content.append(block)
        if self.digest_of(tuple(content)) != self.digest:
            raise KeptDamaged("it is not what the record says")
        return replace(result, content=tuple(content))

    def _emptied(self, index: int, block: ToolResultBlock, kept: str) -> ToolResultBlock:
        if isinstance(block, TextContent):
            return replace(block, text=kept) if self.texts else block
        return replace(block, source=kept) if index in self.data else block


def _all_of(read: ReadPieces) -> str:
    text = KeptText(read)
    return text.part(0, text.characters)
