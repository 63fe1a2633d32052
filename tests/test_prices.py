"""What tokens cost: the table of genai-prices, budgets without prices, and the cost of a run."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import genai_prices
import pytest
from genai_prices.data_snapshot import get_snapshot

from clark_agent import (
    AgentTool,
    Budget,
    ConfigError,
    LoopConfig,
    LoopError,
    Price,
    RunResult,
    StreamErrorKind,
    Usage,
    agent_tool,
    run,
)
from clark_agent.prices import Bill, ModelRef, ModelUsage, price_of
from clark_agent.replay import replay
from clark_agent.run_log import MemoryStore, RunLog, resume
from clark_agent.run_log.records import RunBegan
from clark_agent.stream import Error
from clark_agent.testing import FakeClock, ScriptedStream, Step, call
from clark_agent.transports import connect
from tests.engine.support import CONTEXT, PLACEHOLDER, Work, completed, paid, results


def known(model: str, provider: str) -> Price:
    price = price_of(model, provider)
    assert price is not None
    return price


GPT = known("gpt-5", "OpenAI")
HAIKU = known("claude-haiku-4-5", "Anthropic")
LOCAL = {"local": Price(input=1_000_000, output=0)}


class Served(ScriptedStream):
    """A scripted model with the names that a real transport has."""

    def __init__(
        self,
        script: Iterable[Step],
        model: str = "gpt-5",
        provider: str = "OpenAI",
        **options: Any,
    ) -> None:
        super().__init__(script, **options)
        self.model = model
        self.provider = provider


@pytest.fixture
def without_package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "genai_prices", None)
    price_of.cache_clear()
    yield
    price_of.cache_clear()


def helper(stream: ScriptedStream, **settings: Any) -> AgentTool:
    return agent_tool("ask", "Helps.", LoopConfig(stream=stream, **settings))


# --- looking a price up -------------------------------------------------------------------------


def test_a_price_is_found_by_model_and_provider() -> None:
    assert price_of("gpt-5") == price_of("gpt-5", "OpenAI") == GPT
    assert price_of("openai/gpt-5", "OpenRouter") is not None
    assert None not in (HAIKU.cache_read, HAIKU.cache_write)
    assert price_of("no-such-model") is price_of("no-such-model", "OpenAI") is None
    assert price_of("gpt-5", "a server of ours") is None, "it may cost something else there"
    assert price_of("tts-1-hd", "OpenAI") is None, "it is not paid by the token"


def test_prices_are_those_that_the_package_computes() -> None:
    """For a short request to each model that it can find, unless requests have a price too."""
    asked = genai_prices.Usage(
        input_tokens=1000, cache_read_tokens=200, cache_write_tokens=100, output_tokens=50
    )
    usage, compared = Usage(700, 50, 100, 200), 0
    for provider in get_snapshot().providers:
        for model in provider.models[::5]:
            try:
                found = genai_prices.calc_price(asked, model.id, provider_id=provider.id)
            except LookupError:
                continue
            price = price_of(model.id, provider.id)
            if price is not None and found.model_price.requests_kcount is None:
                assert price.of(usage) == pytest.approx(float(found.total_price))
                compared += 1
    assert compared > 100


@pytest.mark.parametrize(
    ("scheme", "provider"),
    [
        ("openai", "openai"),
        ("openai-responses", "openai"),
        ("anthropic", "anthropic"),
        ("gemini", "google"),
        ("openrouter", "openrouter"),
        ("groq", "groq"),
        ("deepseek", "deepseek"),
        ("mistral", "mistral"),
        ("xai", "x-ai"),
        ("moonshot", "moonshotai"),
        ("zai", "zai"),
        ("cerebras", "cerebras"),
        ("together", "together"),
        ("fireworks", "fireworks"),
    ],
)
def test_every_provider_that_connect_knows_has_prices(scheme: str, provider: str) -> None:
    (listed,) = [each for each in get_snapshot().providers if each.id == provider]
    names = [model.id for model in listed.models]
    names += [f"accounts/fireworks/models/{name}" for name in names]
    name = next(name for name in names if price_of(name, provider) is not None)
    limits = Budget(cost=1)
    config = LoopConfig(stream=connect(f"{scheme}:{name}", api_key="k"), budget=limits)
    assert limits.price_of(config.model_ref) == price_of(name, provider)
    named = config.replace(model_id=f"{scheme}:{name}")  # the host's own name for it
    assert limits.price_of(named.model_ref) == price_of(name, provider)


# --- budgets ------------------------------------------------------------------------------------


async def test_a_limit_on_cost_needs_no_prices() -> None:
    work = paid(100_000, "", call("work"))
    model = Served([work], at_end="repeat")
    each = GPT.of(Usage(100_000))
    limits = Budget(cost=3.5 * each, wrap_up_at=None)
    result, _ = await completed(model, Work(), budget=limits)
    assert (result.outcome, result.limit) == ("out_of_budget", "cost")
    assert len(model.requests) == 4
    assert result.spent is not None
    assert result.spent.cost == result.cost == result.tree_cost == pytest.approx(4 * each)


@pytest.mark.parametrize("name", ["gpt-5", "mine"])
async def test_prices_of_the_host_come_first(name: str) -> None:
    limits = Budget(cost=100, prices={name: Price(input=1_000_000, output=0)})
    result, _ = await completed(Served([paid(7, "ok")]), budget=limits, model_id="mine")
    assert result.spent is not None
    assert result.spent.cost == result.cost == 7


def test_a_model_without_a_price_is_refused_with_advice() -> None:
    limits = Budget(cost=1)
    with pytest.raises(ConfigError) as caught:
        LoopConfig(stream=Served([], "own-7b", "compatible server"), budget=limits)
    assert str(caught.value) == (
        "Budget.cost has no price for the model 'own-7b' of the provider 'compatible server': "
        "set Budget.prices={'own-7b': Price(input=..., output=...)}"
    )
    with pytest.raises(ConfigError, match="needs the name of the model: set model_id"):
        LoopConfig(stream=ScriptedStream([]), budget=limits)
    LoopConfig(stream=ScriptedStream([]), budget=limits, model_id="gpt-5")


@pytest.mark.usefixtures("without_package")
async def test_without_the_package_only_a_limit_on_cost_needs_it() -> None:
    with pytest.raises(ConfigError) as caught:
        LoopConfig(stream=Served([]), budget=Budget(cost=1))
    assert str(caught.value) == (
        "Budget.cost has no price for the model 'gpt-5': set Budget.prices={'gpt-5': "
        "Price(input=..., output=...)}, or look it up: the price of a model needs the package "
        "genai_prices: pip install '.[prices]' in a checkout of clark-agent"
    )
    with pytest.raises(ConfigError, match=r"pip install '\.\[prices\]'"):
        price_of("gpt-5")
    result, _ = await completed(Served([paid(7, "ok")]), budget=Budget(tokens=100))
    assert result.cost is result.tree_cost is None
    result, _ = await completed(Served([paid(7, "ok")]), budget=Budget(prices=LOCAL))
    assert result.spent is not None
    assert result.spent.cost == 0
    limits = Budget(cost=100, prices={"gpt-5": Price(input=1_000_000, output=0)})
    result, _ = await completed(Served([paid(7, "ok")]), budget=limits)
    assert result.cost == 7


async def test_a_child_without_a_price_is_refused_when_it_starts() -> None:
    unpaid = Served([paid(10**9, "unheard")], "own-7b", "compatible server")
    result, _ = await completed(
        Served([paid(1, "", call("ask", task="?")), paid(1, "ok")]),
        helper(unpaid),
        budget=Budget(cost=1),
    )
    (answer,) = results(result)
    assert answer.is_error
    assert "no price for the model 'own-7b'" in answer.plain_text
    assert unpaid.requests == []


# --- the cost of a run --------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [None, Budget(cost=100), Budget(turns=10)])
async def test_the_cost_of_a_tree_has_the_price_of_each_model(limits: Budget | None) -> None:
    haiku = Served([paid(1000, "fine")], "claude-haiku-4-5", "Anthropic")
    result, _ = await completed(
        Served([paid(100, "", call("ask", task="?")), paid(200, "ok")]),
        helper(haiku),
        budget=limits,
    )
    own, below = GPT.of(Usage(300)), HAIKU.of(Usage(1000))
    assert result.cost == pytest.approx(own)
    assert result.tree_cost == pytest.approx(own + below)
    assert result.bill.below == (
        ModelUsage(ModelRef(None, "claude-haiku-4-5", "Anthropic"), Usage(1000)),
    )
    if limits is not None and limits.cost is not None:
        assert result.spent is not None
        assert result.spent.cost == pytest.approx(own + below)


async def test_a_child_is_paid_with_the_prices_of_the_budgets_above() -> None:
    child = helper(ScriptedStream([paid(5, "fine")]), model_id="local", budget=Budget(turns=3))
    result, _ = await completed(
        [paid(1, "", call("ask", task="?")), paid(1, "ok")],
        child,
        model_id="local",
        budget=Budget(cost=100, prices=LOCAL),
    )
    assert (result.cost, result.tree_cost) == (2, 7)


async def test_a_cost_that_is_not_known_is_none() -> None:
    unpaid = helper(Served([paid(5, "fine")], "own-7b", "compatible server"))
    result, _ = await completed(Served([paid(1, "", call("ask", task="?")), paid(1, "ok")]), unpaid)
    assert result.cost == pytest.approx(GPT.of(Usage(2)))
    assert result.tree_cost is None, "not the cost of a part"
    result, _ = await completed([paid(5, "ok")])
    assert result.cost is None
    assert Bill().cost == 0


async def test_an_error_carries_the_cost() -> None:
    fails = Error(PLACEHOLDER, StreamErrorKind.FATAL, "no")
    config = LoopConfig(
        stream=Served([paid(100, "", call("ask", task="?")), [fails]]),
        tools=[helper(Served([paid(1000, "fine")], "claude-haiku-4-5", "Anthropic"))],
    )
    with pytest.raises(LoopError) as caught:
        await run("go", CONTEXT, config)
    own, below = GPT.of(Usage(100)), HAIKU.of(Usage(1000))
    copy: LoopError = pickle.loads(pickle.dumps(caught.value))
    for error in (caught.value, copy):
        assert error.cost == pytest.approx(own)
        assert error.tree_cost == pytest.approx(own + below)
    assert LoopError("before a run").cost is LoopError("before a run").tree_cost is None


async def test_a_result_can_be_pickled_with_its_cost() -> None:
    result, _ = await completed(Served([paid(100, "ok")]), budget=Budget(cost=1))
    copy: RunResult = pickle.loads(pickle.dumps(result))
    assert copy == result
    assert copy.cost == result.cost is not None


# --- the log ------------------------------------------------------------------------------------


async def test_what_was_spent_before_a_resume_keeps_its_price() -> None:
    """Also by a child run, and with another model from then on."""
    store = MemoryStore()
    haiku = Served([paid(1000, "fine")], "claude-haiku-4-5", "Anthropic")
    first = LoopConfig(
        stream=Served([paid(100, "", call("ask", task="?")), paid(200, "ok")]),
        tools=[helper(haiku)],
        run_log=RunLog(store),
        budget=Budget(cost=1),
        clock=FakeClock(),
    )
    whole = await run("go", CONTEXT, first)
    (root,) = [summary.run_id for summary in store.runs() if summary.parent_run_id is None]
    records = store.load(root).records
    began = records[0].entry
    assert isinstance(began, RunBegan)
    assert began.model_ref == ModelRef(None, "gpt-5", "OpenAI")
    answers = [
        n for n, record in enumerate(records) if record.entry.__struct_config__.tag == "asked"
    ]
    store.cut(root, answers[1])  # the process dies before the second request
    other = Served([paid(200, "ok")], "claude-haiku-4-5", "Anthropic")
    again = await resume(store, root, first.replace(stream=other))
    own = GPT.of(Usage(100)) + HAIKU.of(Usage(200))
    assert again.cost == pytest.approx(own)
    assert again.tree_cost == pytest.approx(own + HAIKU.of(Usage(1000)))
    assert again.spent is not None
    assert again.spent.cost == pytest.approx(again.tree_cost)
    assert again.tree_usage == whole.tree_usage


async def test_a_replay_needs_no_transport_of_the_same_name() -> None:
    store = MemoryStore()
    config = LoopConfig(stream=Served([paid(100, "ok")]), run_log=RunLog(store))
    await run("go", CONTEXT, config)
    (logged,) = store.runs()
    report = await replay(store, logged.run_id, config.replace(stream=ScriptedStream([])))
    assert report.is_identical, str(report)
