"""Faults of the page of runs."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from tests.model.faults.base import Fault, breaks

SECURITY = "tests/view/test_security.py::{}"


def serve_with(fault: Fault, **other: Any) -> None:
    """Serve the page with other settings than the host has given."""

    def change(view_app: Any) -> Any:
        def serve(store: Any, **options: Any) -> Any:
            fault.fired += any(options.get(name, ()) != other[name] for name in other)
            return view_app(store, **{**options, **other})

        return serve

    fault.wrap("page", change)


@breaks("the page asks for no token", SECURITY.format("test_without_the_token_nothing_is_shown"))
def _(fault: Fault) -> None:
    serve_with(fault, token=None)


@breaks(
    "the page writes although it may only read",
    SECURITY.format("test_a_server_that_only_shows_writes_nothing"),
)
def _(fault: Fault) -> None:
    serve_with(fault, can_write=True)


@breaks("the page answers under any name", SECURITY.format("test_other_names_are_refused"))
def _(fault: Fault) -> None:
    serve_with(fault, hosts=None)


@breaks("other sites can act on the page", SECURITY.format("test_other_sites_cannot_act"))
def _(fault: Fault) -> None:
    """Browsers do not say for which site they send a request."""
    told = (b"origin", b"sec-fetch-site")

    def change(call: Any) -> Any:
        async def answer(self: Any, scope: Any, *channels: Any) -> None:
            headers = [each for each in scope.get("headers", ()) if each[0].lower() not in told]
            fault.fired += len(headers) != len(scope.get("headers", ()))
            await call(self, {**scope, "headers": headers}, *channels)

        return answer

    fault.wrap("request to the page", change)


@breaks(
    "the page does not show what would run",
    "tests/view/test_actions.py::test_what_waits_is_approved_and_the_run_goes_on",
)
def _(fault: Fault) -> None:
    def change(waiting: Any) -> Any:
        def hide(self: Any, *args: Any) -> Any:
            fault.fired += 1
            return replace(waiting(self, *args), arguments=None)

        return hide

    fault.wrap("page shows what waits", change)
