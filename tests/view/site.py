"""The page of runs on a real server in this process, and a browser's requests to it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import uvicorn

from clark_agent.view.app import view_app

TOKEN = "a-token-for-the-tests"


class Site:
    """A server, and a client that has opened its address."""

    def __init__(self, app: Any, port: int, client: httpx2.AsyncClient) -> None:
        self.app = app
        self.port = port
        self.client = client
        self.csrf = ""

    @property
    def reading(self) -> Any:
        return self.app.state.view.reading

    async def get(self, path: str, /, code: int = 200, **params: Any) -> Any:
        response = await self.client.get(f"/api/{path}", params=params)
        assert response.status_code == code, response.text[:500]
        return response.json()

    async def post(self, path: str, body: Any = None, code: int = 200, **params: Any) -> Any:
        headers = {"x-clark-token": self.csrf}
        content = {} if body is None else body
        url = httpx2.URL(f"/api/{path}").copy_merge_params(params)
        response = await self.client.post(url, json=content, headers=headers)
        assert response.status_code == code, response.text[:500]
        return response.json()

    async def every_item(self, run_id: str, limit: int = 100) -> list[Any]:
        """All items of a run, page by page."""
        found: list[Any] = []
        start: int | None = 0
        while start is not None:
            page = await self.get("items", run=run_id, limit=limit, **{"from": start})
            found += page["items"]
            start = page["next"]
        return found

    @asynccontextmanager
    async def events(
        self, run_id: str, after: int | None = None, last: int | None = None
    ) -> AsyncGenerator[AsyncIterator[tuple[str, str | None, Any]]]:
        """The server-sent events of a run: name, id and data."""
        params: dict[str, Any] = {"run": run_id}
        if after is not None:
            params["after"] = after
        headers = {} if last is None else {"last-event-id": str(last)}
        async with self.client.stream(
            "GET", "/api/events", params=params, headers=headers
        ) as response:
            assert response.status_code == 200
            yield _events(response)


async def _events(response: httpx2.Response) -> AsyncIterator[tuple[str, str | None, Any]]:
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields["event"], fields.get("id"), json.loads(fields["data"])
            fields = {}


@asynccontextmanager
async def site(
    store: Any, *, refresh_ms: int | None = None, **options: Any
) -> AsyncGenerator[Site]:
    """Serve a store on a free port. Pages ask for the list again after ``refresh_ms``."""
    app = view_app(store, **{"token": TOKEN, **options})
    if refresh_ms is not None:
        app.state.view._refresh_ms = refresh_ms
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        port = listening.getsockname()[1]
        config = uvicorn.Config(app, log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        base = f"http://127.0.0.1:{port}"
        try:
            async with httpx2.AsyncClient(base_url=base, timeout=30, trust_env=False) as client:
                opened = await client.get("/", params={"token": TOKEN})
                assert opened.status_code == 303, opened.text
                found = Site(app, port, client)
                found.csrf = (await found.get("session"))["csrf"]
                yield found
        finally:
            app.state.view.close()
            server.should_exit = True
            await serving
