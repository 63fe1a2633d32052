"""The servers that transports are tested against, started when a test first asks for one.

Where a server cannot run, its tests are skipped; see `tests.no_skips` for continuous integration.
"""

from __future__ import annotations

import ssl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clark_agent.transports import LocalModel, RetryPolicy
from tests.selection import slow_fixture
from tests.transports.servers import aimock as aimock_module
from tests.transports.servers import llama as llama_module
from tests.transports.servers.aimock import Aimock
from tests.transports.servers.llama import LlamaServer

_FINALIZED = {
    "anthropic._base_client": ("AsyncHttpxClientWrapper",),
    "google.genai._api_client": ("AsyncHttpxClient", "AsyncHttpx2Client", "BaseApiClient"),
    "google.genai.client": ("AsyncClient",),
    "openai._base_client": ("AsyncHttpxClientWrapper",),
}
"""Classes of the SDKs that start a task when they are collected, closed or not."""


def pytest_collection_finish() -> None:
    """Take the finalizers away. A client of one test is collected during another, whose loop would
    get the task: it would look like a task that this test has left behind.
    """
    for module, names in _FINALIZED.items():
        for name in names:
            kind = getattr(sys.modules.get(module), name, None)
            if kind is not None and "__del__" in vars(kind):
                del kind.__del__


@pytest.fixture(scope="session", autouse=True)
def _few_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every client of an SDK reads all certificates of the system, and none is of use here."""
    every = Path(ssl.get_default_verify_paths().cafile or "")
    if not every.is_file():
        yield
        return
    end = "-----END CERTIFICATE-----\n"
    one = tmp_path_factory.mktemp("certificates") / "one.pem"
    one.write_text(every.read_text().partition(end)[0] + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", str(one))
        yield


def _need(missing: str | None) -> None:
    if missing:
        pytest.skip(missing)


@pytest.fixture(scope="session")
@slow_fixture
def aimock_server() -> Iterator[Aimock]:
    """The mock provider, with the fixtures of whichever test came last."""
    _need(aimock_module.missing())
    with Aimock() as server:
        yield server


@pytest.fixture
def aimock(aimock_server: Aimock) -> Aimock:
    """The mock provider without fixtures and with an empty journal."""
    aimock_server.reset()
    return aimock_server


@pytest.fixture(scope="session")
@slow_fixture
def llama_server() -> Iterator[LlamaServer]:
    """A real model; see `tests.transports.servers.llama` for what it can do."""
    _need(llama_module.missing())
    with LlamaServer() as server:
        yield server


@pytest.fixture(scope="session")
@slow_fixture
def local_model() -> LocalModel:
    """The packaged model, inside this process. It never asks twice: a failure is to be seen."""
    _need(llama_module.missing())
    return LocalModel(retry=RetryPolicy(attempts=1))


@pytest.fixture(scope="session")
def taught_model(local_model: LocalModel) -> LocalModel:
    """The same weights, which are told how a conversation is written, as if they had learnt it."""
    return LocalModel(chat_template=llama_module.CHAT_TEMPLATE.read_text(), retry=local_model.retry)
