"""Logging in with OAuth, against a real authorization server on this machine.

An HTTP client stands in for the browser and the person.
"""

from __future__ import annotations

import asyncio
import secrets
import stat
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    AuthorizationParams,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions
from mcp.server.mcpserver import MCPServer
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from pydantic import AnyHttpUrl, AnyUrl
from starlette.applications import Starlette
from starlette.routing import Mount

from clark_agent import CancellationToken, ConfigError, RunIdentity
from clark_agent.errors import McpError
from clark_agent.mcp import FileTokens, McpServer, McpTools, OAuth
from clark_agent.tool_source import ToolSourceContext
from clark_agent.toolkit import without_marks
from tests.mcp.own_servers import served

pytestmark = pytest.mark.slow


class Authority:
    """An authorization server that gives everybody what they ask for."""

    def __init__(self) -> None:
        self.clients: dict[str, OAuthClientInformationFull] = {}
        self.codes: dict[str, AuthorizationCode] = {}
        self.access: dict[str, AccessToken] = {}
        self.refresh: dict[str, RefreshToken] = {}
        self.refreshed = 0
        self.refuses = False
        self.seconds = 3_600

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self.clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        assert client_info.client_id is not None
        self.clients[client_info.client_id] = client_info

    async def authorize(
        self, client: OAuthClientInformationFull, params: AuthorizationParams
    ) -> str:
        if self.refuses:
            return construct_redirect_uri(
                str(params.redirect_uri), error="access_denied", state=params.state
            )
        code = secrets.token_urlsafe(20)
        self.codes[code] = AuthorizationCode(
            code=code,
            client_id=str(client.client_id),
            redirect_uri=params.redirect_uri,
            redirect_uri_provided_explicitly=params.redirect_uri_provided_explicitly,
            expires_at=time.time() + 60,
            scopes=params.scopes or [],
            code_challenge=params.code_challenge,
            resource=params.resource,
        )
        return construct_redirect_uri(str(params.redirect_uri), code=code, state=params.state)

    async def load_authorization_code(self, client: Any, code: str) -> AuthorizationCode | None:
        return self.codes.get(code)

    async def exchange_authorization_code(self, client: Any, code: AuthorizationCode) -> OAuthToken:
        del self.codes[code.code]
        return self._token(str(client.client_id), code.scopes)

    def _token(self, client_id: str, scopes: list[str]) -> OAuthToken:
        access, refresh = secrets.token_urlsafe(20), secrets.token_urlsafe(20)
        self.access[access] = AccessToken(token=access, client_id=client_id, scopes=scopes)
        self.refresh[refresh] = RefreshToken(token=refresh, client_id=client_id, scopes=scopes)
        return OAuthToken(
            access_token=access,
            refresh_token=refresh,
            expires_in=self.seconds,
            scope=" ".join(scopes),
        )

    async def load_refresh_token(self, client: Any, token: str) -> RefreshToken | None:
        return self.refresh.get(token)

    async def exchange_refresh_token(
        self, client: Any, token: RefreshToken, scopes: list[str]
    ) -> OAuthToken:
        del self.refresh[token.token]
        self.refreshed += 1
        return self._token(token.client_id, token.scopes)

    async def load_access_token(self, token: str) -> AccessToken | None:
        return self.access.get(token)

    async def revoke_token(self, token: Any) -> None:
        self.access.pop(token.token, None)


class Browser:
    """Opens the address and follows the redirects, as a person who agrees would."""

    def __init__(self) -> None:
        self.opened: list[httpx2.URL] = []
        self.pages: list[str] = []

    async def __call__(self, url: str) -> None:
        self.opened.append(httpx2.URL(url))
        async with httpx2.AsyncClient(follow_redirects=True) as client:
            self.pages.append((await client.get(url)).text)


class Site:
    def __init__(self, url: str, authority: Authority) -> None:
        self.url = url
        self.authority = authority


@asynccontextmanager
async def protected() -> AsyncGenerator[Site]:
    """A server that needs a login. Its authorization server is at the same origin."""
    app = Starlette()
    async with served(app) as origin:
        authority = Authority()
        server = MCPServer(
            "protected",
            auth_server_provider=authority,  # type: ignore[arg-type]
            auth=AuthSettings(
                issuer_url=AnyHttpUrl(origin),
                resource_server_url=AnyHttpUrl(f"{origin}/mcp"),
                validate_token_resource=False,
                required_scopes=["use"],
                client_registration_options=ClientRegistrationOptions(
                    enabled=True, valid_scopes=["use", "more"], default_scopes=["use"]
                ),
            ),
        )

        @server.tool()
        def secret() -> str:
            """A secret."""
            return "the cake is a lie"

        inner = server.streamable_http_app()
        app.router.routes.append(Mount("/", inner))
        async with inner.router.lifespan_context(inner):
            yield Site(f"{origin}/mcp", authority)


async def read_secret(server: McpServer) -> str:
    async with McpTools(server) as tools:
        return without_marks((await tools.call("p", "secret")).plain_text)


async def test_a_login_and_the_next_start_without_one(tmp_path: Path) -> None:
    tokens, browser = FileTokens(tmp_path / "state" / "tokens.json"), Browser()
    async with protected() as site:
        server = McpServer("p", url=site.url, auth=OAuth(storage=tokens, open_browser=browser))
        assert await read_secret(server) == "the cake is a lie"
        again = McpServer("p", url=site.url, auth=OAuth(storage=tokens, open_browser=browser))
        assert await read_secret(again) == "the cake is a lie"
        [client] = site.authority.clients.values()
    assert len(browser.opened) == 1
    assert browser.opened[0].params["code_challenge_method"] == "S256"
    assert browser.opened[0].params["scope"] == "use"
    assert "You can close this window" in browser.pages[0]
    assert client.client_name == "clark-agent"
    assert stat.S_IMODE(tokens.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(tokens.path.parent.stat().st_mode) == 0o700
    assert [file.name for file in tokens.path.parent.iterdir()] == ["tokens.json"]


async def test_an_expired_token_is_renewed_without_a_person(tmp_path: Path) -> None:
    tokens, browser = FileTokens(tmp_path / "tokens.json"), Browser()
    async with protected() as site:
        site.authority.seconds = 1
        server = McpServer("p", url=site.url, auth=OAuth(storage=tokens, open_browser=browser))
        await read_secret(server)
        stored = tokens.load(site.url)
        assert stored is not None
        tokens.save(site.url, {**stored, "expires_at": time.time() - 10})
        site.authority.seconds = 3_600
        site.authority.access.clear()
        again = McpServer("p", url=site.url, auth=OAuth(storage=tokens, open_browser=browser))
        assert await read_secret(again) == "the cake is a lie"
        assert site.authority.refreshed == 1
    assert len(browser.opened) == 1


async def test_scopes_of_the_host(tmp_path: Path) -> None:
    tokens, browser = FileTokens(tmp_path / "tokens.json"), Browser()
    async with protected() as site:
        auth = OAuth(storage=tokens, open_browser=browser, scopes=["use", "more"])
        assert await read_secret(McpServer("p", url=site.url, auth=auth)) == "the cake is a lie"
    assert browser.opened[0].params["scope"] == "use more"


async def test_a_program_that_is_registered_already(tmp_path: Path) -> None:
    tokens, browser = FileTokens(tmp_path / "tokens.json"), Browser()
    async with protected() as site:
        auth = OAuth(
            storage=tokens,
            open_browser=browser,
            client_id="me",
            client_secret="my-secret",
            redirect_port=(port := _free_port()),
        )
        await site.authority.register_client(
            OAuthClientInformationFull(
                client_id="me",
                client_secret="my-secret",
                redirect_uris=[AnyUrl(f"http://127.0.0.1:{port}/callback")],
                scope="use",
                token_endpoint_auth_method="client_secret_post",
            )
        )
        assert await read_secret(McpServer("p", url=site.url, auth=auth)) == "the cake is a lie"
        assert [*site.authority.clients] == ["me"]
    assert "my-secret" not in repr(auth)


async def test_a_login_that_is_refused_is_not_repeated(tmp_path: Path) -> None:
    tokens, browser = FileTokens(tmp_path / "tokens.json"), Browser()
    async with protected() as site:
        site.authority.refuses = True
        auth = OAuth(storage=tokens, open_browser=browser)
        for text in ("the login was refused: access_denied", "has failed a short time ago"):
            with pytest.raises(McpError, match=text):
                await read_secret(McpServer("p", url=site.url, auth=auth))
    assert len(browser.opened) == 1


class User(NamedTuple):
    name: str


def run_of(name: str) -> ToolSourceContext[User]:
    return ToolSourceContext(1, (), RunIdentity.root("r"), CancellationToken(), User(name))


async def test_users_who_share_nothing_have_logins_of_their_own(tmp_path: Path) -> None:
    browser = Browser()
    async with protected() as site:

        async def secret_of(name: str) -> str:
            auth = OAuth(storage=FileTokens(tmp_path / "t.json"), open_browser=browser)
            server = McpServer("p", url=site.url, auth=auth, share=lambda ctx: ctx.deps.name)
            async with McpTools(server) as tools:
                result = await tools.call("p", "secret", ctx=run_of(name))
            return without_marks(result.plain_text)

        for name in ("ann", "bob", "ann"):
            assert await secret_of(name) == "the cake is a lie"
    assert len(browser.opened) == 2


async def test_a_refused_login_of_one_user_leaves_others_alone(tmp_path: Path) -> None:
    auth = OAuth(storage=FileTokens(tmp_path / "t.json"), open_browser=Browser())
    async with protected() as site:
        server = McpServer("p", url=site.url, auth=auth, share=lambda ctx: ctx.deps.name)
        async with McpTools(server) as tools:
            site.authority.refuses = True
            with pytest.raises(McpError, match="the login was refused"):
                await tools.tools(run_of("ann"))
            site.authority.refuses = False
            result = await tools.call("p", "secret", ctx=run_of("bob"))
    assert without_marks(result.plain_text) == "the cake is a lie"


def test_headers_of_a_run_do_not_say_whose_login_it_is() -> None:
    with pytest.raises(ConfigError, match="set share"):
        McpServer("p", url="https://example.org", auth=OAuth(), headers=lambda ctx: {"x": "y"})


async def test_nobody_logs_in(tmp_path: Path) -> None:
    """The person has longer than connecting may take, but not for ever."""

    async def ignore(url: str) -> None:
        pass

    async with protected() as site:
        auth = OAuth(
            storage=FileTokens(tmp_path / "t.json"), open_browser=ignore, login_timeout=1.0
        )
        server = McpServer("p", url=site.url, auth=auth, connect_timeout=0.8)
        with pytest.raises(McpError, match="nobody has logged in within 1 seconds"):
            await read_secret(server)


async def test_others_who_knock_at_the_listener(tmp_path: Path) -> None:
    async def browse(url: str) -> None:
        redirect = httpx2.URL(httpx2.URL(url).params["redirect_uri"])
        async with httpx2.AsyncClient(follow_redirects=True) as client:
            assert (await client.get(redirect.copy_with(path="/other"))).status_code == 404
            assert (await client.get(redirect)).status_code == 404
            assert (await client.post(redirect, params={"code": "x"})).status_code == 404
            reader, writer = await asyncio.open_connection(redirect.host, redirect.port)
            writer.write(b"nonsense\r\n\r\n")
            writer.close()
            await reader.read()
            assert (await client.get(url)).status_code == 200

    async with protected() as site:
        auth = OAuth(storage=FileTokens(tmp_path / "t.json"), open_browser=browse)
        assert await read_secret(McpServer("p", url=site.url, auth=auth)) == "the cake is a lie"


FORGED = [
    {"code": "stolen", "state": "guessed"},
    {"code": "stolen"},
    {"error": "access_denied"},
    {"error": "access_denied", "state": "guessed \u20ac"},
]


async def test_a_forged_answer_is_refused_and_the_login_goes_on(tmp_path: Path) -> None:
    async def browse(url: str) -> None:
        redirect = httpx2.URL(url).params["redirect_uri"]
        async with httpx2.AsyncClient(follow_redirects=True) as client:
            for params in FORGED:
                page = await client.get(redirect, params=params)
                assert (page.status_code, "not the answer" in page.text) == (400, True)
            assert "Logged in" in (await client.get(url)).text

    async with protected() as site:
        auth = OAuth(storage=FileTokens(tmp_path / "t.json"), open_browser=browse)
        assert await read_secret(McpServer("p", url=site.url, auth=auth)) == "the cake is a lie"


async def test_any_other_authentication() -> None:
    class Key(httpx2.Auth):
        def auth_flow(self, request: httpx2.Request) -> Any:
            request.headers["Authorization"] = "Bearer wrong"
            yield request

    async with protected() as site:
        with pytest.raises(McpError, match=r"does not accept the credentials \(status 401\)"):
            await read_secret(McpServer("p", url=site.url, auth=Key()))


@pytest.mark.parametrize(
    "settings",
    [
        {"scopes": "use"},
        {"redirect_port": 70_000},
        {"client_secret": "x"},
        {"login_timeout": 0},
    ],
)
def test_settings_that_are_wrong(settings: Any) -> None:
    with pytest.raises(ConfigError, match="OAuth: "):
        OAuth(**settings)


def test_a_file_that_is_damaged_counts_as_empty_and_is_kept(tmp_path: Path) -> None:
    tokens = FileTokens(tmp_path / "t.json")
    assert tokens.load("u") is None
    for damaged in ("nonsense", '{"others": {"tokens": 1}', "[]"):
        tokens.path.write_text(damaged)
        assert tokens.load("u") is None
        tokens.save("u", {"a": 1})
        tokens.save("v", {"b": 2})
        assert (tokens.load("u"), tokens.load("v")) == ({"a": 1}, {"b": 2})
        [kept] = tmp_path.glob("t.json.damaged-*")
        assert kept.read_text() == damaged
        kept.unlink()


_SAVE = """
import sys
from clark_agent.mcp import FileTokens
for n in range(50):
    FileTokens(sys.argv[1]).save(f"{sys.argv[2]} {n}", {"n": n})
"""


def test_several_objects_and_processes_save_in_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "t.json")
    processes = [subprocess.Popen([sys.executable, "-c", _SAVE, path, name]) for name in "ab"]

    def save(name: str) -> None:
        for n in range(50):
            FileTokens(path).save(f"{name} {n}", {"n": n})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save, "cd"))
    assert [process.wait() for process in processes] == [0, 0]
    tokens = FileTokens(path)
    assert all(tokens.load(f"{name} {n}") == {"n": n} for name in "abcd" for n in range(50))
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_the_usual_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert FileTokens().path == tmp_path / "clark-agent" / "mcp-tokens.json"


def _free_port() -> int:
    from clark_agent.mcp.auth import _free_port

    return _free_port(0)
