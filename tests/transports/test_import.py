"""Importing loads no provider's package, and one that is missing is told by the extra that has it.

Each check is a Python of its own: what this one has loaded already would hide the truth.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import metadata

import pytest

pytestmark = pytest.mark.slow

HEAVY = ("openai", "anthropic", "google.genai", "starlette", "uvicorn", "httpx2", "httpx")

LOADED = """
import sys
import {module}
loaded = [name for name in {heavy!r} if name in sys.modules]
assert not loaded, loaded
"""

HIDING = """
import sys


class Hiding:
    '''Says of a package, and of all that is in it, that it is not there.'''

    def __init__(self, *hidden):
        self.hidden = hidden

    def find_spec(self, name, path=None, target=None):
        for hidden in self.hidden:
            if name == hidden or name.startswith(hidden + "."):
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        return None


sys.meta_path.insert(0, Hiding(*{hidden!r}))
import clark_agent.transports
from clark_agent import ConfigError

try:
    {statement}
except ConfigError as error:
    print(type(error).__name__, error, sep="|")
    assert error.__cause__ is None and error.__suppress_context__
else:
    print("made")
"""


def python(code: str) -> str:
    """What a fresh interpreter prints; it must not fail."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["clark_agent", "clark_agent.transports"])
def test_importing_loads_no_package_of_a_provider(module: str) -> None:
    python(LOADED.format(module=module, heavy=HEAVY))


def test_every_module_of_the_transports_can_be_imported_without_any_of_them() -> None:
    """But for the gateway, which is what its package is for."""
    everything = (
        "import pkgutil, importlib; [importlib.import_module(m.name) for m in "
        "pkgutil.iter_modules(clark_agent.transports.__path__, 'clark_agent.transports.') "
        "if 'gateway' not in m.name]"
    )
    assert python(HIDING.format(hidden=HEAVY, statement=everything)) == "made"


MADE = {
    "OpenAIChat": ("clark_agent.transports.OpenAIChat('m', api_key='k')", "openai", "openai"),
    "OpenAIResponses": (
        "clark_agent.transports.OpenAIResponses('m', api_key='k')",
        "openai",
        "openai",
    ),
    "Anthropic": ("clark_agent.transports.Anthropic('m', api_key='k')", "anthropic", "anthropic"),
    "Gemini": ("clark_agent.transports.Gemini('m', api_key='k')", "google.genai", "google"),
}
CONNECTED = {
    "OpenAIChat": ("openai:m", "http://127.0.0.1:9/v1#m"),
    "OpenAIResponses": ("openai-responses:m",),
    "Anthropic": ("anthropic:m",),
    "Gemini": ("gemini:m",),
}


@pytest.mark.parametrize("name", MADE)
def test_a_missing_package_is_told_by_the_extra_that_has_it(name: str) -> None:
    statement, package, extra = MADE[name]
    told = python(HIDING.format(hidden=[package], statement=statement))
    kind, _, text = told.partition("|")
    assert kind == "ConfigError"
    assert name in text
    assert package in text
    assert f"pip install '.[{extra}]'" in text


def test_so_it_is_when_all_of_google_is_missing() -> None:
    told = python(HIDING.format(hidden=["google"], statement=MADE["Gemini"][0]))
    assert "pip install '.[google]'" in told


@pytest.mark.parametrize("name", CONNECTED)
def test_connect_tells_it_too(name: str) -> None:
    _, package, extra = MADE[name]
    for address in CONNECTED[name]:
        statement = f"clark_agent.transports.connect({address!r}, api_key='k')"
        told = python(HIDING.format(hidden=[package], statement=statement))
        assert f"pip install '.[{extra}]'" in told, address


@pytest.mark.parametrize("name", MADE)
def test_the_others_packages_are_not_needed(name: str) -> None:
    """Hiding them proves it, and also that the finder hides nothing else."""
    statement, package, _ = MADE[name]
    others = {"openai", "anthropic", "google.genai", "starlette", "uvicorn"} - {package}
    assert python(HIDING.format(hidden=sorted(others), statement=statement)) == "made"


def test_the_extras_that_are_named_exist() -> None:
    extras = set(metadata("clark-agent").get_all("Provides-Extra") or ())
    assert {extra for *_, extra in MADE.values()} <= extras
