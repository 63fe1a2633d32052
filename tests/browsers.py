"""The browser of this machine, for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

PATIENCE = 60_000  # milliseconds until what does not come is an error
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip("chromium is not installed")


@asynccontextmanager
async def started_browser() -> AsyncGenerator[Any]:
    """A browser whose pages are made with contexts of their own."""
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    program = chromium()
    playwright.expect.set_options(timeout=30_000)
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=program, args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


async def shot(page: Any, name: str, *, full_page: bool = True) -> None:
    """Keep a picture if the environment asks for them: SCREENSHOTS=folder."""
    if folder := os.environ.get("SCREENSHOTS"):
        await page.screenshot(path=f"{folder}/{name}.png", full_page=full_page)
