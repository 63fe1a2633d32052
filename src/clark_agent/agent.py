"""Agent: a model, its tools and a system prompt as one value.

    agent = Agent("anthropic:claude-sonnet-5", tools=[weather], system_prompt="Be brief.")
    result = await agent.run("Do I need an umbrella in Lisbon?")
    print(result.output)

An agent adds nothing to the loop: it holds a `LoopConfig` and a system prompt, and passes them to
`clark_agent.run` and its companions. Agents are immutable; one agent serves any number of runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from types import CodeType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypedDict, Unpack, overload

from clark_agent._typing import DefaultsToAny
from clark_agent.budget import Budget
from clark_agent.cancellation import CancellationToken
from clark_agent.clock import Clock
from clark_agent.config import ExecutionMode, Journals, LoopConfig
from clark_agent.conversation import Conversation
from clark_agent.effects import Effects
from clark_agent.engine.arguments import check_arguments, check_continuation, prompt_messages
from clark_agent.engine.loop import start
from clark_agent.errors import ConfigError, LoopError
from clark_agent.events import EventSink
from clark_agent.messages.tokens import TokenEstimator
from clark_agent.output import Output, OutputMode, OutputValidator
from clark_agent.plugins.base import Plugin
from clark_agent.plugins.large_results import MAX_RESULT_CHARS, LargeResults
from clark_agent.protocol import ProtocolPolicy
from clark_agent.recovery import ContextOverflowRecovery, MaxTokensRecovery
from clark_agent.result import RunResult
from clark_agent.run_context import (
    RunContext,
    SystemPrompt,
    check_system_prompt,
    resolve_system_prompt,
)
from clark_agent.running import Prompts, RunStream, wait_for
from clark_agent.stream import ReasoningEffort, StreamFn
from clark_agent.sub_agents import INHERIT, agent_tool
from clark_agent.tool_source import ToolSource
from clark_agent.tools import AgentTool
from clark_agent.tools.base import check_tool_name
from clark_agent.tools.repair import close_match
from clark_agent.types import AgentContext, AgentMessage, RunIdentity

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    OutputT = TypeVar("OutputT", default=str, covariant=True)
    DepsT = TypeVar("DepsT", default=None, contravariant=True)
    T = TypeVar("T")
    D = TypeVar("D", default=None)
else:
    from clark_agent._typing import DepsT, OutputT

__all__ = ["Agent", "AgentSettings", "RunOptions"]

_MAX_ITERATIONS = 50

_ARGUMENTS = (
    "system_prompt",
    "output",
    "output_mode",
    "output_retries",
    "output_validators",
    "deps_type",
    "name",
    "max_result_chars",
    *LoopConfig.__struct_fields__,
)
# The names of these arguments in other libraries.
_KNOWN_AS = {
    "instructions": "system_prompt",
    "system": "system_prompt",
    "prompt": "system_prompt",
    "output_type": "output",
    "result_type": "output",
    "response_format": "output",
    "retries": "output_retries",
    "deps": "deps_type",
    "stream": "model",
}
_OPTIONS = ("messages", "identity", "signal")
_OPTIONS_KNOWN_AS = {"message_history": "messages", "history": "messages", "token": "signal"}


if TYPE_CHECKING:  # costly to create at run time

    class PlainFunction(Protocol):
        """A function that is not a tool yet."""

        @property
        def __code__(self) -> CodeType: ...

        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    class AgentSettings(TypedDict, total=False):
        """The settings of `LoopConfig` that an agent takes by keyword."""

        tool_source: ToolSource | None
        plugins: Iterable[Plugin]
        event_sink: EventSink | None
        protocol: ProtocolPolicy
        conversation_id: str | None
        agent_name: str | None
        model_id: str | None
        token_estimator: TokenEstimator
        default_execution_mode: ExecutionMode
        max_tool_calls_per_turn: int | None
        tool_timeout: float | None
        temperature: float | None
        max_output_tokens: int | None
        reasoning: ReasoningEffort
        provider_extras: Any
        force_tool_call: bool
        max_output_tokens_recovery: MaxTokensRecovery | None
        overflow_recovery: ContextOverflowRecovery | None
        max_iterations: int | None
        grace_iterations: int
        graceful_turn_limit_message_provider: Callable[[], str] | None
        graceful_turn_limit_grace_provider: Callable[[], int] | None
        empty_outcome_retry_budget: int | None
        budget: Budget | None
        plain_text_terminal_fallback_tool: str | None
        plain_text_terminal_fallback_eager: bool
        plain_text_terminal_fallback_eager_nudge: bool
        cancel_grace: float
        hook_timeout: float | None
        clock: Clock
        run_log: Journals | None
        effects: Effects | None
        max_result_chars: int | None

    class RunOptions(TypedDict, total=False):
        """What a run of an agent takes besides its prompts and dependencies."""

        messages: Sequence[AgentMessage]
        """The conversation before the prompts."""
        identity: RunIdentity | None
        signal: CancellationToken | None

else:
    PlainFunction = AgentSettings = RunOptions = dict


class Agent(DefaultsToAny, Generic[OutputT, DepsT]):
    """A model, its tools and a system prompt.

    Args:
        model: A transport, or a string for `clark_agent.transports.connect`, such as
            ``"openai:gpt-5.1"``.
        tools: Tools, or functions to make tools of.
        system_prompt: A text, or a function of the `RunContext` that returns it, called before each
            run.
        output: The type of ``result.output``. ``str`` is the text of the last answer.
        output_mode: How the model is asked for the output; see `clark_agent.output.OutputMode`. By
            default the best one that the transport offers.
        output_retries: How often the model may try again after an output that was not accepted.
            Then the run raises `OutputError`.
        output_validators: Functions that check an output, and raise `ModelRetry` with the reason.
        deps_type: The type of the dependencies, for type checkers, and to reject others.
        name: The name of the agent, for `as_tool` and for stores and engines that look it up.
        settings: Every setting of `clark_agent.LoopConfig`. ``max_iterations`` is 50 by default:
            the model is asked to wrap up after turn 45. And ``max_result_chars``, how many
            characters of a tool's result the model gets, 50,000 by default. It gets the beginning
            and the end of a longer one, and a tool to read the rest: see
            `clark_agent.plugins.LargeResults`. None: it gets every result as it is. Has no effect
            if the plugins contain a `LargeResults`, or if there are no tools.

    Raises `ConfigError` for an unknown model, a missing key or an invalid setting.
    """

    _config: LoopConfig
    _given: dict[str, Any]
    _system_prompt: SystemPrompt[Any]
    _deps_type: type | None
    _name: str | None

    @overload
    def __init__(  # without dependencies
        self: Agent[str, None],
        model: str | StreamFn,
        *,
        tools: Iterable[PlainFunction] = (),
        system_prompt: SystemPrompt[None] = "",
        output_retries: int = 2,
        output_validators: Iterable[OutputValidator] = (),
        name: str | None = None,
        **settings: Unpack[AgentSettings],
    ) -> None: ...

    @overload
    def __init__(
        self: Agent[T, None],
        model: str | StreamFn,
        *,
        output: type[T],
        output_mode: OutputMode | str | None = None,
        output_retries: int = 2,
        output_validators: Iterable[OutputValidator] = (),
        tools: Iterable[PlainFunction] = (),
        system_prompt: SystemPrompt[None] = "",
        name: str | None = None,
        **settings: Unpack[AgentSettings],
    ) -> None: ...

    @overload
    def __init__(
        self: Agent[str, D],
        model: str | StreamFn,
        *,
        tools: Iterable[AgentTool[D] | PlainFunction] = (),
        system_prompt: SystemPrompt[D] = "",
        output_retries: int = 2,
        output_validators: Iterable[OutputValidator] = (),
        deps_type: type[D] = ...,
        name: str | None = None,
        **settings: Unpack[AgentSettings],
    ) -> None: ...

    @overload
    def __init__(
        self,
        model: str | StreamFn,
        *,
        output: type[OutputT],
        output_mode: OutputMode | str | None = None,
        output_retries: int = 2,
        output_validators: Iterable[OutputValidator] = (),
        tools: Iterable[AgentTool[DepsT] | PlainFunction] = (),
        system_prompt: SystemPrompt[DepsT] = "",
        deps_type: type[DepsT] = ...,
        name: str | None = None,
        **settings: Unpack[AgentSettings],
    ) -> None: ...

    @overload
    def __init__(  # for unions: agent: Agent[int | str] = Agent(…, output=int | str)
        self: Agent[Any, D],
        model: str | StreamFn,
        *,
        output: Any,
        output_mode: OutputMode | str | None = None,
        output_retries: int = 2,
        output_validators: Iterable[OutputValidator] = (),
        tools: Iterable[AgentTool[D] | PlainFunction] = (),
        system_prompt: SystemPrompt[D] = "",
        deps_type: type[D] = ...,
        name: str | None = None,
        **settings: Unpack[AgentSettings],
    ) -> None: ...

    def __init__(
        self,
        model: str | StreamFn,
        *,
        tools: Iterable[Any] = (),
        system_prompt: SystemPrompt[Any] = "",
        output: Any = str,
        output_mode: OutputMode | str | None = None,
        output_retries: int = 2,
        output_validators: Iterable[OutputValidator] = (),
        deps_type: Any = None,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        _check_names(settings, _KNOWN_AS, _ARGUMENTS)
        every: Any = tools
        if isinstance(every, Iterable) and not isinstance(every, (str, Mapping)):
            every = tuple(every)  # an iterator can be read only once
        given: dict[str, Any] = {
            "model": model,
            "tools": every,
            "system_prompt": system_prompt,
            "output": output,
            "output_mode": output_mode,
            "output_retries": output_retries,
            "output_validators": _listed("output_validators", output_validators),
            "deps_type": deps_type,
            "name": name,
            **settings,
        }
        check_system_prompt(system_prompt, "Agent")
        if name is not None:
            check_tool_name(name, "Agent")
        if deps_type is not None and not isinstance(deps_type, type):
            raise ConfigError(f"deps_type must be a class, not {deps_type!r}")
        stream = _connected(model)
        settings.setdefault("max_iterations", _MAX_ITERATIONS)
        settings.setdefault("model_id", getattr(stream, "model", None))
        settings.setdefault("agent_name", name)
        max_result_chars: Any = settings.pop("max_result_chars", MAX_RESULT_CHARS)
        if "plugins" in settings:  # an iterator can be read only once
            given["plugins"] = settings["plugins"] = _listed("plugins", settings["plugins"])
        if max_result_chars is not None:
            has_tools = bool(given["tools"]) or settings.get("tool_source") is not None
            settings["plugins"] = _with_large_results(
                max_result_chars, settings.get("plugins", ()), has_tools=has_tools
            )
        config = LoopConfig(
            stream=stream,
            tools=given["tools"],
            output=Output(
                output,
                mode=output_mode,
                retries=output_retries,
                validators=given["output_validators"],
            ),
            **settings,
        )
        self.__dict__.update(
            _config=config,
            _given=given,
            _system_prompt=system_prompt,
            _deps_type=deps_type,
            _name=name,
        )

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"an Agent is immutable: use replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("an Agent is immutable")

    @property
    def name(self) -> str | None:
        """The name of the agent."""
        return self._name

    @property
    def config(self) -> LoopConfig:
        """The settings of its runs, for `clark_agent.run`, `resume` and `replay`."""
        return self._config

    @property
    def system_prompt(self) -> SystemPrompt[Any]:
        """The system prompt, or the function that returns it."""
        return self._system_prompt

    def replace(self, **changes: Any) -> Agent[OutputT, DepsT]:
        """An agent with the given arguments changed, for example another ``model`` in a test."""
        made: Any = type(self)(**{**self._given, **changes})
        return made  # type: ignore[no-any-return]

    # --- running --------------------------------------------------------------------------------

    @overload
    async def run(
        self: Agent[T, None], prompts: Prompts | None, **options: Unpack[RunOptions]
    ) -> RunResult[T]: ...

    @overload
    async def run(
        self, prompts: Prompts | None, *, deps: DepsT, **options: Unpack[RunOptions]
    ) -> RunResult[OutputT]: ...

    async def run(
        self, prompts: Prompts | None, *, deps: Any = None, **options: Unpack[RunOptions]
    ) -> RunResult[Any]:
        """Run the agent with the prompts. Without prompts (None), ``messages`` are continued.

        Raises a `LoopError`, which carries the messages so far, if the run fails.
        """
        return await self._run(prompts, deps, options)

    @overload
    def run_sync(
        self: Agent[T, None], prompts: Prompts | None, **options: Unpack[RunOptions]
    ) -> RunResult[T]: ...

    @overload
    def run_sync(
        self, prompts: Prompts | None, *, deps: DepsT, **options: Unpack[RunOptions]
    ) -> RunResult[OutputT]: ...

    def run_sync(
        self, prompts: Prompts | None, *, deps: Any = None, **options: Unpack[RunOptions]
    ) -> RunResult[Any]:
        """`run` for scripts and notebooks; see `clark_agent.run_sync`."""

        def starter(token: CancellationToken) -> Coroutine[Any, Any, RunResult[Any]]:
            return self._run(prompts, deps, options, token)

        signal = options.get("signal")
        check_arguments(AgentContext(), self._config, signal)
        return wait_for(starter, signal)

    @overload
    def stream(
        self: Agent[T, None],
        prompts: Prompts | None,
        *,
        max_buffered: int = 256,
        **options: Unpack[RunOptions],
    ) -> RunStream[T]: ...

    @overload
    def stream(
        self,
        prompts: Prompts | None,
        *,
        deps: DepsT,
        max_buffered: int = 256,
        **options: Unpack[RunOptions],
    ) -> RunStream[OutputT]: ...

    def stream(
        self,
        prompts: Prompts | None,
        *,
        deps: Any = None,
        max_buffered: int = 256,
        **options: Unpack[RunOptions],
    ) -> RunStream[Any]:
        """The events of a run, to iterate over; see `clark_agent.stream_run`."""
        self.check_deps(deps)
        _check_names(options, _OPTIONS_KNOWN_AS, _OPTIONS)
        check_arguments(AgentContext(), self._config, options.get("signal"))

        def starter(
            sink: EventSink, token: CancellationToken
        ) -> Coroutine[Any, Any, RunResult[Any]]:
            return self._run(prompts, deps, options, token, sink)

        return RunStream(starter, options.get("signal"), max_buffered, output=self._config.output)

    @overload
    def conversation(
        self: Agent[T, None], *, messages: Sequence[AgentMessage] = ()
    ) -> Conversation[T]: ...

    @overload
    def conversation(
        self, *, deps: DepsT, messages: Sequence[AgentMessage] = ()
    ) -> Conversation[OutputT]: ...

    def conversation(
        self, *, deps: Any = None, messages: Sequence[AgentMessage] = ()
    ) -> Conversation[Any]:
        """A conversation with the agent, which keeps the messages from run to run."""
        self.check_deps(deps)
        prompt = self._system_prompt
        context = AgentContext(prompt if isinstance(prompt, str) else "", tuple(messages))
        function = None if isinstance(prompt, str) else prompt
        return Conversation(self._config, context, deps=deps, system_prompt=function)

    @overload
    def load_conversation(
        self: Agent[T, None], path: str | os.PathLike[str]
    ) -> Conversation[T]: ...

    @overload
    def load_conversation(
        self, path: str | os.PathLike[str], *, deps: DepsT
    ) -> Conversation[OutputT]: ...

    def load_conversation(
        self, path: str | os.PathLike[str], *, deps: Any = None
    ) -> Conversation[Any]:
        """A conversation that `Conversation.save` has written, with this agent's system prompt."""
        self.check_deps(deps)
        return Conversation.load(path, self._config, system_prompt=self._system_prompt, deps=deps)

    def as_tool(
        self,
        description: str,
        *,
        name: str | None = None,
        max_depth: int = 3,
        timeout: float | None = None,
        deps: Any = INHERIT,
    ) -> AgentTool[DepsT]:
        """A tool that gives a task to this agent; see `clark_agent.agent_tool`.

        Its dependencies are those of the agent that calls it, unless others are given.
        """
        if deps is not INHERIT:
            self.check_deps(deps)
        tool_name = name or self._name
        if tool_name is None:
            raise ConfigError("an agent without a name needs as_tool(name=...)")
        return agent_tool(
            tool_name,
            description,
            self._config,
            system_prompt=self._system_prompt,
            max_depth=max_depth,
            timeout=timeout,
            deps=deps,
            check_deps=self.check_deps,
        )

    def __repr__(self) -> str:
        return f"<Agent {self._name or self._config.model_id or 'without a name'}>"

    async def _run(
        self,
        prompts: Prompts | None,
        deps: Any,
        options: RunOptions,
        signal: CancellationToken | None = None,
        sink: EventSink | None = None,
    ) -> RunResult[Any]:
        _check_names(options, _OPTIONS_KNOWN_AS, _OPTIONS)
        return await self.start(
            prompts,
            deps=deps,
            config=self._config,
            messages=_listed("messages", options.get("messages", ())),
            identity=options.get("identity"),
            signal=signal or options.get("signal"),
            sink=sink,
        )

    async def start(
        self,
        prompts: Prompts | None,
        *,
        deps: Any,
        config: LoopConfig,
        messages: tuple[AgentMessage, ...] = (),
        identity: RunIdentity | None = None,
        signal: CancellationToken | None = None,
        sink: EventSink | None = None,
    ) -> RunResult[Any]:
        """Run the agent under a variant of its config. For `clark_agent.run_log.advance`."""
        self.check_deps(deps)
        prompt, token = self._system_prompt, signal
        check_arguments(AgentContext("", messages, identity), config, token)
        if not isinstance(prompt, str):
            run_context = RunContext(deps, identity, messages)
            try:
                prompt = await resolve_system_prompt(
                    prompt, run_context, token, config.hook_timeout
                )
            except LoopError as error:
                error.messages = () if prompts is None else tuple(prompt_messages(prompts, config))
                raise
        context = AgentContext(prompt, messages, identity)
        if prompts is None:
            check_continuation(context)
            prompts = ()
        return await start(prompts, context, config, token, sink=sink, deps=deps)

    def check_deps(self, deps: Any) -> None:
        """Raise `ConfigError` unless the dependencies are of the agent's ``deps_type``."""
        expected = self._deps_type
        if expected is not None and not isinstance(deps, expected):
            raise ConfigError(
                f"the agent's deps must be a {expected.__name__}, not {type(deps).__name__}"
            )


def _with_large_results(
    max_chars: int, plugins: tuple[Any, ...], *, has_tools: bool
) -> tuple[Any, ...]:
    """The plugins, with one that keeps large results if there are tools and none does it yet."""
    if type(max_chars) is not int or max_chars < 1:
        raise ConfigError(
            f"max_result_chars must be a number of characters, or None, not {max_chars!r}"
        )
    if not has_tools or any(isinstance(plugin, LargeResults) for plugin in plugins):
        return plugins
    return (*plugins, LargeResults(max_chars))


def _connected(model: Any) -> StreamFn:
    if not isinstance(model, str):
        stream: StreamFn = model
        return stream
    from clark_agent.transports import connect  # loaded when first used

    return connect(model)


def _check_names(given: Iterable[str], known_as: Mapping[str, str], known: Sequence[str]) -> None:
    """Raise `ConfigError` for names that other libraries use, or that nothing has."""
    for name in given:
        if name in known and name not in known_as:
            continue
        close = known_as.get(name) or close_match(name, known)
        hint = "" if close is None else f"; did you mean {close!r}?"
        raise ConfigError(f"unknown argument {name!r} of an Agent{hint}")


def _listed(name: str, given: Any) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"{name} must be a list, not {given!r}")
    return tuple(given)
