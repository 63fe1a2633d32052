"""The page of runs in a real browser, on a real server, with real runs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from clark_agent import (
    Agent,
    AgentTool,
    RunIdentity,
    ToolContext,
    ToolResult,
    tool,
)
from clark_agent.errors import LoopError
from clark_agent.run_log import JsonlStore, MemoryStore, RunLog, SqliteStore
from clark_agent.stream import StreamRequest
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import SUSPEND, ApprovalGate
from clark_agent.types import ToolCall
from clark_agent.view.export import write_run
from tests.browsers import shot, started_browser
from tests.view.site import TOKEN, Site, site
from tests.view.stories import (
    EVIL,
    LOG,
    TASK,
    Audit,
    LiveModel,
    answer,
    chart,
    refund,
    refunding,
    run_evil,
    run_evil_failure,
    run_fix,
    run_tests,
)

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
expect = playwright.expect
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncGenerator[Any]:
    async with started_browser() as started:
        yield started


@asynccontextmanager
async def opened(
    browser: Any, where: Site | int | Path, place: str = "", **options: Any
) -> AsyncGenerator[Any]:
    """A page of a site, at a port, or in a file. What went wrong in it is an error at the end."""
    options = {"viewport": {"width": 1280, "height": 900}, "locale": "en-US", **options}
    context = await browser.new_context(**options)
    page = await context.new_page()
    page.problems, page.requested = [], []
    page.on("pageerror", lambda error: page.problems.append(f"error: {error}"))
    page.on("dialog", lambda dialog: page.problems.append(f"dialog: {dialog.message}"))
    page.on("console", lambda note: note.type == "error" and page.problems.append(note.text))
    page.on("request", lambda request: page.requested.append(request.url))
    if isinstance(where, Path):
        await page.goto(f"file://{where}{place}")
    else:
        base = f"http://127.0.0.1:{where if isinstance(where, int) else where.port}/"
        await page.goto(f"{base}?token={TOKEN}{place}")
    try:
        yield page
    finally:
        await context.close()
    assert page.problems == []


def turn(page: Any, number: int) -> Any:
    return page.locator(f"section.turn[data-turn='{number}']")


# --- the list -------------------------------------------------------------------------------------


async def some_runs(store: Any) -> None:
    """Three runs, one of which has failed."""
    for name, model, step in (
        ("kettle", "small-model", "A kettle."),
        ("teapot", "large-model", "A teapot."),
        ("saucer", "large-model", RuntimeError("the saucer broke")),
    ):
        agent = Agent(ScriptedStream([step]), run_log=RunLog(store), model_id=model)
        try:
            await agent.run(f"Find a {name}.", identity=RunIdentity.root(name))
        except Exception:
            assert name == "saucer"


async def test_the_list_is_searched_filtered_and_opened_with_the_keyboard(
    browser: Any, tmp_path: Path
) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    await run_fix(store, tmp_path)
    await some_runs(store)
    async with site(store) as served, opened(browser, served) as page:
        rows = page.locator(".run-row")
        tasks = rows.locator(".task a")
        await expect(tasks).to_have_text(
            ["Find a saucer.", "Find a teapot.", "Find a kettle.", TASK]
        )
        await expect(rows.first.locator(".status")).to_have_text("failed")
        await expect(rows.nth(3)).to_contain_text("claude-sonnet-4-5")

        # Child runs are folded under the run that started them.
        await page.get_by_role("button", name="Child runs: 1").click()
        await expect(rows).to_have_count(5)
        await expect(rows.nth(4)).to_have_attribute("aria-level", "2")
        await expect(rows.nth(4)).to_contain_text("Look at shop/prices.py")
        await page.get_by_role("button", name="Child runs: 1").click()
        await expect(rows).to_have_count(4)

        # Filters, whose state is in the address.
        await page.get_by_label("Status").select_option("failed")
        await expect(tasks).to_have_text(["Find a saucer."])
        await page.get_by_label("Status").select_option("")
        await page.get_by_label("Model").select_option("large-model")
        await expect(tasks).to_have_text(["Find a saucer.", "Find a teapot."])
        assert page.url.endswith("#/?model=large-model")
        await page.keyboard.press("Escape")  # leaves the field
        await page.keyboard.press("Escape")  # shows all
        await expect(rows).to_have_count(4)

        # Search.
        await page.keyboard.press("/")
        await page.keyboard.type("teapot")
        await expect(tasks).to_have_text(["Find a teapot."])
        await page.get_by_label("Search runs").fill("nothing like that")
        await expect(page.get_by_text("No run matches.")).to_be_visible()
        await page.get_by_role("button", name="Show all runs").click()
        await expect(rows).to_have_count(4)

        # j, k, Enter, Escape; ? for help.
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog")).to_contain_text("Keyboard shortcuts")
        await page.keyboard.press("Escape")
        for key in "jjjjk":
            await page.keyboard.press(key)
        await expect(rows.nth(2)).to_have_class(re.compile("is-current"))
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Find a kettle.")
        assert page.url.endswith("#/run/kettle")
        await page.keyboard.press("Escape")
        await expect(rows).to_have_count(4)

        # Without a selected run, Enter selects the first.
        await page.keyboard.press("Enter")
        await expect(rows.first).to_have_class(re.compile("is-current"))
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_have_text("Find a saucer.")
    store.close()


async def test_damaged_logs_are_named_above_the_list(browser: Any, tmp_path: Path) -> None:
    store = JsonlStore(tmp_path)
    await some_runs(store)
    broken = [tmp_path / f"broken{number}.jsonl" for number in range(7)]
    for path in broken:
        path.write_text("{\n")
    async with site(store, refresh_ms=200) as served, opened(browser, served) as page:
        await expect(page.locator(".run-row")).to_have_count(3)
        words = "7 damaged logs cannot be listed, because the first record cannot be read: broken0"
        await expect(page.locator(".list .notice")).to_contain_text(words)
        await expect(page.locator(".list .notice")).to_contain_text("broken4.jsonl, …")
        for path in broken:
            path.unlink()
        await expect(page.locator(".list .notice")).to_be_hidden()


async def test_a_run_with_any_id_is_opened_from_the_list(browser: Any) -> None:
    store = MemoryStore()
    names = ["job/items", "job/events", ".", "..", "\n", "日本/é"]
    agent = Agent(ScriptedStream(["Yes."], at_end="repeat"), run_log=RunLog(store))
    for name in names:
        await agent.run(f"Task {name!r}.", identity=RunIdentity.root(name))
    async with site(store) as served, opened(browser, served) as page:
        for name in names:
            await page.get_by_role("link", name=f"Task {name!r}.", exact=True).click()
            await expect(turn(page, 1)).to_contain_text("Yes.")
            await turn(page, 1).get_by_role("button", name="What the model saw").click()
            await expect(turn(page, 1).locator(".request")).to_contain_text(f"Task {name!r}.")
            await page.keyboard.press("Escape")
            await expect(page.locator(".run-row")).to_have_count(len(names))


async def test_a_list_of_many_runs_is_loaded_as_one_scrolls(browser: Any) -> None:
    store = MemoryStore()
    agent = Agent(ScriptedStream(["Yes."], at_end="repeat"), run_log=RunLog(store))
    for number in range(250):
        await agent.run(f"Question {number}", identity=RunIdentity.root(f"{number:03}"))
    async with site(store) as served, opened(browser, served) as page:
        rows = page.locator(".run-row")
        await expect(page.locator(".count")).to_contain_text("250 runs")
        await expect(rows).to_have_count(100)
        for count in (200, 250):
            await page.mouse.wheel(0, 100_000)
            await expect(rows).to_have_count(count)
        await expect(rows.last).to_contain_text("Question 0")
        await shot(page, "list", full_page=False)


# --- one run --------------------------------------------------------------------------------------


async def test_a_run_is_a_timeline_of_everything_that_happened(
    browser: Any, tmp_path: Path
) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    await run_fix(store, tmp_path)
    async with site(store) as served, opened(browser, served, "#/run/fix") as page:
        head = page.locator(".run-head")
        await expect(head).to_contain_text("4 turns")
        await expect(head).to_contain_text("claude-sonnet-4-5")
        await expect(head.get_by_role("img", name="Tokens:")).to_have_attribute(
            "aria-label", re.compile("18,100 from the cache, 5,470 input, 900 output")
        )
        outline = page.get_by_role("navigation", name="Turns")
        await expect(outline.get_by_role("link")).to_have_count(4)
        await expect(outline.get_by_label("request edited by tool_result_budget")).to_be_visible()

        start, first, second, third, fourth = [turn(page, number) for number in range(5)]
        await expect(start).to_contain_text(TASK)
        await expect(start).to_contain_text("Plugins: guard, tool_result_budget")
        await expect(first).to_contain_text("message 1 accepted (after batch)")
        thought = first.locator(".thought")
        await expect(thought).not_to_contain_text("Where is it added?")
        await thought.locator("summary").click()
        await expect(thought).to_contain_text("Where is it added?")
        await expect(first.locator(".call .name")).to_have_text(["read_file", "run_tests"])
        await expect(first.locator(".call").nth(1)).to_contain_text("1 of 12 tests failed.")

        await expect(second.locator(".steering")).to_contain_text("Keep the signature")
        await expect(second.locator(".discarded")).to_contain_text("discarded: truncated")
        await expect(second).to_contain_text("asked again: attempt 2")
        edit, rewritten, blocked = [second.locator(".call").nth(n) for n in range(3)]
        await expect(edit.locator("pre.diff del")).to_have_count(4)
        await expect(edit.locator("pre.diff ins")).to_have_text(
            ["+    return sum(round(100 * price) for price in prices) / 100"]
        )
        await expect(rewritten).to_contain_text("guard: rewrite")
        await expect(rewritten).to_contain_text("build/cache.txt")
        await expect(blocked).to_have_class(re.compile("error"))
        await expect(blocked).to_contain_text("guard: block")

        # A child run is loaded when it is unfolded.
        child = third.locator("details.child")
        await expect(child).to_contain_text("Child run · reviewer")
        await expect(child.locator("section.turn")).to_have_count(0)
        await child.locator("summary").first.click()
        await expect(child).to_contain_text("Add a test for 19.99 × 3.")
        await expect(child.locator(".call .name")).to_have_text(["run_tests"])
        image = third.get_by_role("img", name="A chart of orders")
        await image.scroll_into_view_if_needed()
        await expect(image).to_have_js_property("naturalWidth", 240)

        await expect(fourth.get_by_role("heading", name="What was wrong")).to_be_visible()
        await expect(fourth.locator(".markdown table")).to_contain_text("0.30 €")
        await expect(fourth).to_contain_text("The run ended: done")

        # Keys: the next turn, all calls folded, and back.
        await page.keyboard.press("g")
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        await expect(outline.locator("[aria-current]")).to_have_attribute("data-turn", "2")
        assert page.url.endswith("#/run/fix/turn/2")
        await page.keyboard.press("e")
        await expect(page.locator("details.call[open]")).to_have_count(0)
        await shot(page, "run")
        await page.keyboard.press("Escape")
        await expect(page.locator(".run-row")).to_have_count(1)
    store.close()


async def test_an_address_of_a_turn_that_is_not_there_says_so(browser: Any, tmp_path: Path) -> None:
    store = MemoryStore()
    await some_runs(store)
    file = tmp_path / "run.html"
    with file.open("w", encoding="utf-8") as out:
        write_run(store, "kettle", out)
    async with site(store) as served:
        for where, words in ((served, "This run has no turn"), (file, "This file has no turn")):
            async with opened(browser, where, "#/run/kettle/turn/7") as page:
                notice = page.locator(".notice:visible")
                await expect(notice).to_have_text(f"{words} 7.")
                await expect(turn(page, 1)).to_contain_text("A kettle.")
                base = page.url.partition("#")[0]
                await page.goto(f"{base}#/run/kettle/turn/1")
                await expect(notice).to_have_count(0)
                await page.goto(f"{base}#/run/kettle/turn/9/request")
                await expect(notice).to_have_text(f"{words} 9.")
                await expect(notice).to_be_in_viewport()
                await expect(turn(page, 1)).to_contain_text("A kettle.")
                not_found = [note for note in page.problems if "404" in note]
                assert page.problems == not_found, page.problems
                page.problems.clear()


async def test_what_the_model_saw_and_what_changed(browser: Any, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    await run_fix(store, tmp_path)
    place = "#/run/fix/turn/3/request"
    async with site(store) as served, opened(browser, served, place) as page:
        panel = turn(page, 3).locator(".request")
        await expect(panel).to_contain_text("The cached prefix breaks at message 2.")
        await expect(panel).to_contain_text("Changed by plugin tool_result_budget")
        changed = panel.get_by_role("region", name="What changed")
        await expect(changed.locator("ins").filter(has_text="characters left out")).to_have_count(2)
        await expect(changed.locator("del").filter(has_text="result = 0.0")).to_be_visible()
        rows = panel.locator(".message-row")
        await expect(panel.get_by_role("heading", name="9 messages, 7 new")).to_be_visible()
        await panel.get_by_role("button", name="Show 2 messages before").click()
        await expect(panel.locator(".message-row.kept")).to_have_count(2)
        await expect(rows.first).to_contain_text(TASK)
        await panel.get_by_text("System prompt", exact=True).click()
        await expect(panel).to_contain_text("You mend the code of a shop.")
        await panel.get_by_text("10 tools", exact=True).click()
        await panel.get_by_text("run_tests", exact=True).last.click()
        await expect(panel).to_contain_text('"required"')
        await shot(page, "request", full_page=False)

        # The request before, by key; both attempts of it.
        await page.keyboard.press("k")
        await page.keyboard.press("r")
        panel = turn(page, 2).locator(".request")
        await expect(panel).to_contain_text("Nothing that was sent before has changed")
        await panel.get_by_role("button", name="Attempt 1").click()
        await expect(panel.get_by_role("button", name="Attempt 1")).to_have_attribute(
            "aria-pressed", "true"
        )
    store.close()


async def test_long_texts_are_cut_and_shown_whole_on_demand(browser: Any) -> None:
    store = MemoryStore()
    text = "\n".join(f"line {number} 𝄞" for number in range(3_000))
    agent = Agent(ScriptedStream([call("chart", what=text), text]), tools=[chart])
    agent = agent.replace(run_log=RunLog(store))
    await agent.run("go", identity=RunIdentity.root("long"))
    async with site(store) as served, opened(browser, served, "#/run/long") as page:
        await expect(turn(page, 2)).to_be_visible()
        assert "line 2999" not in await page.locator("main").inner_text()
        await turn(page, 2).get_by_role("button", name="Show all").click()
        await expect(turn(page, 2)).to_contain_text("line 2999 𝄞")
        assert (await turn(page, 2).locator(".markdown").inner_text()).strip() == text


async def test_a_long_run_is_loaded_in_pages_and_dropped_again(browser: Any) -> None:
    store = MemoryStore()
    script = [call("run_tests", path=f"tests/{number}") for number in range(240)]
    agent = Agent(ScriptedStream([*script, "Done."]), tools=[run_tests], max_iterations=None)
    await agent.replace(run_log=RunLog(store)).run("go", identity=RunIdentity.root("long"))
    async with site(store) as served, opened(browser, served, "#/run/long/turn/200") as page:
        await expect(turn(page, 200)).to_be_in_viewport()
        await expect(turn(page, 200).locator(".args")).to_have_text("path='tests/199'")
        await expect(turn(page, 1)).to_have_count(0)

        # Backwards, without what one sees moving away; what is far below is dropped.
        while await turn(page, 20).count() == 0:
            await page.mouse.wheel(0, -30_000)
            await page.evaluate("() => new Promise(done => setTimeout(done, 20))")
        await expect(turn(page, 240)).to_have_count(0)
        assert await page.locator("section.turn").count() < 220

        await page.get_by_role("button", name="↓ End").click()
        await expect(turn(page, 241)).to_be_in_viewport()
        await expect(page.get_by_text("The run ended: done")).to_be_visible()
        numbers = await page.locator("section.turn").evaluate_all(
            "turns => turns.map(turn => Number(turn.dataset.turn))"
        )
        assert numbers == list(range(numbers[0], 242))


async def test_a_log_of_200_megabytes_opens_like_a_small_one(browser: Any, tmp_path: Path) -> None:
    @tool(reads_only=True)
    def read(part: int) -> str:
        """Read a part of a file."""
        return f"part {part}\n" + "All the words of a very long file. " * 5_000

    def next_part(request: StreamRequest) -> Any:
        return call("read", part=len(request.messages) // 2)

    store = JsonlStore(tmp_path)
    agent = Agent(
        ScriptedStream([next_part], at_end="repeat"),
        tools=[read],
        max_iterations=1_200,
        max_result_chars=None,
        grace_iterations=0,
        run_log=RunLog(store),
    )
    await agent.run("Read all of it.", identity=RunIdentity.root("large"))
    assert (tmp_path / "large.jsonl").stat().st_size > 200_000_000
    async with site(store) as served, opened(browser, served, "#/run/large") as page:
        await expect(turn(page, 1).locator(".call .args")).to_have_text("part=0")
        await page.get_by_role("button", name="↓ End").click()
        await expect(page.get_by_text("The run ended: hit max iterations")).to_be_visible()
        await expect(page.locator(".facts")).to_contain_text("1,200 turns")
        await expect(turn(page, 1_200).locator(".call .args")).to_have_text("part=1199")
        await page.goto(f"{page.url.partition('#')[0]}#/run/large/turn/500")
        await expect(turn(page, 500)).to_be_in_viewport()
        await turn(page, 500).get_by_role("button", name="Show all").click()
        await expect(turn(page, 500).locator(".printed")).to_have_js_property(
            "textContent.length", 175_009
        )
        sizes = "() => performance.getEntriesByType('resource').map(each => each.transferSize)"
        assert sum(await page.evaluate(sizes)) < 10_000_000


# --- live -----------------------------------------------------------------------------------------


def live_agent(store: Any, model: LiveModel) -> Agent[str, None]:
    log = RunLog(store, live=True, mail_every=0.05)
    return Agent(model, tools=[run_tests], run_log=log, model_id="live-model")


async def test_a_run_is_followed_steered_and_stopped(browser: Any, tmp_path: Path) -> None:
    store, model = SqliteStore(tmp_path / "runs.db"), LiveModel()
    agent = live_agent(store, model)
    async with site(store, can_write=True, by="ada") as served:
        run = asyncio.create_task(agent.run("Watch me.", identity=RunIdentity.root("live")))
        model.said.put_nowait("I look ")
        await model.asked.wait()
        async with opened(browser, served, "#/run/live") as page:
            await expect(page.locator(".run-head .status")).to_have_text("running")
            await expect(page.locator("#connection")).to_have_attribute("data-state", "open")
            draft = page.locator(".draft")
            model.said.put_nowait("at **it** ")
            await expect(draft).to_contain_text("at **it** ")
            model.said.put_nowait("<b>now</b>.")
            await expect(draft).to_contain_text("<b>now</b>.")
            await shot(page, "live", full_page=False)

            # The draft becomes the answer when it is complete.
            model.said.put_nowait([call("run_tests", path="tests")])
            await expect(turn(page, 1).locator(".markdown").first).to_have_text(
                "I look at it <b>now</b>."
            )
            await expect(turn(page, 1).locator(".call.ok .name")).to_have_text("run_tests")
            await expect(page.get_by_role("navigation", name="Turns")).to_contain_text("run_tests")

            # A message goes to the model with the next turn.
            await page.keyboard.press("s")
            await page.keyboard.type("Only <i>three</i>, please.")
            await page.get_by_label("Deliver").select_option("before_next_tool")
            await page.get_by_role("button", name="Send").click()
            await expect(page.get_by_label("Message to the run")).to_have_value("")
            await expect(turn(page, 2)).to_contain_text("message 1 accepted (before next tool)")
            model.said.put_nowait([call("run_tests", path="tests/three")])
            await expect(turn(page, 3).locator(".steering")).to_contain_text(
                "Only <i>three</i>, please."
            )

            await page.get_by_role("button", name="■ Stop").click()
            await expect(page.locator(".run-head .status")).to_have_text("failed")
            await expect(turn(page, 3)).to_contain_text("cancelled from outside")
            await expect(page.locator(".draft, form.steer")).to_have_count(0)
        with pytest.raises(LoopError):
            await run
    store.close()


async def test_a_long_run_that_waited_is_followed_when_it_goes_on(browser: Any) -> None:
    store = MemoryStore()
    looks = [call("run_tests", path=f"tests/{number}") for number in range(60)]
    body: dict[str, Any] = {"order": 7, "amount": 1.0, "reason": "broken"}
    script: list[Any] = [*looks, call("refund", **body), *looks[:9], "Over."]

    def next_step(request: StreamRequest) -> Any:
        step = script[(len(request.messages) - 1) // 2]
        return answer(step) if isinstance(step, str) else answer("", step)

    agent = Agent(
        ScriptedStream([next_step], at_end="repeat"),
        tools=[run_tests, refund],
        plugins=[ApprovalGate(SUSPEND)],
        run_log=RunLog(store),
        max_iterations=None,
    )
    await agent.run("Go.", identity=RunIdentity.root("long"))
    async with (
        site(store, can_write=True, agent=agent) as served,
        opened(browser, served, "#/run/long") as page,
    ):
        outline = page.get_by_role("navigation", name="Turns")
        await expect(outline.get_by_role("link")).to_have_count(61)
        await expect(turn(page, 1)).to_be_in_viewport()
        await expect(turn(page, 61)).to_have_count(0)
        await expect(page.get_by_role("button", name="Follow it")).to_have_count(0)
        (request,) = (await served.get("waiting"))["waiting"]
        body = {"request_id": request["request_id"], "decision": "allow"}
        await served.post("decide", body, run="long")

        # The overview grows, what one reads stays, and the page offers the end.
        await expect(outline.get_by_role("link")).to_have_count(71)
        await expect(page.locator(".run-head .status")).to_have_text("done")
        await expect(turn(page, 1)).to_be_in_viewport()
        await page.get_by_role("button", name="Follow it").click()
        await expect(turn(page, 71)).to_be_in_viewport()
        await expect(turn(page, 71)).to_contain_text("Over.")
        await expect(page.get_by_role("button", name="Follow it")).to_have_count(0)


class Wire:
    """A connection to a site that can be cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open: list[asyncio.StreamWriter] = []
        self.is_cut = False

    @asynccontextmanager
    async def laid(self) -> AsyncGenerator[int]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]
            self.cut()

    def cut(self) -> None:
        self.is_cut = True
        for writer in self._open:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_cut:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._open += [writer, back]
        await asyncio.gather(_copy(reader, back), _copy(there, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_a_page_that_was_cut_off_connects_again(browser: Any, tmp_path: Path) -> None:
    store, model = SqliteStore(tmp_path / "runs.db"), LiveModel()
    agent = live_agent(store, model)
    run = asyncio.create_task(agent.run("Watch me.", identity=RunIdentity.root("live")))
    await model.asked.wait()
    async with site(store) as served:
        wire = Wire(served.port)
        async with wire.laid() as port, opened(browser, port, "#/run/live") as page:
            await expect(page.locator("#connection")).to_have_attribute("data-state", "open")
            wire.cut()
            await expect(page.locator("#connection")).to_have_text("reconnecting …")
            model.said.put_nowait([call("run_tests", path="tests")])
            model.said.put_nowait("All is well.")
            model.said.put_nowait(None)
            assert (await run).text == "All is well."
            assert await turn(page, 2).count() == 0
            wire.is_cut = False
            await expect(turn(page, 2)).to_contain_text("All is well.")
            await expect(turn(page, 1).locator(".call")).to_have_count(1)
            await expect(page.locator(".run-head .status")).to_have_text("done")
            await expect(page.locator("#connection")).to_be_empty()
            page.problems = [text for text in page.problems if "net::ERR" not in text]
    store.close()


async def test_a_page_of_a_server_that_was_started_again_says_what_to_do(browser: Any) -> None:
    store, model = MemoryStore(), LiveModel()
    agent = live_agent(store, model)
    run = asyncio.create_task(agent.run("Watch me.", identity=RunIdentity.root("live")))
    await model.asked.wait()
    async with site(store) as served:
        wire = Wire(served.port)
        async with wire.laid() as port, opened(browser, port, "#/run/live") as page:
            await expect(page.locator("#connection")).to_have_attribute("data-state", "open")
            wire.cut()
            await expect(page.locator("#connection")).to_have_text("reconnecting …")
            await page.context.clear_cookies()  # a new server does not know the old ones
            wire.is_cut = False
            words = "The server was started again: open the address that it printed."
            await expect(page.locator("#connection")).to_have_text(words)
            page.problems = []
    model.said.put_nowait(None)
    await run


async def test_a_request_is_approved_changed_or_answered(browser: Any, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    agent = refunding(store)
    for name in ("allowed", "changed", "denied", "answered"):
        await agent.run("The kettle broke.", identity=RunIdentity.root(name))
    async with site(store, can_write=True, agent=agent, by="ada") as served:
        async with opened(browser, served, "#/waiting") as page:
            await expect(page.locator("article.waiting-card")).to_have_count(4)
            await expect(page.get_by_role("heading", level=1)).to_have_text("Waiting")
        async with opened(browser, served, "#/run/allowed") as page:
            card = page.get_by_role("article", name="refund waits")
            await expect(card).to_contain_text("approval_gate asks · for support")
            await expect(card.locator("dd")).to_have_text(["7", "120", "arrived broken"])
            await shot(page, "waiting", full_page=False)
            await card.get_by_role("button", name="Allow").click()
            await expect(turn(page, 2)).to_contain_text("Done: refunded 120 € for order 7")
            await expect(turn(page, 1)).to_contain_text("allowed by ada")
            await expect(card).to_have_count(0)

            await page.goto(f"{page.url.partition('#')[0]}#/run/changed")
            await card.get_by_role("button", name="Change …").click()
            text = card.get_by_label("Arguments, as JSON")
            await text.fill("{not JSON")
            again = card.get_by_role("button", name="Allow with these")
            await again.click()
            await expect(card.get_by_role("alert")).to_have_text("These arguments are not JSON.")
            await text.fill('{"order": 7, "amount": 60, "reason": "half"}')
            await again.click()
            await expect(turn(page, 2)).to_contain_text("Done: refunded 60 € for order 7: half")

            await page.goto(f"{page.url.partition('#')[0]}#/run/denied")
            await card.get_by_role("button", name="Deny …").click()
            await card.get_by_label("Reason, for the model").fill("Not before Friday.")
            await card.get_by_role("button", name="Deny", exact=True).click()
            await expect(turn(page, 2)).to_contain_text("Not before Friday.")

            await page.goto(f"{page.url.partition('#')[0]}#/run/answered")
            await card.get_by_role("button", name="Give result …").click()
            await card.get_by_label("Result, for the model").fill("Paid in cash.")
            await card.get_by_role("button", name="Give this result").click()
            await expect(turn(page, 2)).to_contain_text("Done: Paid in cash.")
            await page.goto(f"{page.url.partition('#')[0]}#/waiting")
            await expect(page.get_by_text("Nothing is waiting.")).to_be_visible()
    store.close()


async def test_a_page_that_may_only_read_has_no_buttons_to_act(
    browser: Any, tmp_path: Path
) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    await refunding(store).run("The kettle broke.", identity=RunIdentity.root("waits"))
    async with site(store) as served, opened(browser, served, "#/run/waits") as page:
        card = page.get_by_role("article", name="refund waits")
        await expect(card).to_contain_text("start it with --write")
        await expect(page.get_by_role("button")).to_have_text(
            ["◐", "?", "Compare …", "Copy link", "↑ Start", "↓ End", "Request"]
        )
        assert await page.locator("form").count() == 0
    store.close()


# --- forks, comparisons, replays ------------------------------------------------------------------


async def test_a_fork_beside_its_origin_and_a_replay(browser: Any, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    script: list[Any] = [
        call("run_tests", path="tests"),
        "Three tests fail.",
        "All tests pass now.",
    ]
    agent = Agent(ScriptedStream(script), tools=[run_tests], name="tester")
    await agent.replace(run_log=RunLog(store)).run("Test it.", identity=RunIdentity.root("first"))
    async with (
        site(store, can_write=True, agent=agent) as served,
        opened(browser, served, "#/run/first") as page,
    ):
        await page.get_by_role("button", name="Fork after turn 1").click()
        dialog = page.get_by_role("dialog", name="Fork after turn 1")
        await dialog.get_by_label("What to say next").fill("Look again.")
        await dialog.get_by_role("button", name="Fork").click()
        await expect(turn(page, 1)).to_contain_text("All tests pass now.")
        await expect(page.get_by_role("link", name="forked from turn 1")).to_be_visible()
        await expect(turn(page, 0)).to_contain_text("Look again.")
        assert "first" not in page.url

        await page.get_by_role("link", name="Side by side").click()
        await expect(page.get_by_text("The first 3 messages are the same.")).to_be_visible()
        sides = page.locator(".sides section")
        await expect(page.locator(".sides .is-different").first).to_contain_text(
            "Three tests fail."
        )
        await expect(sides.filter(has_text="Look again.")).to_have_count(1)
        await expect(page.locator(".place-missing")).to_have_count(1)
        await page.get_by_role("button", name="Show them from the beginning").click()
        await expect(sides.first).to_contain_text("Test it.")
        await shot(page, "side-by-side")

        await page.goto(f"{page.url.partition('#')[0]}#/run/first")
        await expect(page.get_by_role("link", name="fork 1")).to_be_visible()
        await page.get_by_role("button", name="Replay").click()
        replayed = page.get_by_role("dialog", name="Replay")
        await expect(replayed).to_contain_text("identical")

    # Agents that do not fit.
    @tool
    def run_other_tests(path: str) -> str:
        """Run other tests."""
        return path

    @tool(name="run_tests")
    def run_some_tests(path: str, most: int) -> str:
        """Run some tests."""
        return path[:most]

    for tools, words in (
        ([], "The agent of this server has no tools."),
        ([run_other_tests], "The agent of this server has no tool run_tests."),
        ([run_tests, run_other_tests], "The agent of the run has no tool run_other_tests."),
        ([run_some_tests], "The agent of this server has another declaration of the tool run_test"),
    ):
        async with (
            site(store, can_write=True, agent=agent.replace(tools=tools)) as served,
            opened(browser, served, "#/run/first") as page,
        ):
            await page.get_by_role("button", name="Replay").click()
            replayed = page.get_by_role("dialog", name="Replay")
            await expect(replayed).to_contain_text(words)
            is_other = "another" in words
            await expect(replayed.locator(".part")).to_have_count(2 if is_other else 1)
            await expect(replayed).not_to_contain_text("null")
            await expect(replayed.get_by_role("link", name="Start")).to_be_visible()
    store.close()


# --- hostile texts --------------------------------------------------------------------------------

ELEMENTS_OF_PAGE = {
    *("a", "article", "b", "bdi", "blockquote", "br", "button", "code", "dd", "del", "details"),
    *("dialog", "div", "dl", "dt", "em", "figcaption", "figure", "form", "h1", "h2", "h3", "h4"),
    *("h5", "h6", "header", "hr", "img", "input", "ins", "label", "li", "main", "nav", "noscript"),
    *("ol", "option", "p", "pre", "script", "section", "select", "span", "strong", "summary"),
    *("table", "tbody", "td", "textarea", "th", "thead", "time", "tr", "ul"),
}
INNOCENT = """() => {
    const all = [...document.body.querySelectorAll('*')];
    return {
        names: [...new Set(all.map(each => each.localName))],
        handlers: all.flatMap(each => each.getAttributeNames())
            .filter(name => name.startsWith('on')),
        addresses: all.flatMap(each => [each.getAttribute('href'), each.getAttribute('src')])
            .filter(address => address !== null)
            .map(address => new URL(address, document.baseURI).protocol),
        scripts: document.scripts.length,
    };
}"""


async def check_innocent(page: Any, scripts: int, origin: str) -> None:
    """Unfold everything, and check that nothing came from the texts but text."""
    for _ in range(3):
        await page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true })")
        await page.evaluate("() => new Promise(done => requestAnimationFrame(() => done()))")
    await page.wait_for_load_state("networkidle")
    found = await page.evaluate(INNOCENT)
    assert set(found["names"]) <= ELEMENTS_OF_PAGE
    assert found["handlers"] == []
    assert set(found["addresses"]) <= {"http:", "https:", "file:", "data:"}
    assert found["scripts"] == scripts
    assert [url for url in page.requested if not url.startswith((origin, "data:"))] == []
    assert page.problems == []


@pytest.mark.parametrize("run_id", ["evil", EVIL, "../../evil?x=1#/run/y"])
async def test_nothing_from_a_log_becomes_an_element(
    browser: Any, tmp_path: Path, run_id: str
) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    await run_evil(store, run_id)
    await run_evil_failure(store, f"failed {run_id}")
    async with site(store, can_write=True, where=EVIL, by=EVIL) as served:
        origin = f"http://127.0.0.1:{served.port}/"
        async with opened(browser, served) as page:
            await expect(page.locator(".run-row")).to_have_count(2)
            await check_innocent(page, 1, origin)
            await page.get_by_label("Search runs").fill("alert")
            await expect(page.locator(".run-row")).to_have_count(2)
            await check_innocent(page, 1, origin)
            await page.locator(".run-row a").last.click()
            await expect(turn(page, 2)).to_contain_text(EVIL)
            await expect(turn(page, 1).locator(".call")).to_have_count(3)
            await check_innocent(page, 1, origin)
            await turn(page, 1).get_by_role("button", name="saw").click()
            await expect(turn(page, 1).locator(".request h3").first).to_be_visible()
            await check_innocent(page, 1, origin)

            # Links that look like others do not lead there.
            links = await page.locator("main a").evaluate_all("all => all.map(each => each.href)")
            out = {link for link in links if not link.startswith(origin)}
            assert out <= {
                "https://evil.example/",
                "https://evil.example/pixel.png",
                "https://evil.example/%22",
            }
            await page.keyboard.press("Escape")
            await page.locator(".run-row a").first.click()
            await expect(page.locator(".run-head .failure")).to_contain_text(EVIL)
            await expect(page.locator(".step.failed")).to_contain_text(EVIL)
            await check_innocent(page, 1, origin)
    store.close()


async def test_a_call_that_waits_hides_nothing(browser: Any) -> None:
    store = MemoryStore()
    command = "ls \u202e/emoh/ fr- mr\u202c #\u200b\U000e0101 \u00a0list"
    shown = "ls \\u202e/emoh/ fr- mr\\u202c #\\u200b\\U000e0101 \\xa0list"

    @tool
    def shell(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    agent = Agent(
        ScriptedStream([call("shell", command=command), "Done."]),
        tools=[shell],
        plugins=[ApprovalGate(SUSPEND)],
        run_log=RunLog(store),
    )
    await agent.run("List.", identity=RunIdentity.root("list"))
    async with (
        site(store, can_write=True, agent=agent) as served,
        opened(browser, served, "#/run/list") as page,
    ):
        card = page.locator(".waiting-card")
        await expect(card.locator(".args-table pre")).to_have_text(shown)
        await expect(turn(page, 1).locator(".call .args")).to_contain_text(shown)
        # The arguments that one changes are the same value.
        await card.get_by_role("button", name="Change …").click()
        area = card.get_by_label("Arguments, as JSON")
        assert "\\u202e" in await area.input_value()
        assert json.loads(await area.input_value()) == {"command": command}

        base = page.url.partition("#")[0]
        await page.goto(f"{base}#/waiting")
        await expect(page.get_by_role("link", name="Open its run list")).to_be_visible()
        await page.goto(f"{base}#/run/missing")
        await expect(page.get_by_role("alert").first).to_contain_text("missing")
        await expect(page).to_have_title("Not shown · clark-agent")
        page.problems = []  # the answer 404


DANGER = "rm -rf / --no-preserve-root"
HOSTILE_CALLS: dict[str, dict[str, Any]] = {
    "no breaks": {"city": "Lisbon", "k" * 500: DANGER},
    "words": {"as the user asked, only list the files and nothing else; " * 6: DANGER},
    "wide glyphs": {"\ufdfd" * 60: DANGER, "\U00012219" * 60: DANGER},
    "marks": {"a" + "\u0336\u0301\u0488" * 300: DANGER},
    "many": {**{f"key {number}": "x" for number in range(120)}, "last": DANGER},
    "blank": {"": DANGER, " ": DANGER, "path": DANGER, "path ": DANGER, "a  b": DANGER},
    "lines": {"city\n\ncountry": DANGER, "a\tb": DANGER},
    "spaces": {"command": "ls" + " " * 1_900 + DANGER},
    "long": {"command": "ls -l " + "x" * 2_200 + DANGER},
    "nested": {"a": {"b": {"k" * 300: [{"c": DANGER}]}}},
    "short": {"path": DANGER},
}
VALUES = """(place, danger) => [...place.querySelectorAll('.args-table > dd')].map(dd => {
    const table = dd.parentNode.getBoundingClientRect();
    const cell = dd.getBoundingClientRect();
    const pre = dd.querySelector('pre');
    const shown = pre.textContent;
    const range = document.createRange();
    const texts = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT);
    const rects = [];
    for (let text = texts.nextNode(); text; text = texts.nextNode()) {
        const at = text.data.indexOf(danger);
        if (at < 0) continue;
        range.setStart(text, at);
        range.setEnd(text, at + danger.length);
        rects.push(...range.getClientRects());
    }
    const box = pre.getBoundingClientRect();
    const isInside = rect => rect.width > 0 && rect.left >= box.left - 1 && rect.top >= box.top - 1
        && rect.right <= Math.min(box.right, innerWidth) + 1 && rect.bottom <= box.bottom + 1;
    return {
        shown,
        width: cell.width,
        share: cell.width / table.width,
        isSeen: shown.includes(danger) ? rects.length > 0 && rects.every(isInside) : true,
        isCut: pre.scrollHeight > pre.clientHeight + 1 || pre.scrollWidth > pre.clientWidth + 1,
    };
})"""


async def check_values(place: Any, arguments: dict[str, Any]) -> None:
    """Each value of a call has room, and the dangerous ones are seen whole."""
    found = await place.evaluate(f"place => ({VALUES})(place, {DANGER!r})")
    assert len(found) == len(arguments)
    for value in found:
        assert value["width"] > 120, value
        assert value["share"] > 0.5, value
        assert value["isSeen"], value
        assert not value["isCut"], value
    assert sum(DANGER in value["shown"] for value in found) == str(arguments).count(DANGER)


ANY_ARGUMENTS: dict[str, Any] = {"type": "object", "additionalProperties": True}


class Anything(AgentTool):
    """A tool that takes any arguments."""

    name = "act"
    description = "Do it."
    parameters_schema = ANY_ARGUMENTS

    async def execute(self, args: Any, ctx: ToolContext) -> ToolResult:
        return ToolResult.text("done")


async def ask_to_act(store: Any, run_id: str, arguments: dict[str, Any]) -> None:
    """A run that waits with a call."""
    model = ScriptedStream([answer("", ToolCall("1", "act", arguments))])
    plugins = [ApprovalGate(SUSPEND)]
    agent = Agent(model, tools=[Anything()], plugins=plugins, run_log=RunLog(store))
    await agent.run("Do it.", identity=RunIdentity.root(run_id))


@pytest.mark.parametrize("width", [1280, 400])
async def test_every_argument_that_is_approved_is_seen(
    browser: Any, tmp_path: Path, width: int
) -> None:
    store = MemoryStore()
    for run_id, arguments in HOSTILE_CALLS.items():
        await ask_to_act(store, run_id, arguments)
    viewport: dict[str, Any] = {"viewport": {"width": width, "height": 900}}
    async with (
        site(store, can_write=True) as served,
        opened(browser, served, "#/waiting", **viewport) as page,
    ):
        for run_id, arguments in HOSTILE_CALLS.items():
            link = page.get_by_role("link", name=f"Open its run {run_id}", exact=True)
            card = page.locator(".waiting-card", has=link)
            await expect(card).to_be_visible()
            await check_values(card, arguments)
        keys = page.locator(".waiting-card", has=page.get_by_text('""', exact=True)).locator("dt")
        await expect(keys).to_have_text(['""', '" "', "path", '"path "', "a  b"])
        await shot(page, f"hostile-{width}")

        for run_id, arguments in HOSTILE_CALLS.items():
            await page.goto(f"{page.url.partition('#')[0]}#/run/{run_id}")
            steps = turn(page, 1).locator(".call")
            await expect(turn(page, 1).locator(".decision")).to_contain_text("waits for permission")
            if run_id == "short":  # its line has all of it
                line = steps.locator(".args")
                await expect(line).to_have_text(f"path={DANGER!r}")
                assert await line.evaluate("line => line.scrollWidth <= line.clientWidth")
            else:
                await check_values(steps, arguments)
    for run_id in ("no breaks", "words", "nested"):
        file = StringIO()
        write_run(store, run_id, file)
        (tmp_path / "run.html").write_text(file.getvalue(), "utf-8")
        async with opened(browser, tmp_path / "run.html", **viewport) as page:
            await expect(turn(page, 1)).to_be_visible()
            await check_values(turn(page, 1).locator(".call"), HOSTILE_CALLS[run_id])


async def test_a_long_argument_is_cut_with_a_sign_and_can_be_read_to_its_end(browser: Any) -> None:
    store = MemoryStore()
    await ask_to_act(store, "far", {"command": "ls\n" * 5_000 + DANGER})
    await ask_to_act(store, "many", {f"key {number}": "x" for number in range(900)})
    async with (
        site(store, can_write=True) as served,
        opened(browser, served, "#/waiting") as page,
    ):
        for run_id, last in (("far", DANGER), ("many", "key 899")):
            link = page.get_by_role("link", name=f"Open its run {run_id}")
            card = page.locator(".waiting-card", has=link)
            await expect(card).not_to_contain_text(last)
            given = card.locator(".part", has=page.get_by_text("Arguments", exact=True))
            await given.get_by_role("button", name=re.compile(r"^Show all [\d,]+ char")).click()
            await expect(given).to_contain_text(last)
            assert await given.locator("pre").evaluate("e => e.scrollHeight <= e.clientHeight")
            await expect(card.get_by_role("button", name="Change …")).to_have_count(0)


async def test_words_from_right_to_left_move_nothing(browser: Any) -> None:
    store = MemoryStore()
    text = "pay \u05d0\u05d1 \u05d2 12 to 34/56"
    await ask_to_act(store, "bidi", {"text": text, "\u05d0 1 2": "x"})
    async with site(store, can_write=True) as served, opened(browser, served, "#/waiting") as page:
        value = page.locator(".args-table pre").first
        await expect(value).to_have_text(text)
        lefts = await value.evaluate(
            """pre => {
                const texts = document.createTreeWalker(pre, NodeFilter.SHOW_TEXT);
                const found = [];
                for (let text = texts.nextNode(); text; text = texts.nextNode()) {
                    for (const { 0: word, index } of text.data.matchAll(/[a-z0-9]+/g)) {
                        const range = document.createRange();
                        range.setStart(text, index);
                        range.setEnd(text, index + word.length);
                        found.push(range.getBoundingClientRect().left);
                    }
                }
                return found;
            }"""
        )
        assert lefts == sorted(lefts)
        assert len(lefts) == 5
        await expect(page.locator(".args-table dt bdi")).to_have_text("\u05d0")


# --- beside the turns -----------------------------------------------------------------------------


async def check_audit(page: Any) -> None:
    """What a page and a file show of models that plugins ask, and of compactions."""
    asked = turn(page, 1).locator(".consulted")
    await expect(asked).to_contain_text("adviser asked gpt-5-mini")
    await expect(asked).to_contain_text("1.5 s · 200 in · 10 out")
    await asked.get_by_text("Answer", exact=False).first.click()
    await expect(asked.locator(".markdown em")).to_have_text("night")
    await expect(turn(page, 1)).to_contain_text("Advice: Look at the")
    failed = turn(page, 2).locator(".consulted .failure")
    await expect(failed).to_contain_text("the transport raised ConnectionError: no route to")

    compaction = page.locator("details.compaction").first
    words = re.compile(r"Compaction: turns 1 to \d became a summary, [\d,]+ → [\d,]+ tokens")
    await expect(compaction.locator("summary").first).to_have_text(words)
    await expect(compaction).not_to_contain_text("The pages 1 and 2 are fine.")
    await compaction.locator("summary").click()
    await expect(compaction).to_contain_text("The pages 1 and 2 are fine.")
    outline = page.get_by_role("navigation", name="Turns")
    sign = outline.get_by_label("older turns became a summary before this turn").first
    await expect(sign).to_have_text("⊟")


async def test_what_is_beside_the_turns_is_shown(browser: Any, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    await Audit(store).run()
    async with site(store) as served, opened(browser, served, "#/run/audit") as page:
        await check_audit(page)
        await expect(page.locator(".facts")).to_contain_text("Took 4.7 s")
        await expect(page.locator(".facts")).not_to_contain_text("Worked")

        # The whole result, in pieces.
        result = turn(page, 1).locator(".outcome")
        whole = result.locator("details.kept")
        words = f"The model got a part of this result. All of it: {len(LOG):,} characters"
        await expect(whole.locator("summary")).to_have_text(words)
        await whole.locator("summary").click()
        await expect(whole).to_contain_text("000000 ok the order")
        await expect(whole).not_to_contain_text("009000 failed")
        await whole.get_by_role("button", name=f"Show more of {len(LOG):,} characters").click()
        await expect(whole).to_contain_text("009000 failed")
        await expect(whole).to_contain_text("014999 ok the order")
        assert await whole.locator("pre").text_content() == LOG
        assert sum("/piece" in url for url in page.requested) == 2
        assert await result.get_by_text("before plugins changed it").count() == 0
        await whole.locator("summary").click()
        await shot(page, "aside")

        # The request says who changed the prefix.
        place = page.locator("section.turn", has=page.locator("details.compaction")).first
        await place.get_by_role("button", name="What the model saw").click()
        await expect(place.locator(".request")).to_contain_text("Changed by plugin compaction")
        await shot(page, "aside-request")
    path = tmp_path / "run.html"
    with path.open("w", encoding="utf-8") as file:
        assert write_run(store, "audit", file) == ()
    store.close()
    async with opened(browser, path) as page:
        await check_audit(page)
        whole = turn(page, 1).locator("details.kept")
        await whole.locator("summary").click()
        await whole.get_by_role("button", name="Show").click()
        await expect(whole).to_contain_text("009000 failed")
        await expect(whole).to_contain_text("more characters are not in this file.")
        assert await whole.get_by_role("button").count() == 0


# --- one file -------------------------------------------------------------------------------------


async def test_an_exported_file_opens_without_a_server(browser: Any, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    await run_fix(store, tmp_path)
    path = tmp_path / "run.html"
    with path.open("w", encoding="utf-8") as file:
        assert write_run(store, "fix", file) == ()
    store.close()
    async with opened(browser, path) as page:
        await expect(page.get_by_role("heading", level=1)).to_have_text(TASK)
        await expect(page.locator("section.turn")).to_have_count(5)
        await expect(turn(page, 4).locator(".markdown table")).to_contain_text("0.30 €")
        await turn(page, 3).locator("details.child > summary").click()
        await expect(turn(page, 3).locator("details.child")).to_contain_text("19.99 × 3")
        image = turn(page, 3).get_by_role("img", name="A chart of orders")
        await expect(image).to_have_js_property("naturalWidth", 240)
        await turn(page, 3).get_by_role("button", name="What the model saw in turn 3").click()
        panel = turn(page, 3).locator(".request")
        await expect(panel).to_contain_text("Changed by plugin tool_result_budget")
        await panel.get_by_text("System prompt", exact=True).click()
        await expect(panel).to_contain_text("You mend the code of a shop.")
        assert await page.get_by_role("button", name="Fork").count() == 0
        await shot(page, "file")
        asked = [url for url in page.requested if not url.startswith("data:")]
        assert asked == [f"file://{path}"]


async def test_an_exported_file_contains_no_foreign_scripts(browser: Any, tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    await run_evil(store, EVIL)
    path = tmp_path / "run.html"
    with path.open("w", encoding="utf-8") as file:
        write_run(store, EVIL, file)
    store.close()
    text = path.read_text("utf-8")
    assert text.count("</script>") == 2
    assert "\u2028" not in text
    async with opened(browser, path) as page:
        await expect(turn(page, 2)).to_contain_text(EVIL)
        await check_innocent(page, 2, f"file://{path}")
        await turn(page, 1).get_by_role("button", name="saw").click()
        await check_innocent(page, 2, f"file://{path}")


async def test_an_exported_file_is_bounded_and_says_what_is_missing(
    browser: Any, tmp_path: Path
) -> None:
    store = MemoryStore()
    script = [call("run_tests", path=f"tests/{number}") for number in range(200)]
    agent = Agent(ScriptedStream([*script, "Done."]), tools=[run_tests], max_iterations=None)
    await agent.replace(run_log=RunLog(store)).run("go", identity=RunIdentity.root("long"))
    path = tmp_path / "run.html"
    with path.open("w", encoding="utf-8") as file:
        omitted = write_run(store, "long", file, most_bytes=250_000)
    assert re.match(r"The run long is left out from record \d+ in turn \d+ on: ", omitted[0])
    data = path.read_text("utf-8").partition('id="embedded">')[2].partition("</script>")[0]
    assert len(data) < 260_000
    async with opened(browser, path) as page:
        await expect(page.locator(".notice").first).to_have_text(omitted[0])
        await expect(turn(page, 1)).to_be_visible()
        await page.get_by_role("button", name="↓ End").click()
        await expect(page.locator(".outline a").last).to_have_attribute("aria-current", "true")


# --- looks ----------------------------------------------------------------------------------------

CONTRAST = """() => {
    const pixel = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
    const parse = (colour, under) => {
        pixel.clearRect(0, 0, 1, 1);
        if (under) { pixel.fillStyle = `rgb(${under.join(',')})`; pixel.fillRect(0, 0, 1, 1); }
        pixel.fillStyle = colour;
        pixel.fillRect(0, 0, 1, 1);
        return [...pixel.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const light = colour => colour.map(part => part / 255)
        .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
    const ground = element => {
        const chain = [];
        for (let at = element; at; at = at.parentElement) chain.unshift(at);
        return chain.reduce((under, at) => parse(getComputedStyle(at).backgroundColor, under),
                            [255, 255, 255]);
    };
    const found = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const seen = new Set();
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        const isEmpty = !walker.currentNode.data.trim();
        if (isEmpty || seen.has(element) || !element.checkVisibility()) continue;
        seen.add(element);
        const back = ground(element), front = parse(getComputedStyle(element).color, back);
        const [a, b] = [light(back), light(front)].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        const name = element.className || element.localName;
        if (ratio < 4.5) found.push(`${name}: ${ratio.toFixed(2)}`);
    }
    return [...new Set(found)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_texts_have_enough_contrast_in_both_colours(
    browser: Any, tmp_path: Path, scheme: str
) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    await run_fix(store, tmp_path)
    await refunding(store).run("The kettle broke.", identity=RunIdentity.root("waits"))
    async with site(store, can_write=True, agent=refunding(store)) as served:
        places = {
            "": ".run-row",
            "#/run/fix/turn/3/request": ".request .change",
            "#/run/fix": "section[data-turn='4'] table",
            "#/run/waits": ".waiting-card",
        }
        async with opened(browser, served, color_scheme=scheme, reduced_motion="reduce") as page:
            base = page.url.partition("#")[0]
            for place, there in places.items():
                await page.goto(f"{base}{place or '#/'}")
                await expect(page.locator(there).first).to_be_visible()
                assert await page.evaluate(CONTRAST) == []
            await page.get_by_role("button", name="Keyboard shortcuts").click()
            assert await page.evaluate(CONTRAST) == []
    store.close()


async def test_the_colours_can_be_chosen_and_stay(browser: Any) -> None:
    async with (
        site(MemoryStore()) as served,
        opened(browser, served, color_scheme="light") as page,
    ):
        await expect(page.get_by_text("There are no runs in this store yet.")).to_be_visible()
        ground = "() => getComputedStyle(document.body).backgroundColor"
        light = await page.evaluate(ground)
        await page.keyboard.press("t")
        await page.get_by_role("button", name="Colours: light").click()
        await expect(page.get_by_role("button", name="Colours: dark")).to_be_visible()
        dark = await page.evaluate(ground)
        assert dark != light
        await page.reload()
        await expect(page.get_by_role("button", name="Colours: dark")).to_be_visible()
        assert await page.evaluate(ground) == dark


NAMELESS = """() => [...document.querySelectorAll('a, button, input, select, textarea, img, '
    + 'summary, [role=img], [role=region], nav, section, article')]
    .filter(each => each.checkVisibility())
    .filter(each => {
        const label = each.id && document.querySelector(`label[for="${CSS.escape(each.id)}"]`);
        const name = each.getAttribute('aria-label') || each.alt || label?.textContent
            || each.textContent;
        return !name?.trim();
    })
    .map(each => each.outerHTML.slice(0, 100))"""


TOO_WIDE = """() => [...document.querySelectorAll('main *')]
    .filter(each => each.getBoundingClientRect().right > window.innerWidth)
    .map(each => `${each.localName}.${each.className}`).slice(0, 8)"""


@pytest.mark.parametrize("width", [400, 1600])
async def test_it_is_usable_narrow_wide_and_with_the_keyboard_alone(
    browser: Any, tmp_path: Path, width: int
) -> None:
    store = SqliteStore(tmp_path / "runs.db")
    await run_fix(store, tmp_path)
    await run_evil(store, "evil")
    agent = refunding(store)
    await agent.run("The kettle broke.", identity=RunIdentity.root("waits"))
    async with (
        site(store, can_write=True, agent=agent) as served,
        opened(browser, served, viewport={"width": width, "height": 900}) as page,
    ):
        base = page.url.partition("#")[0]
        places = {
            "#/": ".run-row",
            "#/run/fix/turn/3/request": ".request .change",
            "#/run/evil": "section[data-turn='2']",
            "#/run/waits": ".waiting-card",
            "#/waiting": ".waiting-card",
            "#/diff/fix/evil": ".sides section",
        }
        for place, there in places.items():
            await page.goto(f"{base}{place}")
            await expect(page.locator(there).first).to_be_visible()
            assert await page.evaluate(NAMELESS) == []
            over = "() => document.documentElement.scrollWidth - window.innerWidth"
            assert await page.evaluate(over) <= 0, (place, await page.evaluate(TOO_WIDE))
            assert await page.get_by_role("main").count() == 1
            await expect(page.locator(".home")).to_have_text(
                "clark-agent runs", use_inner_text=True
            )
            await shot(page, f"{width}-{place.count('/')}-{there.strip('.')[:8]}")

        # Tab reaches the content first, then the frame, the head, the overview and the turns.
        await page.goto(f"{base}#/run/fix")
        await page.reload()
        await expect(turn(page, 4)).to_be_visible()
        names = []
        for _ in range(12):
            await page.keyboard.press("Tab")
            names.append(
                await page.evaluate(
                    "() => (document.activeElement.ariaLabel || document.activeElement.textContent)"
                    ".trim().slice(0, 24)"
                )
            )
            outline = "() => getComputedStyle(document.activeElement).outlineStyle"
            assert await page.evaluate(outline) != "none"
        assert names == [
            "Skip to the content", "clark-agent runs", "Waiting", "Colours: as the system",
            "Keyboard shortcuts", "Fork", "Compare …", "Replay", "Copy link", *names[9:],
        ]  # fmt: skip
        await page.keyboard.press("?")
        await expect(page.get_by_role("dialog")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
    store.close()
