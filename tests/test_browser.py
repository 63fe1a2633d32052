"""The page of ``examples/approval_web.py`` in a real browser, with the server killed in between."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from clark_agent.run_log import SqliteStore, fold
from clark_agent.run_log.records import RequestDecided
from tests.browsers import PATIENCE, shot, started_browser

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

EXAMPLE = Path(__file__).parent.parent / "examples" / "approval_web.py"


class Site:
    """The server of the example in a process of its own, always at the same address."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self._options = options
        self.db = folder / "runs.db"
        self._port = 0  # until it is known which one is free
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(EXAMPLE), "--port", str(self._port), "--db", str(self.db)),
            *self._options,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self._process.stdout is not None
        address = (await self._process.stdout.readline()).decode().strip()
        self._port = urlsplit(address).port or self._port
        assert address == self.url[:-1]

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    def decisions(self) -> list[tuple[str, str | None]]:
        """What the log says: each decision, and by whom."""
        store = SqliteStore(self.db)
        try:
            (run,) = store.runs()
            entries = [record.entry for record in store.load(run.run_id).records]
        finally:
            store.close()
        return [
            (str(entry.decision.__struct_config__.tag), entry.by)
            for entry in entries
            if isinstance(entry, RequestDecided)
        ]

    def outcome(self) -> str | None:
        store = SqliteStore(self.db)
        try:
            (run,) = store.runs()
            assert fold(store.load(run.run_id)).messages
            return run.outcome
        finally:
            store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncGenerator[Any]:
    async with started_browser() as started:
        yield started


@asynccontextmanager
async def browsing(browser: Any, folder: Path, *options: str) -> AsyncGenerator[tuple[Site, Any]]:
    """The site, and a window of its own."""
    site = Site(folder, options)
    await site.start()
    try:
        context = await browser.new_context(viewport={"width": 1280, "height": 900})
        context.set_default_timeout(PATIENCE)
        try:
            yield site, context
        finally:
            await context.close()
    finally:
        await site.kill()


async def open_page(site: Site, context: Any, user: str) -> Any:
    page = await context.new_page()
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    await page.goto(site.url)
    await page.get_by_label("You are").fill(user)
    return page


def card(page: Any, tool: str) -> Any:
    return page.locator(f"article.card[data-tool={tool}]")


async def test_people_decide_on_a_page_and_the_server_dies_in_between(
    browser: Any, tmp_path: Path
) -> None:
    expect = playwright.expect
    expect.set_options(timeout=PATIENCE)
    async with browsing(browser, tmp_path) as (site, context):
        ada = await open_page(site, context, "ada")
        await expect(ada.get_by_text("Nothing waits.")).to_be_visible()
        await shot(ada, "1-empty")
        evil = "Refund order 7 <img src=x onerror=alert(1)>"
        await ada.get_by_label("Task").fill(evil)
        await ada.get_by_role("button", name="Start").click()

        # The run appears, with its live events and with what it waits for.
        await expect(ada.locator("#runs .state")).to_have_text("suspended")
        await expect(ada.locator("#runs button")).to_contain_text(evil)
        await expect(card(ada, "refund").locator("dd")).to_have_text(["7", "120"])
        await expect(card(ada, "refund")).to_contain_text("approval_gate asks support")
        await expect(card(ada, "refund")).to_contain_text("expires")
        await expect(card(ada, "send_email").locator("pre")).to_contain_text("Subject: Your order")
        log = ada.locator("#log")
        await expect(log.locator(".said").nth(1)).to_have_text("I look at order 7 first.")
        await expect(log.locator(".call").first).to_contain_text("→ order 7: a kettle")
        await expect(log).to_contain_text("it waits for a decision")
        await shot(ada, "2-waiting")

        # What is not JSON, or does not fit the tool, is not accepted, and what was typed stays.
        bob = await open_page(site, context, "bob")
        await expect(card(bob, "refund")).to_be_visible()
        change = card(ada, "refund").get_by_role("button", name="Change")
        await change.click()
        arguments = card(ada, "refund").get_by_label("Arguments")
        again = card(ada, "refund").get_by_role("button", name="Allow with these")
        await arguments.fill('{"order": 7,')
        await again.click()
        await expect(card(ada, "refund").locator(".error")).to_contain_text("JSON")
        await arguments.fill('{"order": 7, "amount": "much"}')
        await again.click()
        await expect(card(ada, "refund").locator(".error")).to_contain_text("invalid arguments")
        await shot(ada, "3-invalid")
        await arguments.fill('{"order": 7, "amount": 60}')

        # The server dies, and is back. Nobody reloads.
        await site.kill()
        await site.start()
        await again.click()
        await expect(card(ada, "refund")).to_have_count(0)

        # Two people decide at once: neither page knows of the other, and one of them is told.
        pages = (ada, bob)
        for page in pages:
            await page.route("**/state", lambda route: route.abort())
            await card(page, "send_email").get_by_label("Reason").fill("Call her instead.")
        denials = [card(page, "send_email").get_by_role("button", name="Deny") for page in pages]
        async with (
            ada.expect_response("**/decisions") as hers,
            bob.expect_response("**/decisions") as his,
        ):
            await asyncio.gather(*[button.click() for button in denials])
        for page in pages:
            await page.unroute("**/state")
        responses = [await hers.value, await his.value]
        assert sorted(response.status for response in responses) == [200, 409]
        late = ada if responses[0].status == 409 else bob
        winner = "bob" if late is ada else "ada"
        await expect(late.get_by_role("status")).to_have_text(
            f"Too late: {winner} was faster: deny."
        )
        await shot(late, "4-too-late")

        # The run goes on, and its events appear in the pages that were open all the time.
        await expect(log).to_contain_text("refunded 60 € for order 7")
        await expect(log).to_contain_text("it was refused: ")
        question = card(ada, "ask_user")
        await expect(question).to_contain_text("Should Ada also get a voucher?")
        await expect(question.get_by_role("button")).to_have_text(
            ["10 €", "none", "Answer", "Deny"]
        )
        await shot(ada, "5-question")

        # A page that is loaded again shows the same, and nothing twice.
        before = await log.inner_text()
        await ada.reload()
        await expect(log).to_have_text(before, use_inner_text=True)
        await ada.get_by_label("You are").fill("ada")
        await site.kill()
        await site.start()
        await card(ada, "ask_user").get_by_label("Answer", exact=True).fill("20 € <b>")
        await card(ada, "ask_user").get_by_role("button", name="Answer").click()
        for page in (ada, bob):
            await expect(page.locator("#log .said").last).to_contain_text("20 € <b>.")
            await expect(page.locator("#runs .state")).to_have_text("done")
            await expect(page.get_by_text("Nothing waits.")).to_be_visible()
            assert await page.locator("#log .said").count() == 4  # the task, and three answers
            assert await page.locator("#log .call").count() == 4
            assert page.problems == []
            assert await page.locator("#log img, #log b, #runs img").count() == 0
        await shot(ada, "6-done")
    assert site.outcome() == "done"
    assert site.decisions() == [("give_arguments", "ada"), ("deny", winner), ("give_result", "ada")]


async def test_what_is_too_late_or_from_elsewhere_is_refused(browser: Any, tmp_path: Path) -> None:
    expect = playwright.expect
    expect.set_options(timeout=PATIENCE)
    async with browsing(browser, tmp_path, "--minutes", "0.02") as (site, context):
        ada = await open_page(site, context, "ada")
        async with ada.expect_response(waits_for("refund")) as state:
            await ada.get_by_role("button", name="Start").click()
        request = (await (await state.value).json())["waiting"][0]
        await expect(card(ada, "refund")).to_have_count(0)  # nobody has decided, and it goes on
        await expect(ada.locator("#log")).to_contain_text("not decided in time")
        names = ("request_id", "run_id", "root_run_id", "tool_name")
        body = json.dumps({**{name: request[name] for name in names}, "decision": "allow"})
        headers = {"content-type": "application/json"}
        late = await context.request.post(f"{site.url}decisions", data=body, headers=headers)
        assert (late.status, await late.text()) == (410, "the time to decide is over")
        headers["origin"] = "http://elsewhere.example"
        elsewhere = await context.request.post(f"{site.url}decisions", data=body, headers=headers)
        form = await context.request.post(f"{site.url}decisions", form={"decision": "allow"})
        assert (elsewhere.status, form.status) == (403, 403)


def waits_for(tool: str) -> Callable[[Any], Awaitable[bool]]:
    async def is_it(response: Any) -> bool:
        if not response.url.endswith("/state"):
            return False
        return any(request["tool_name"] == tool for request in (await response.json())["waiting"])

    return is_it
