"""Attacks on the page of runs: each is refused, and the page itself is not disturbed by them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx2
import pytest

from clark_agent.errors import ConfigError
from clark_agent.run_log import MemoryStore, RunLog
from clark_agent.view.app import view_app
from clark_agent.view.guard import POLICY
from tests.run_log import stories
from tests.view.site import TOKEN, site

pytestmark = pytest.mark.slow


async def raw(port: int, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send exactly these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


async def plain(port: int, path: str, *headers: str, host: str = "127.0.0.1") -> Any:
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers, "", ""]
    return await raw(port, "\r\n".join(lines).encode("latin-1"))


async def test_without_the_token_nothing_is_shown() -> None:
    async with site(MemoryStore()) as page:
        for path in ("/", "/static/app.css", "/api/session", "/api/runs", "/api/image?run=x"):
            status, headers, body = await plain(page.port, path)
            assert (status, b"csrf" in body) == (401, False), path
            assert "set-cookie" not in headers
            assert headers["content-security-policy"] == POLICY
        status, headers, _ = await plain(page.port, "/?token=wrong")
        assert (status, "set-cookie" in headers) == (401, False)
        status, headers, _ = await plain(page.port, f"/?token={TOKEN}&token=wrong")
        assert (status, "set-cookie" in headers) == (401, False)
        status, *_ = await plain(page.port, f"/api/runs?token={TOKEN}")
        assert status == 401


async def test_a_browser_without_the_token_is_told_in_words() -> None:
    words = b"open the address that was printed when this server started: it has the token"
    accepted = "Accept: text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"
    async with site(MemoryStore()) as page:
        for path in ("/", "/?token=wrong", "/?token=wrong&token=<script>"):
            status, headers, body = await plain(page.port, path, accepted)
            assert (status, headers["content-type"]) == (401, "text/html; charset=utf-8")
            assert words in body
            assert b"<script" not in body
            assert "set-cookie" not in headers
            assert headers["content-security-policy"] == POLICY
            assert headers["cache-control"] == "no-store"
        status, _, body = await plain(page.port, "/", accepted, host="evil.example")
        assert (status, b"<p>Not shown: this server does not answer" in body) == (403, True)
        for path, accept in (("/api/runs", accepted), ("/", "Accept: */*")):
            status, headers, body = await plain(page.port, path, accept)
            assert (status, headers["content-type"]) == (401, "application/json")
            assert words in body


async def test_the_token_becomes_a_cookie_and_leaves_the_address() -> None:
    async with site(MemoryStore()) as page:
        status, headers, _ = await plain(page.port, f"/?token={TOKEN}&theme=dark")
        assert status == 303
        assert headers["location"] == "/?theme=dark"
        cookie = headers["set-cookie"]
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "secure" not in cookie
        assert TOKEN not in cookie
        name = cookie.partition(";")[0]
        status, *_ = await plain(page.port, "/", f"Cookie: other=1; {name}")
        assert status == 200
        status, *_ = await plain(page.port, "/", f"Cookie: {name}x")
        assert status == 401


async def test_a_redirect_stays_on_this_server() -> None:
    async with site(MemoryStore()) as page:
        for path in ("//evil.example", "/%2F/evil.example", "/%5Cevil.example", "/%0d%0ax:y"):
            status, headers, _ = await plain(page.port, f"{path}?token={TOKEN}")
            assert status in (303, 400)
            location = headers.get("location", "/")
            assert location.startswith("/")
            assert not location.startswith(("//", "/\\"))
            assert "x" not in headers


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "", "a b", "127.0.0.1@x"]
)
async def test_other_names_are_refused(host: str) -> None:
    """A site whose name was made to resolve to this machine sends its own name."""
    async with site(MemoryStore()) as page:
        cookie = next(iter(page.client.cookies.jar))
        given = f"Cookie: {cookie.name}={cookie.value}"
        status, _, body = await plain(page.port, "/api/session", given, host=host)
        assert (status, b"csrf" in body) == (403 if host != "a b" else status, False)


async def test_names_of_this_machine_are_answered() -> None:
    async with site(MemoryStore(), hosts=["runs.example"]) as page:
        cookie = next(iter(page.client.cookies.jar))
        given = f"Cookie: {cookie.name}={cookie.value}"
        for host in ("127.0.0.1", "localhost:8000", "[::1]:80", "RUNS.example", "10.0.0.5:81"):
            status, *_ = await plain(page.port, "/api/session", given, host=host)
            assert status == 200, host


async def test_two_names_are_refused() -> None:
    async with site(MemoryStore()) as page:
        status, *_ = await plain(page.port, "/", "Host: evil.example")
        assert status in (400, 403)


ACTIONS = ("steer", "cancel", "decide", "resume", "fork", "replay")


async def logged() -> tuple[Any, str]:
    played = await stories.told("plain")
    return played.store, played.run_id


async def test_a_server_that_only_shows_writes_nothing() -> None:
    store, run_id = await logged()
    before = store.load(run_id).records, [run.run_id for run in store.runs()]
    async with site(store) as page:
        session = await page.get("session")
        assert (session["can_write"], session["can_run"], session["csrf"]) == (False, False, "")
        for action in ACTIONS:
            for token in ("", "guess"):
                page.csrf = token
                answer = await page.post(f"{action}?run={run_id}", {"message": "x"}, code=403)
                assert answer["error"] == "read_only"
        for method in ("PUT", "DELETE", "PATCH", "OPTIONS"):
            response = await page.client.request(method, f"/api/run?run={run_id}")
            assert response.status_code in (403, 405)
    assert (store.load(run_id).records, [run.run_id for run in store.runs()]) == before
    assert store.mail(run_id) == ()


async def test_other_sites_cannot_act() -> None:
    store, run_id = await logged()
    async with site(store, can_write=True) as page:
        path = f"/api/cancel?run={run_id}"

        async def attempt(headers: dict[str, str], **body: Any) -> httpx2.Response:
            return await page.client.post(path, headers=headers, **(body or {"json": {}}))

        right = {"x-clark-token": page.csrf}
        for headers in (
            {},
            {"x-clark-token": "guess"},
            {**right, "origin": "http://evil.example"},
            {**right, "origin": "null"},
            {**right, "origin": f"http://127.0.0.1:{page.port + 1}"},
            {**right, "sec-fetch-site": "cross-site"},
            {**right, "sec-fetch-site": "same-site"},
        ):
            assert (await attempt(headers)).status_code == 403, headers
        form = await attempt({**right, "content-type": "text/plain"}, content=b"{}")
        assert form.status_code == 415
        same = {**right, "origin": f"http://127.0.0.1:{page.port}", "sec-fetch-site": "same-origin"}
        assert (await attempt(same)).status_code == 409  # it has ended
        for site_ in ("cross-site", "same-site"):
            response = await page.client.get("/api/runs", headers={"sec-fetch-site": site_})
            assert response.status_code == 403
    assert store.mail(run_id) == ()


async def test_bodies_are_bounded_and_checked() -> None:
    store, run_id = await logged()
    async with site(store, can_write=True) as page:
        large = {"message": "x" * (2 << 20)}
        assert (await page.post(f"steer?run={run_id}", large, code=413))["error"] == "too_large"
        wrong: tuple[Any, ...] = (
            {"message": 3},
            {},
            [],
            {"message": "x", "unknown": 1},
            {"message": " "},
        )
        for body in wrong:
            assert (await page.post(f"steer?run={run_id}", body, code=400))["error"] == "wrong"
        headers = {"x-clark-token": page.csrf, "content-type": "application/json"}
        for content in (b"", b"{", b"\xff", b"[" * 100_000):
            path = f"/api/steer?run={run_id}"
            response = await page.client.post(path, headers=headers, content=content)
            assert response.status_code == 400


async def test_nothing_is_cached_framed_or_sniffed() -> None:
    store, run_id = await logged()
    async with site(store) as page:
        for path in (
            "/",
            "/static/main.js",
            f"/api/run?run={run_id}",
            "/api/run?run=none",
            "/none",
        ):
            response = await page.client.get(path)
            headers = response.headers
            assert headers["content-security-policy"] == POLICY
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["cache-control"] == "no-store"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["x-frame-options"] == "DENY"
            assert headers["cross-origin-resource-policy"] == "same-origin"
            kind = headers["content-type"]
            assert ("html" in kind) == (path == "/"), "JSON must never be HTML"


async def test_files_outside_of_the_page_are_not_served() -> None:
    async with site(MemoryStore()) as page:
        for name in ("../app.py", "..%2Fapp.py", "%2e%2e/shapes.py", "app.py", "", "."):
            response = await page.client.get(f"/static/{name}")
            assert response.status_code == 404, name


async def test_run_ids_are_only_names(tmp_path: Any) -> None:
    from clark_agent.run_log import JsonlStore

    secret = tmp_path / "secret.jsonl"
    secret.write_text("{}")
    folder = tmp_path / "runs"
    folder.mkdir()
    async with site(JsonlStore(folder)) as page:
        for run_id in (
            "..%2Fsecret",
            "%2e%2e/secret",
            "x%00",
            "%2Fetc%2Fpasswd",
            "a" * 3000,
            "%ff",
        ):
            response = await page.client.get(f"/api/items?run={run_id}")
            assert response.status_code in (400, 404), run_id
            assert response.headers["content-type"] == "application/json"


async def test_the_token_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with site(MemoryStore()) as page:
            await page.get("runs")
            await page.get("run", run="none", code=404)
    own = [r.getMessage() for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    assert TOKEN not in "\n".join(own)


async def test_a_mounted_app_works_below_its_path() -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    store, run_id = await logged()
    inner = view_app(store, token=TOKEN)
    outer = Starlette(routes=[Mount("/ops/runs", inner)])
    transport = httpx2.ASGITransport(outer)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/ops/runs/")).status_code == 401
        opened = await client.get("/ops/runs/", params={"token": TOKEN})
        assert (opened.status_code, opened.headers["location"]) == (303, "/ops/runs/")
        assert (await client.get("/ops/runs/")).status_code == 200
        found = await client.get(f"/ops/runs/api/run?run={run_id}")
        assert found.json()["run"]["run_id"] == run_id
        denied = await client.post(f"/ops/runs/api/cancel?run={run_id}", json={})
        assert denied.status_code == 403


async def test_an_app_of_a_host_needs_no_token_of_its_own() -> None:
    store, run_id = await logged()
    transport = httpx2.ASGITransport(view_app(RunLog(store), token=None, hosts=None))
    async with httpx2.AsyncClient(transport=transport, base_url="http://any.example") as client:
        assert (await client.get(f"/api/run?run={run_id}")).status_code == 200
        assert (await client.get("/?token=x")).status_code == 200


def test_a_weak_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="16 characters"):
        view_app(MemoryStore(), token="short")


async def test_faults_show_only_a_number(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        def runs(self, **_: Any) -> Any:
            raise RuntimeError("the password is 1234")

    async with site(Broken()) as page:
        answer = await page.get("runs", code=500)
        assert "1234" not in str(answer)
        assert answer["message"].rpartition(" ")[2] in caplog.text
