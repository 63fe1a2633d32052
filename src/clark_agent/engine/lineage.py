"""The identity of a run, the run above it and the call that started it."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING

from clark_agent.budget import Budget, Meter
from clark_agent.config import LoopConfig
from clark_agent.types import RunIdentity

if TYPE_CHECKING:
    from clark_agent.engine.resumption import Resumption
    from clark_agent.engine.run import Run

__all__ = ["Lineage"]

_identifying = Lock()

# A child has less time to stop than its parent gives it, so that it is not left behind.
_CHILDS_SHARE_OF_GRACE = 0.4


class Lineage:
    """The place of a run in its tree."""

    __slots__ = ("_config", "call_id", "call_place", "given", "parent", "resumption")

    def __init__(
        self,
        identity: RunIdentity | None,
        config: LoopConfig,
        parent: Run | None = None,
        call_id: str | None = None,
        resumption: Resumption | None = None,
        call_place: tuple[int, int, int] | None = None,
    ) -> None:
        self._config = config
        self.given = identity
        """The identity, if the host set one or it was needed."""
        self.parent = parent
        self.call_id = call_id
        """The call of the parent that started the run."""
        self.call_place = call_place
        """The turn and the position of that call, and the number of the run in it."""
        self.resumption = resumption
        """What another process has left, if the run is resumed."""

    def root(self) -> Lineage:
        """The lineage of the outermost run."""
        return self if self.parent is None else self.parent.lineage.root()

    def identify(self) -> RunIdentity:
        """The identity of the run, made if the host has not set one."""
        if self.given is None:
            with _identifying:  # two tools in threads may call this at the same time
                if self.given is None:
                    self.given = RunIdentity.root(
                        self._config.clock.new_id(), conversation_id=self._config.conversation_id
                    )
        return self.given

    @property
    def grace(self) -> float:
        """How many seconds cancelled work has to end by itself."""
        grace = self._config.cancel_grace
        if self.parent is None:
            return grace
        return min(grace, self.parent.grace * _CHILDS_SHARE_OF_GRACE)

    def deadline(self, parent: Run) -> Meter | None:
        """A meter for the deadline of the identity. The children of the outermost run have one."""
        if parent.lineage.parent is not None or self.given is None:
            return None
        if self.given.deadline_unix_ms is None:
            return None
        seconds = max(0, self.given.deadline_unix_ms - parent.clock.now_ms()) / 1000
        return Meter(Budget(seconds=seconds), parent.clock)
