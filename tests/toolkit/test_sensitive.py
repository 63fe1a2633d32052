"""Files that a person is asked about: secrets before they are read, and what others will run."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clark_agent import ConfigError, ToolContext, ToolResult
from clark_agent.testing import call
from clark_agent.toolkit import SENSITIVE_PATHS, Approval, SensitivePath, Workspace, file_tools
from clark_agent.toolkit.approval import ApprovalRequest, AskApproval, Denied
from tests.loop.support import completed, results

SECRETS = """
    .env .env.local web/.env.production deploy/prod.env .ENV .netrc sub/.netrc .aws/credentials
    home/.aws/config .ssh/config .ssh/id_rsa id_rsa keys/id_ed25519 server.pem tls/server.key a.p12
    .docker/config.json .kube/config .git-credentials .npmrc .pypirc credentials.json secrets.yaml
    infra/terraform.tfstate .config/gcloud/x/y.json .bash_history
"""
RUN_BY_OTHERS = """
    .git/config .git/hooks/pre-commit sub/.git/hooks/post-merge .git .GIT/config .husky/pre-push
    .github/workflows/ci.yml .gitlab-ci.yml Jenkinsfile .circleci/config.yml .bashrc .zshrc .profile
    .envrc .config/fish/config.fish .vscode/tasks.json .devcontainer/devcontainer.json .ssh/rc
    .pre-commit-config.yaml lib/sitecustomize.py lib/evil.pth .mcp.json
"""
ORDINARY = """
    a.py README.md .env.example .env.sample src/environment.py docs/env.md .gitignore
    .github/CODEOWNERS Makefile package.json setup.py conftest.py Dockerfile keyboard.py
    my.pem.md git/config monkey
    src/credentials/a.py profile bashrc .envoy.yaml id_rsa.pub hooks/use.ts
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    with Workspace(tmp_path) as made:
        yield made


@pytest.mark.parametrize("path", SECRETS.split())
def test_secrets(workspace: Workspace, path: str) -> None:
    assert workspace.sensitive(path, "read") in (
        "it looks like a file with secrets",
        "it looks like a private key",
    )


@pytest.mark.parametrize("path", RUN_BY_OTHERS.split())
def test_what_others_run(workspace: Workspace, path: str) -> None:
    assert workspace.sensitive(path, "write")


@pytest.mark.parametrize("path", ORDINARY.split())
def test_what_is_neither(workspace: Workspace, path: str) -> None:
    assert workspace.sensitive(path, "read") is None
    assert workspace.sensitive(path, "write") is None


def test_the_rules_are_the_owners(tmp_path: Path) -> None:
    own = SensitivePath("deploy/**", "write", "it is deployed at once")
    free = SensitivePath("*.pem", "read", "")
    with Workspace(tmp_path, sensitive=[free, *SENSITIVE_PATHS, own]) as workspace:
        assert workspace.sensitive("a/deploy/x", "write") == "it is deployed at once"
        assert workspace.sensitive("deploy/x", "read") is None
        assert workspace.sensitive("server.pem", "read") is None
        assert workspace.sensitive("./.env", "read")
    with Workspace(tmp_path, sensitive=()) as workspace:
        assert workspace.sensitive(".git/config", "write") is None


def test_what_the_host_runs_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "envs" / "mine"))
    with Workspace(tmp_path) as workspace:
        path = "envs/mine/lib/python3.11/site-packages/a.py"
        assert workspace.sensitive(path, "write") == "the program that runs this tool imports it"
        assert workspace.sensitive(path, "read") is None


# --- asking -------------------------------------------------------------------------------------


class Person:
    """Answers in turn, the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.asked: list[ApprovalRequest] = []

    async def __call__(self, request: ApprovalRequest) -> Approval | Denied:
        self.asked.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]


class Desk:
    def __init__(self, root: Path, ask: AskApproval | None) -> None:
        self.root = root
        self.workspace = Workspace(root)
        self.tools = {tool.name: tool for tool in file_tools(self.workspace, ask=ask)}
        (root / ".env").write_text("KEY=secret\n")
        (root / "code.py").write_text("KEY = 1\n")

    async def use(self, name: str, **arguments: Any) -> ToolResult:
        context = ToolContext(tool_call_id="call", tool_name=name)
        return await self.tools[name].execute(arguments, context)


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("read_file", {"path": ".env"}),
    ("read_file", {"path": ".//./.env"}),
    ("search_files", {"pattern": "KEY", "path": ".env"}),
    ("edit_file", {"path": ".env", "old": "KEY", "new": "K"}),
    ("write_file", {"path": ".git/hooks/pre-commit", "content": "evil"}),
    ("write_file", {"path": ".bashrc", "content": "evil"}),
]


@pytest.mark.parametrize(("name", "arguments"), CALLS)
async def test_without_anybody_to_ask_it_is_refused(
    tmp_path: Path, name: str, arguments: dict[str, Any]
) -> None:
    desk = Desk(tmp_path, None)
    result = await desk.use(name, **arguments)
    assert result.is_error
    assert "and there is nobody to ask" in result.plain_text
    assert "file_tools(workspace, ask=...)" in result.plain_text
    assert result.details == {"error": "sensitive"}
    assert "secret\n" not in result.plain_text
    assert sorted(os.listdir(tmp_path)) == [".env", "code.py"]


@pytest.mark.parametrize(("name", "arguments"), CALLS)
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (Approval.NO, "and the user has refused it"),
        (Approval.NEVER, "Do not try it again"),
        (Denied("use the test key"), "and the user says: use the test key"),
        (EOFError(), "nobody to ask"),
        (LookupError("x"), "asking failed (LookupError)"),
        ("gibberish", "and the user has refused it"),
    ],
)
async def test_a_no_is_a_no(
    tmp_path: Path, name: str, arguments: dict[str, Any], answer: Any, says: str
) -> None:
    person = Person(answer)
    desk = Desk(tmp_path, person)
    result = await desk.use(name, **arguments)
    assert result.is_error
    assert says in result.plain_text
    assert len(person.asked) == 1
    assert (tmp_path / ".env").read_text() == "KEY=secret\n"
    assert not (tmp_path / ".git").exists()


async def test_a_yes_is_for_this_call(tmp_path: Path) -> None:
    person = Person(Approval.ONCE, Approval.NO)
    desk = Desk(tmp_path, person)
    assert (await desk.use("read_file", path=".env")).plain_text == "KEY=secret"
    assert (await desk.use("read_file", path=".env")).is_error
    (first, _) = person.asked
    assert first.tool_name == "read_file"
    assert first.arguments["path"] == ".env"
    assert first.summary == "read_file wants to read '.env': it looks like a file with secrets"


async def test_a_yes_for_good_is_for_this_path(tmp_path: Path) -> None:
    person = Person(Approval.ALWAYS, Approval.NO)
    desk = Desk(tmp_path, person)
    (tmp_path / "a.pem").write_text("key\n")
    for name in ("read_file", "read_file"):
        assert not (await desk.use(name, path=".env")).is_error
    assert not (await desk.use("search_files", pattern="KEY", path=".env")).is_error
    assert len(person.asked) == 1
    assert (await desk.use("read_file", path="a.pem")).is_error


async def test_several_calls_ask_one_after_the_other(tmp_path: Path) -> None:
    asking = 0

    async def ask(request: ApprovalRequest) -> Approval:
        nonlocal asking
        asking += 1
        assert asking == 1
        await asyncio.sleep(0)
        asking -= 1
        return Approval.ONCE

    desk = Desk(tmp_path, ask)
    found = await asyncio.gather(*[desk.use("read_file", path=".env") for _ in range(3)])
    assert [result.is_error for result in found] == [False] * 3


async def test_a_search_of_a_folder_leaves_secrets_out(tmp_path: Path) -> None:
    desk = Desk(tmp_path, None)
    for regex in (False, True):
        result = await desk.use("search_files", pattern="KE[Y]" if regex else "KEY", regex=regex)
        assert result.plain_text == (
            "code.py:1: KEY = 1\n\n"
            "[Left out, because they may hold secrets: .env. Name one to ask.]"
        )
        assert not result.details["complete"]


async def test_other_files_are_not_asked_about(tmp_path: Path) -> None:
    person = Person(Approval.NO)
    desk = Desk(tmp_path, person)
    assert not (await desk.use("read_file", path="code.py")).is_error
    assert not (await desk.use("write_file", path="Makefile", content="all:\n")).is_error
    assert not (await desk.use("edit_file", path="code.py", old="1", new="2")).is_error
    assert ".env (" in (await desk.use("list_files")).plain_text
    assert person.asked == []


async def test_in_a_run_the_request_says_whose_it_is(tmp_path: Path) -> None:
    person = Person(Approval.ONCE)
    desk = Desk(tmp_path, person)
    batch = [call("read_file", path=".env"), call("write_file", path=".bashrc", content="x")]
    result, _ = await completed([batch, "ok"], *desk.tools.values())
    assert [message.is_error for message in results(result)] == [False, False]
    assert [request.tool_call_id for request in person.asked] == [
        message.tool_call_id for message in results(result)
    ]


def test_who_asks_must_be_a_function(workspace: Workspace) -> None:
    nonsense: Any = "ask"
    with pytest.raises(ConfigError, match="file_tools: ask must be a function"):
        file_tools(workspace, ask=nonsense)
