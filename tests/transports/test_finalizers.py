"""Clients of the SDKs that nobody closed do nothing to the tests that come after."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from google import genai

CLIENTS: dict[str, Callable[[], Any]] = {
    "anthropic": lambda: anthropic.AsyncAnthropic(api_key="key"),
    "google": lambda: genai.Client(api_key="key", vertexai=False),
    "openai": lambda: openai.AsyncOpenAI(api_key="key"),
}


@pytest.mark.parametrize("name", CLIENTS)
async def test_a_client_that_is_collected_starts_no_task_in_the_running_loop(name: str) -> None:
    client = CLIENTS[name]()
    client.cycle = client
    before = asyncio.all_tasks()
    del client
    gc.collect()
    assert asyncio.all_tasks() == before
