"""A string names a transport, or an error says what to write, set or install."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from clark_agent import CancellationToken, ConfigError, StreamRequest, UserMessage
from clark_agent.stream import Done
from clark_agent.transports import OpenAIChat, RetryPolicy, Timeouts, connect
from tests.transports.servers.bytes_server import Answer, ByteServer

CANARY = "sk-canary-0123456789"

# scheme, address, name of the dialect, variables that may hold the key
SERVERS = [
    ("openrouter", "https://openrouter.ai/api/v1", "OpenRouter", ["OPENROUTER_API_KEY"]),
    ("groq", "https://api.groq.com/openai/v1", "Groq", ["GROQ_API_KEY"]),
    ("deepseek", "https://api.deepseek.com/v1", "DeepSeek", ["DEEPSEEK_API_KEY"]),
    ("mistral", "https://api.mistral.ai/v1", "Mistral", ["MISTRAL_API_KEY"]),
    ("xai", "https://api.x.ai/v1", "xAI", ["XAI_API_KEY"]),
    ("moonshot", "https://api.moonshot.ai/v1", "Moonshot", ["MOONSHOT_API_KEY"]),
    ("zai", "https://api.z.ai/api/paas/v4", "Z.ai", ["ZAI_API_KEY", "ZHIPUAI_API_KEY"]),
    ("cerebras", "https://api.cerebras.ai/v1", "Cerebras", ["CEREBRAS_API_KEY"]),
    ("together", "https://api.together.xyz/v1", "Together", ["TOGETHER_API_KEY"]),
    ("fireworks", "https://api.fireworks.ai/inference/v1", "Fireworks", ["FIREWORKS_API_KEY"]),
]
LOCAL_SERVERS = [
    ("ollama", "http://localhost:11434/v1"),
    ("lmstudio", "http://localhost:1234/v1"),
]


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.endswith(("_API_KEY", "_BASE_URL")):
            monkeypatch.delenv(name)


def chat(model: str, **settings: Any) -> OpenAIChat:
    transport = connect(model, **settings)
    assert isinstance(transport, OpenAIChat)
    return transport


# --- providers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("scheme", "url", "dialect", "variables"), SERVERS)
def test_a_provider_of_chat_completions(
    monkeypatch: pytest.MonkeyPatch, scheme: str, url: str, dialect: str, variables: list[str]
) -> None:
    for variable in variables:
        with monkeypatch.context() as patch:
            patch.setenv(variable, f" {CANARY}\n")
            transport = chat(f"{scheme}:vendor/model-1:free")
        assert transport.model == "vendor/model-1:free"
        assert transport.base_url == url
        assert transport.dialect.name == transport.provider == dialect
        assert CANARY in transport._redactor.secrets
        assert CANARY not in repr(transport)


@pytest.mark.parametrize(("scheme", "url", "dialect", "variables"), SERVERS)
def test_a_provider_without_its_key(
    monkeypatch: pytest.MonkeyPatch, scheme: str, url: str, dialect: str, variables: list[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)  # nobody else's
    monkeypatch.setenv(variables[0], "  ")
    with pytest.raises(ConfigError) as caught:
        connect(f"{scheme}:m")
    names = " or ".join(variables)
    assert str(caught.value) == f"{dialect} ({url}) needs a key: set {names}, or pass api_key"
    transport = chat(f"{scheme}:m", api_key="given key")
    assert "given key" in transport._redactor.secrets
    assert CANARY not in transport._redactor.secrets


def test_openai(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"OpenAI .* needs a key: set OPENAI_API_KEY, or pass"):
        connect("openai:gpt-5")
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    transport: Any = connect("openai:gpt-5")
    assert transport.model == "gpt-5"
    assert transport.provider == "OpenAI"
    assert transport.base_url == "https://api.openai.com/v1"


@pytest.mark.parametrize(("scheme", "url"), LOCAL_SERVERS)
def test_a_server_on_this_machine_needs_no_key(
    monkeypatch: pytest.MonkeyPatch, scheme: str, url: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    transport = chat(f"{scheme}:llama3.2:3b")
    assert (transport.model, transport.base_url) == ("llama3.2:3b", url)
    assert transport.dialect.key_variables == ()
    assert CANARY not in transport._redactor.secrets


def test_settings_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    retry, timeouts = RetryPolicy(attempts=2), Timeouts(idle=5)
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    for model in ("ollama:m", "openai:gpt-5", "http://localhost:1/v1#m"):
        transport: Any = connect(model, retry=retry, timeouts=timeouts)
        assert transport.retry is retry
        assert transport.timeouts is timeouts


# --- addresses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "url", "model"),
    [
        ("http://localhost:8080/v1#qwen", "http://localhost:8080/v1", "qwen"),
        ("https://example.org/x#a/b:c", "https://example.org/x", "a/b:c"),
        ("http://[::1]:8080/v1#m#2", "http://[::1]:8080/v1", "m#2"),
        ("  http://localhost/v1#m\n", "http://localhost/v1", "m"),
        ("http://localhost/v1 # m", "http://localhost/v1", "m"),
    ],
)
def test_an_address_with_a_model(text: str, url: str, model: str) -> None:
    transport = chat(text)
    assert (transport.base_url, transport.model) == (url, model)
    assert transport.dialect.name == "compatible server"


def test_an_address_that_is_known_has_its_dialect_and_needs_its_key() -> None:
    with pytest.raises(ConfigError, match="DEEPSEEK_API_KEY"):
        connect("https://api.deepseek.com/beta#deepseek-chat")
    transport = chat("https://api.deepseek.com/beta#deepseek-chat", api_key="given key")
    assert transport.provider == "DeepSeek"
    assert transport.base_url == "https://api.deepseek.com/beta"


@pytest.mark.parametrize("text", ["http://localhost/v1", "https://localhost/v1#", " http://x/v1# "])
def test_an_address_without_a_model(text: str) -> None:
    with pytest.raises(ConfigError, match=r"missing model in '.*': add it after a #, as in http"):
        connect(text)


@pytest.mark.parametrize("text", ["http://#m", "https:#m", "http:///v1#m"])
def test_an_address_without_a_host(text: str) -> None:
    with pytest.raises(ConfigError):
        connect(text)


HELLO = b'data: {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}\n\n'


@pytest.mark.slow
@pytest.mark.parametrize("given", [None, "given"])
async def test_a_foreign_server_never_gets_a_key_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    monkeypatch.setenv("OPENAI_ORG_ID", CANARY)
    monkeypatch.setenv("OPENAI_PROJECT_ID", CANARY)
    request = StreamRequest(system_prompt="", messages=(UserMessage("hi"),))
    async with ByteServer([Answer(body=HELLO)]) as server:
        transport = chat(f"{server.url}/v1#m", api_key=given)
        events = [event async for event in transport(request, CancellationToken())]
        await transport.aclose()
    assert isinstance(events[-1], Done)
    [asked] = server.requests
    assert asked.path == "/v1/chat/completions"
    assert asked.headers.get("authorization") == (given and f"Bearer {given}")
    assert CANARY not in repr(asked)


# --- what names no transport --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("opneai:gpt-5", "openai"),
        ("open-router:x/y", "openrouter"),
        ("OpenAI:gpt-5", "openai"),
        ("Ollama:llama3.2", "ollama"),
        ("lm-studio:m", "lmstudio"),
        ("x.ai:grok", "xai"),
        ("mistal:small", "mistral"),
        ("openai :gpt-5", "openai"),
    ],
)
def test_a_near_miss_is_understood_or_gets_a_hint(
    monkeypatch: pytest.MonkeyPatch, text: str, hint: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", CANARY)
    said = ""
    transport: Any = None
    try:
        transport = connect(text)
    except ConfigError as error:
        said = str(error)
    if transport is None:
        assert f"unknown provider in {text!r}. Did you mean {hint}:?" in said
    else:
        assert transport.model == text.partition(":")[2]


@pytest.mark.parametrize("text", ["gpt-5", "", "  ", ":", ":gpt-5", "qqqq:m", "file:///x#m"])
def test_no_provider(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(text)
    said = str(caught.value)
    assert f"unknown provider in {text!r}." in said
    assert "Did you mean" not in said
    assert "openai:, openrouter:" in said
    assert "http://localhost:8080/v1#model" in said


@pytest.mark.parametrize("text", ["openai:", "openai:  ", "groq:", "ollama:\n"])
def test_no_model(text: str) -> None:
    scheme = text.partition(":")[0]
    with pytest.raises(ConfigError, match=f"missing model in .*: write {scheme}:model"):
        connect(text)


@pytest.mark.parametrize("given", [None, 5, b"openai:gpt-5", ["openai:gpt-5"], OpenAIChat])
def test_no_string(given: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        connect(given)
    assert str(caught.value) == f"connect() takes a string such as 'openai:gpt-5', not {given!r}"


# --- the package --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["openai:gpt-5", "groq:m", "ollama:m", "http://localhost/v1#m"])
def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"the package openai: pip install '\.\[openai\]'"):
        connect(text, api_key="given key")


@pytest.mark.slow
def test_no_package_is_loaded_before_a_transport_is_made() -> None:
    program = (
        "import sys; from clark_agent.transports import connect; "
        "sdks = {'openai', 'anthropic', 'google.genai', 'httpx', 'httpx2', 'starlette'}; "
        "print(sorted(sdks & set(sys.modules))); "
        "connect('ollama:m'); print('openai' in sys.modules)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert said.stdout.split("\n")[:2] == ["[]", "True"]
