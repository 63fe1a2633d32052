"""The SDK's OAuth client, and tokens in its terms. Loaded when a server needs a login."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from mcp.client.auth import OAuthClientProvider
from mcp.shared.auth import (
    AuthorizationCodeResult,
    OAuthClientInformationFull,
    OAuthClientMetadata,
    OAuthToken,
)
from pydantic import AnyUrl, ValidationError

from clark_agent._threads import run_in_thread

if TYPE_CHECKING:
    from clark_agent.mcp.auth import Tokens

__all__ = ["StoredTokens", "code_result", "provider"]


class StoredTokens:
    """The tokens of one server and user, as the SDK wants them."""

    def __init__(
        self,
        tokens: Tokens,
        key: str,
        stored: dict[str, Any],
        redirect: str,
        client_id: str | None,
        client_secret: str | None,
    ) -> None:
        self._tokens = tokens
        self._key = key
        self._value = dict(stored)
        self._redirect = redirect
        self._client_id = client_id
        self._client_secret = client_secret

    @property
    def expires_at(self) -> float | None:
        """When the stored token ends. The SDK knows this only of tokens it has just received."""
        at = self._value.get("expires_at")
        return float(at) if isinstance(at, (int, float)) else None

    async def get_tokens(self) -> OAuthToken | None:
        try:
            return OAuthToken.model_validate(self._value["tokens"])
        except (KeyError, ValidationError):
            return None

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._value["tokens"] = tokens.model_dump(mode="json", exclude_none=True)
        self._value.pop("expires_at", None)
        if tokens.expires_in is not None:
            self._value["expires_at"] = time.time() + tokens.expires_in
        await self._save()

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        if self._client_id is not None:
            method = "none" if self._client_secret is None else "client_secret_post"
            return OAuthClientInformationFull(
                client_id=self._client_id,
                client_secret=self._client_secret,
                redirect_uris=[AnyUrl(self._redirect)],
                token_endpoint_auth_method=method,
            )
        try:
            client = OAuthClientInformationFull.model_validate(self._value["client"])
        except (KeyError, ValidationError):
            return None
        known = [str(uri) for uri in client.redirect_uris or ()]
        return client if self._redirect in known else None  # else register again

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self._value["client"] = client_info.model_dump(mode="json", exclude_none=True)
        await self._save()

    async def _save(self) -> None:
        await run_in_thread(self._tokens.save, self._key, dict(self._value))


class _FixedScopes(OAuthClientMetadata):
    """Metadata whose scopes are those of the host, whatever the server suggests."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "scope":
            super().__setattr__(name, value)


def provider(
    url: str,
    storage: StoredTokens,
    *,
    redirect: str,
    name: str,
    scopes: str | None,
    has_secret: bool,
    on_redirect: Callable[[str], Awaitable[None]],
    on_callback: Callable[[], Awaitable[AuthorizationCodeResult]],
) -> OAuthClientProvider:
    """The SDK's authentication."""
    kind = OAuthClientMetadata if scopes is None else _FixedScopes
    metadata = kind(
        client_name=name,
        redirect_uris=[AnyUrl(redirect)],
        grant_types=["authorization_code", "refresh_token"],
        response_types=["code"],
        scope=scopes,
        token_endpoint_auth_method="client_secret_post" if has_secret else "none",
    )
    made = OAuthClientProvider(
        server_url=url,
        client_metadata=metadata,
        storage=storage,
        redirect_handler=on_redirect,
        callback_handler=on_callback,
    )
    made.context.token_expiry_time = storage.expires_at
    return made


def code_result(query: dict[str, str]) -> AuthorizationCodeResult:
    """The redirect of the browser in the SDK's terms."""
    return AuthorizationCodeResult(
        code=query["code"], state=query.get("state"), iss=query.get("iss")
    )
