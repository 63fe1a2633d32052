"""Compaction: a summary takes the place of old turns when a conversation grows too large."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from msgspec import Struct

from clark_agent.errors import ConfigError
from clark_agent.messages.transcript import MessageView, view_of
from clark_agent.messages.wire import encode_json
from clark_agent.plugins._compacted import (
    Mark,
    Projection,
    aligned,
    answers,
    mark_of,
)
from clark_agent.plugins._summary import INSTRUCTIONS, Summariser, left_out, replaced, turns_text
from clark_agent.plugins._windows import DEFAULT_WINDOW, window_of, window_said
from clark_agent.plugins.base import BeforeRequestContext, TransformContext
from clark_agent.plugins.read_earlier import READ_EARLIER
from clark_agent.stream import StreamFn
from clark_agent.types import (
    AgentMessage,
    AssistantMessage,
    CustomMessage,
    SystemMessage,
    ToolResultMessage,
    UserMessage,
)

__all__ = ["Compaction", "Mark", "mark_of"]

logger = logging.getLogger(__name__)

_MERGE_SHARE = 0.3
"""Which share of the target all summaries together may have, before they are merged into one."""
_LEAST_SHARE = 0.25
"""Which share of what is between trigger and target a compaction must free at least."""
_TEXT_SHARE = 0.5
"""Which share of the window the text may have that another request is made of."""
_OVERFLOWS = 3
"""How often a request of one turn can be made smaller, as the engine does it."""
_SMALLER = 0.95
"""How large a request may be, as a share of the one before that was too large."""
_LAST_RESORTS = ((True, False), (False, True), (True, True))
"""What goes if nothing else helps: what is pinned, what no model has seen, or both; the latter two
only after an overflow."""
_CHARS = 3
"""How many characters of text a token has at least, usually."""


class Compaction:
    """Keeps conversations of any length within the window of the model, by summaries.

    Before a request above ``trigger`` (a share of the window) it lets a model summarise the older
    turns, so that about ``target`` remains. The newest messages stay word for word, with all that
    the model has not seen yet, as do the task (everything before the first answer), the newest
    message of the user, plans, open calls, what people have decided, and messages for which
    ``pinned`` returns true. Later compactions add further summaries, and the earlier ones stay, so
    that the provider's cache keeps them; when they grow too many, they are merged. If a provider
    still rejects a request as too large, its error starts a compaction, and says how large the
    window is.

    Nothing is lost: the transcript keeps all messages, and the model can read them with the tool
    ``read_earlier``, which the plugin brings unless ``read_back`` is False. A compaction itself is
    a message in the transcript, a `CustomMessage` of the kind ``compaction``, which no model gets.
    So a conversation that is saved, resumed, forked or continued by another run is not compacted
    again.

    Without a usable summary (the model fails, or takes more than ``timeout`` seconds) the old turns
    are left out, and a note says so. ``model`` is the transport of another, for example cheaper
    model for the summaries; by default it is the model of the run, whose provider can read almost
    all of that request from its cache. ``window`` is the size of the
    window in tokens. By default it is what the transport says (``context_window``), else what is
    known of the model by its name, else 128,000.
    """

    name = "compaction"
    purpose = "compaction"
    inheritable_to_child = True

    def __init__(
        self,
        window: int | None = None,
        trigger: float = 0.75,
        target: float = 0.2,
        *,
        model: StreamFn | None = None,
        instructions: str = INSTRUCTIONS,
        pinned: Callable[[AgentMessage], bool] | None = None,
        summary_tokens: int | None = None,
        timeout: float = 120.0,
        read_back: bool = True,
    ) -> None:
        _check(window, trigger, target, summary_tokens, timeout)
        for what, function in (("pinned", pinned), ("model", model)):
            if function is not None and not callable(function):
                raise ConfigError(f"Compaction: {what} must be None or callable, not {function!r}")
        self.window = window
        self.trigger = trigger
        self.target = target
        self.model = model
        self.instructions = instructions
        self.pinned = pinned
        self.summary_tokens = summary_tokens
        self.timeout = timeout
        self.tools: Final = (READ_EARLIER,) if read_back else ()
        self._summariser = Summariser(model, instructions, summary_tokens, timeout)
        self._transcript = Projection(pinned)
        self._edited = Projection(pinned)
        self._known_overhead: tuple[object, str, int] | None = None
        self._overflows = 0  # how many requests of this turn were too large

    def for_run(self) -> Compaction:
        """Return a new instance, which has not seen a transcript."""
        return Compaction(
            self.window,
            self.trigger,
            self.target,
            model=self.model,
            instructions=self.instructions,
            pinned=self.pinned,
            summary_tokens=self.summary_tokens,
            timeout=self.timeout,
            read_back=bool(self.tools),
        )

    # --- what the model gets --------------------------------------------------------------------

    def transform_context(
        self, messages: Sequence[AgentMessage], ctx: TransformContext
    ) -> Sequence[AgentMessage]:
        """Return the messages with what compactions have made of old ones."""
        view = view_of(messages)
        # A plugin before this one may have made another view of the transcript.
        is_own = view.grew_from(self._transcript.seen)
        projection = self._transcript if is_own else self._edited
        projection.follow(view, ctx.estimator, ctx.tools)
        return messages if projection.log is None else projection.view(view.tail)

    # --- compactions ----------------------------------------------------------------------------

    async def before_request(self, ctx: BeforeRequestContext) -> list[CustomMessage] | None:
        """Compact the transcript if the next request would be too large, or was."""
        self._overflows = 0 if ctx.overflow is None else self._overflows + 1
        state = self._follow(ctx)
        least = 0.0
        if ctx.overflow is None:
            if state.size <= self.trigger * state.window:
                return None
            least = _LEAST_SHARE * (self.trigger - self.target) * state.window
        mark = await self._compact(ctx, state, least)
        return None if mark is None else [mark.message()]

    async def compact(self, ctx: BeforeRequestContext) -> Mark | None:
        """Compact now, however small the transcript is. None if nothing can be replaced. A mark
        without a summary says what an automatic compaction would leave out.
        """
        return await self._compact(ctx, self._follow(ctx), 0.0, by_hand=True)

    def overhead(self, ctx: BeforeRequestContext) -> int:
        """The estimated tokens of a request without its messages: tools and system prompt."""
        known = self._known_overhead
        if known is None or known[0] is not ctx.tools or known[1] is not ctx.system_prompt:
            schemas = [tool.schema for tool in ctx.tools.values()]
            size = len(encode_json(schemas)) + len(ctx.system_prompt.encode("utf-8", "replace"))
            known = self._known_overhead = (ctx.tools, ctx.system_prompt, size // 4)
        return known[2]

    def _follow(self, ctx: BeforeRequestContext) -> _State:
        projection = self._transcript
        projection.follow(ctx.messages, ctx.estimator, ctx.tools)
        return _State.of(self, ctx, projection)

    async def _compact(
        self, ctx: BeforeRequestContext, state: _State, least: float, *, by_hand: bool = False
    ) -> Mark | None:
        """Compact, if that frees more than ``least`` tokens, or makes the request fit."""
        plan = self._chosen(ctx, state, least)
        if not state.is_worth(plan.freed, least):
            return None
        summary = await self._summary(ctx, state, plan, by_hand=by_hand)
        text, freed = plan.note, plan.freed
        if summary is not None:
            text = replaced(plan.turns, summary, can_read=bool(self.tools))
            made = Mark(text=text, merges=plan.merges, drops_pins=plan.drops_pins)
            freed = self._freed(ctx, made, plan.place)
        is_larger = freed <= 0  # than what it is about
        if ctx.overflow is not None:
            is_larger = state.after(freed) > _SMALLER * state.size and freed < plan.freed
        if summary is None or is_larger:
            plan = self._without_merging(ctx, state, plan)
            summary, text, freed = None, plan.note, plan.freed
            if not by_hand:
                what = turns_text(plan.note_turns)
                logger.warning("run %s goes on without %s: no summary", ctx.run_id, what)
        first, last = plan.note_turns if summary is None else plan.turns
        return Mark(
            text=text,
            kept=ctx.messages.stable - plan.place,
            merges=plan.merges,
            drops_pins=plan.drops_pins,
            has_summary=summary is not None,
            first_turn=first,
            last_turn=last,
            messages=plan.place - plan.first,
            tokens_before=round(state.size),
            tokens_after=max(0, round(state.after(freed))),
            window=state.said,
            model=None if state.said is None else _model_of(ctx),
        )

    def _chosen(self, ctx: BeforeRequestContext, state: _State, least: float) -> _Plan:
        """The first plan with which the request fits, else the one that frees most.

        Until it is the last attempt, an estimate says whether it fits. A plan that has not helped
        before must free half.
        """
        best = self._plan(ctx, state)
        is_needed = ctx.overflow is not None or state.size > state.window
        for tried, (pins, unread) in enumerate(_LAST_RESORTS, 1):
            limit = float(state.window)
            if ctx.overflow is not None:
                has_failed = self._overflows > min(tried, _OVERFLOWS - 1)
                limit = min(limit, state.size * (0.5 if has_failed else _SMALLER))
            is_worth = state.is_worth(best.freed, least) or not is_needed
            if state.after(best.freed) <= limit and is_worth:
                break
            is_last = self._overflows >= _OVERFLOWS or best.freed <= 0
            if unread and (ctx.overflow is None or not is_last):
                break  # a model may take more than is estimated
            plan = self._plan(ctx, state, drops_pins=pins, drops_unread=unread)
            best = plan if plan.freed > best.freed else best
        return best

    def _plan(
        self,
        ctx: BeforeRequestContext,
        state: _State,
        *,
        may_merge: bool = True,
        drops_pins: bool = False,
        drops_unread: bool = False,
    ) -> _Plan:
        view, projection, end = ctx.messages, self._transcript, ctx.messages.stable
        target = self.target * state.window / 2 ** max(0, self._overflows - 1)
        merges = may_merge and projection.summaries * state.scale > _MERGE_SHARE * target
        merges = merges or drops_pins
        if drops_unread:
            place = _newest_note(view, projection.start, end)
        else:
            newest = _cost(ctx, view, projection.start, end)
            place = self._place(ctx, state, target - state.size + state.scale * newest)
        turns = note_turns = _turns(projection, view, place, merges=merges)
        if not merges and projection.before_notes < len(projection.parts):
            first = projection.parts[projection.before_notes].mark.first_turn
            note_turns = (first or turns[0], turns[1] or projection.turns_before_start)
        note = left_out(note_turns, can_read=bool(self.tools))
        mark = Mark(text=note, merges=merges, drops_pins=drops_pins, has_summary=False)
        freed = self._freed(ctx, mark, place)
        if place <= projection.start and not drops_pins:
            freed = 0
        first = projection.task if merges else projection.start
        return _Plan(first, place, merges, drops_pins, drops_unread, turns, note_turns, note, freed)

    def _without_merging(self, ctx: BeforeRequestContext, state: _State, plan: _Plan) -> _Plan:
        """The plan if there is no summary: earlier summaries stay, unless only they can go."""
        has_summaries = any(part.mark.has_summary for part in self._transcript.parts)
        if plan.drops_pins or not plan.merges or not has_summaries:
            return plan
        kept = self._plan(ctx, state, may_merge=False, drops_unread=plan.drops_unread)
        is_enough = kept.freed > 0 and state.after(kept.freed) <= state.window
        return kept if is_enough else plan

    async def _summary(
        self, ctx: BeforeRequestContext, state: _State, plan: _Plan, *, by_hand: bool
    ) -> str | None:
        projection, count = self._transcript, self._transcript.failures
        if count & (count + 1) and count % 4 != 3 and not by_hand:
            return None  # a model that has failed again and again is asked every fourth time
        return await self._summariser.summary(
            ctx,
            projection.view(),
            _old(projection, ctx.messages, plan.place, merges=plan.merges),
            merges=plan.merges,
            max_chars=round(_TEXT_SHARE * state.window * _CHARS),
        )

    def _freed(self, ctx: BeforeRequestContext, mark: Mark, place: int) -> int:
        """How many tokens a marker frees that replaces what is before the place, as estimated."""
        view, projection, estimate = ctx.messages, self._transcript, ctx.estimator.estimate_message
        parts = projection.parts_with(mark, view, place, view.stable)
        made = sum([estimate(message) for part in parts for message in part.messages])
        task = _cost(ctx, view, 0, projection.task)
        return projection.total - task - made - _cost(ctx, view, place, view.stable)

    def _place(self, ctx: BeforeRequestContext, state: _State, room: float) -> int:
        """Where the newest messages begin that stay: what no model has seen, and as many whole
        turns before it as there is room for; at least one turn.
        """
        view, start, end = ctx.messages, self._transcript.start, ctx.messages.stable
        place = index = _unread(view, start, end)
        used = state.scale * _cost(ctx, view, place, end)
        has_turn = any(not isinstance(view[n], CustomMessage) for n in range(place, end))
        while index > start:
            index -= 1
            used += state.scale * _cost(ctx, view, index, index + 1)
            if used > room and has_turn:
                break
            if _is_boundary(view, index, start, end):
                place, has_turn = index, True
        return place


class _Plan(Struct, frozen=True):
    """What a compaction would do."""

    first: int
    place: int
    """It replaces the messages from ``first`` to ``place``."""
    merges: bool
    drops_pins: bool
    drops_unread: bool
    turns: tuple[int, int]
    note_turns: tuple[int, int]
    """Those that a note covers: it takes the place of notes right before it."""
    note: str
    """What takes their place if there is no summary."""
    freed: int
    """How many tokens that would free, as estimated."""


class _State(Struct, frozen=True):
    """The size of the next request, in tokens of the provider as far as they are known."""

    size: float
    window: int
    scale: float
    """How many tokens of the provider there are for one that was estimated."""
    said: int | None
    """What the provider has just said about the window, or what follows from it."""

    def after(self, freed: int) -> float:
        """The size with that many estimated tokens less."""
        return self.size - freed * self.scale

    def is_worth(self, freed: int, least: float) -> bool:
        """Whether to free that many estimated tokens: more than ``least``, or enough to fit."""
        is_fit = self.after(freed) <= self.window < self.size
        return freed > 0 and (is_fit or freed * self.scale > least)

    @classmethod
    def of(cls, plugin: Compaction, ctx: BeforeRequestContext, projection: Projection) -> _State:
        overhead = plugin.overhead(ctx)
        measured = projection.measured or projection.measured_before
        scale = 1.0
        if measured is not None:
            scale = min(4.0, max(0.25, measured[0] / max(1, measured[1] + overhead)))
        if projection.measured is not None:
            known, then = projection.measured
        else:
            then = projection.compacted
            known = round((then + overhead) * scale)
        size = known + max(0, projection.total - then) * max(1.0, scale)
        window = plugin.window or ctx.context_window or window_of(ctx.model) or DEFAULT_WINDOW
        window = projection.windows.get(_model_of(ctx) or "", window)
        said: int | None = None
        if ctx.overflow is not None:
            said = window_said(ctx.overflow)
            if said is None or not size / 20 < said < size * 2.5:
                said = min(window, max(1, round(size)))
            window = said
            if size <= window:  # the estimate was too low
                scale *= window / max(1.0, size)
                size = float(window)
        return cls(size, window, scale, said)


def _check(window: Any, trigger: Any, target: Any, summary_tokens: Any, timeout: Any) -> None:
    for name, value in (("window", window), ("summary_tokens", summary_tokens)):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ConfigError(f"Compaction: {name} must be None or at least 1, not {value!r}")
    if not 0 < target < trigger <= 1:
        raise ConfigError(
            f"Compaction needs 0 < target < trigger <= 1, not {target!r} and {trigger!r}"
        )
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigError(f"Compaction: timeout must be more than 0 seconds, not {timeout!r}")


def _model_of(ctx: BeforeRequestContext) -> str | None:
    names = ctx.model.names
    return names[0] if names else "the model"


def _cost(ctx: BeforeRequestContext, view: MessageView, start: int, end: int) -> int:
    """The estimated tokens of messages. Markers cost nothing: no model gets them."""
    estimate = ctx.estimator.estimate_message
    messages = [view[index] for index in range(start, end)]
    return sum([estimate(message) for message in messages if mark_of(message) is None])


def _unread(view: MessageView, start: int, end: int) -> int:
    """Where what no model has seen begins: behind the newest answer, or with it if it has calls,
    because they stay with their results.
    """
    place = end
    while place > start:
        message = view[place - 1]
        if isinstance(message, AssistantMessage):
            return place - 1 if message.tool_calls else place
        place -= 1
    return start


def _newest_note(view: MessageView, start: int, end: int) -> int:
    """Where the newest message of the user or of the system is, if it is behind all results; else
    the end. Open calls stay.
    """
    place = end
    for index in range(end - 1, start - 1, -1):
        if isinstance(view[index], (UserMessage, SystemMessage)):
            place = index
        if not isinstance(view[index], CustomMessage):
            break
    return aligned(view, place, start, end)


def _is_boundary(view: MessageView, place: int, start: int, end: int) -> bool:
    """Whether a turn begins here: its notes, or its answer if it has none."""
    if place == start:
        return True
    before = view[place - 1]
    if not isinstance(before, (AssistantMessage, ToolResultMessage)):
        return False
    return aligned(view, place, start, end) == place


def _turns(
    projection: Projection, view: MessageView, place: int, *, merges: bool
) -> tuple[int, int]:
    """The first and the last turn that a compaction replaces; (0, 0) if it replaces none."""
    last = projection.turns_before_start + answers(view, projection.start, place)
    first = 1 if merges else projection.turns_before_start + 1
    return (first, last) if first <= last else (0, 0)


def _old(
    projection: Projection, view: MessageView, place: int, *, merges: bool
) -> list[AgentMessage]:
    """The messages that a summary must cover."""
    old = list(view[projection.start : place])
    if not merges:
        return old
    return [*[UserMessage(part.mark.text) for part in projection.parts], *old]
