"""Creates the openai package's client for a server that speaks one of OpenAI's protocols.

- ``base_url`` or the environment gives the server's address; the host's own client overrides both;
- a key from the environment is used only for the host that it belongs to, and a server that needs
  no key gets none;
- settings of an OpenAI account in the environment are sent to OpenAI only;
- the package's retries and time limits are disabled: `clark_agent.transports.http.base` has its
  own.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from clark_agent._extras import load_extra
from clark_agent.transports.dialects import ChatDialect, dialect_for
from clark_agent.transports.http.base import checked
from clark_agent.transports.http.redaction import Address, secrets_in, secrets_of
from clark_agent.transports.http.retry import Timeouts
from clark_agent.transports.http.sdk import LoopLocal, api_key_from, given_key, posted

__all__ = ["OpenAIClients"]

_OPENAI_URL = "https://api.openai.com/v1"


class OpenAIClients:
    """The clients of one transport, one for each event loop.

    Raises `ConfigError` when the package is not installed or the server's key is not set.
    """

    def __init__(
        self,
        needed_by: str,
        *,
        base_url: str | None,
        api_key: str | None,
        headers: Mapping[str, str] | None,
        client: Any,
        timeouts: Timeouts | None,
        dialect: ChatDialect | None = None,
    ) -> None:
        sdk = load_extra("openai", "openai", needed_by)
        if client is not None:
            address = Address.of(str(client.base_url), has_query=True)
        else:
            address = Address.of(base_url or os.environ.get("OPENAI_BASE_URL") or _OPENAI_URL)
        self.url = address.url
        self.dialect = dialect or dialect_for(self.url)
        key = api_key if client is not None else self._key(api_key, base_url)
        self.secrets = [*address.secrets, *secrets_in(headers), *secrets_of(client)]
        given: dict[str, Any] = {name: value.strip() for name, value in (headers or {}).items()}
        given = {**address.headers, **given}
        self.secrets += [key] if key else []
        is_authorized = key or client or any(name.lower() == "authorization" for name in given)
        self._request_headers: dict[str, Any] = (
            {} if is_authorized else {"Authorization": sdk.Omit()}
        )
        # Disable the SDK's retries: the transport retries, within its own time limits.
        self._client = None if client is None else client.with_options(max_retries=0)
        if dialect_for(self.url).name != "OpenAI":
            given = {**{name: sdk.Omit() for name in _openai_headers()}, **given}
        connect = (checked("timeouts", timeouts, Timeouts) or Timeouts()).connect

        def make() -> Any:
            return sdk.AsyncOpenAI(
                api_key=key or "none",
                base_url=self.url,
                max_retries=0,
                timeout=sdk.Timeout(None, connect=connect),
                default_headers=given,
            )

        self._kept = LoopLocal(make, lambda client: client.close())

    def _key(self, given: str | None, base_url: str | None) -> str | None:
        given = given_key(given)
        variables = self.dialect.key_variables
        if variables and (given or dialect_for(self.url).key_variables == variables):
            return api_key_from(given, variables, f"{self.dialect.name} ({self.url})")
        if base_url is None and given is None:
            return os.environ.get("OPENAI_API_KEY")  # belongs to OPENAI_BASE_URL
        return given

    async def get(self) -> Any:
        """Return the client of the running event loop, or the host's own."""
        return self._client or await self._kept.get()

    @asynccontextmanager
    async def posted(
        self, path: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[AsyncIterator[bytes]]:
        """Send the body and yield the bytes of the response."""
        client = await self.get()
        # The package also supports an admin key for the account: never send it.
        only = {"security": {"bearer_auth": True}}
        async with posted(client, path, body, self._request_headers, **only) as pieces:
            yield pieces

    async def aclose(self) -> None:
        """Close the connections of the running event loop; the host's own client stays open."""
        await self._kept.aclose()


def _openai_headers() -> list[str]:
    """The names of the headers that the package adds from the environment."""
    custom = os.environ.get("OPENAI_CUSTOM_HEADERS", "").splitlines()
    names = [line.partition(":")[0].strip() for line in custom if ":" in line]
    return ["OpenAI-Organization", "OpenAI-Project", *names]
