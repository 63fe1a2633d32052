"""Files that a person is asked about: secrets before they are read, and what others will run."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clark_agent import (
    AgentContext,
    BeforeToolCallContext,
    CancellationToken,
    ConfigError,
    LoopConfig,
    Rewrite,
    RunAborted,
    RunIdentity,
    ToolCall,
    ToolContext,
    ToolResult,
    run,
)
from clark_agent.testing import ScriptedStream, call
from clark_agent.toolkit import SENSITIVE_PATHS, Approval, SensitivePath, Workspace, file_tools
from clark_agent.toolkit.approval import ApprovalGate, ApprovalRequest, AskApproval, Denied
from tests.engine.support import Work, completed, failed, let_others_run, results, texts
from tests.toolkit.commands import unmarked

SECRETS = """
    .env .env.local web/.env.production deploy/prod.env .ENV .netrc sub/.netrc .aws/credentials
    home/.aws/config .ssh/config .ssh/id_rsa id_rsa keys/id_ed25519 server.pem tls/server.key a.p12
    .docker/config.json .kube/config .git-credentials .npmrc .pypirc credentials.json secrets.yaml
    infra/terraform.tfstate .config/gcloud/x/y.json .bash_history .env~ etc/ssh/ssh_host_rsa_key
    .local/share/keyrings/login.keyring
"""
RUN_BY_OTHERS = """
    .git/config .git/hooks/pre-commit sub/.git/hooks/post-merge .git .GIT/config .husky/pre-push
    .github/workflows/ci.yml .gitlab-ci.yml Jenkinsfile .circleci/config.yml .bashrc .zshrc .profile
    .envrc .config/fish/config.fish .vscode/tasks.json .devcontainer/devcontainer.json .ssh/rc
    .pre-commit-config.yaml lib/sitecustomize.py lib/evil.pth .mcp.json
    .emacs.d/init.el .tmux.conf .direnvrc project.git/hooks/update
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


@pytest.mark.parametrize(("first", "asked"), [(".env", True), ("deploy/**", False)])
def test_the_first_rule_that_fits_decides(tmp_path: Path, first: str, asked: bool) -> None:
    """Not the one that fits a longer part of the path."""
    rules = [SensitivePath(".env", "read", "a secret"), SensitivePath("deploy/**", "read", "")]
    rules.sort(key=lambda rule: rule.pattern != first)
    with Workspace(tmp_path, sensitive=rules) as workspace:
        assert workspace.sensitive("a/deploy/.env", "read") == ("a secret" if asked else None)


def test_rules_that_would_never_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="access must be 'read' or 'write', not 'wirte'"):
        SensitivePath("deploy/**", "wirte", "it is deployed at once")  # type: ignore[arg-type]
    for pattern in ("", "/", 3):
        with pytest.raises(ConfigError, match="pattern must be a path"):
            SensitivePath(pattern, "read", "why")  # type: ignore[arg-type]
    for rules in (".env", [".env"]):
        with pytest.raises(ConfigError, match="must be a list of SensitivePath"):
            Workspace(tmp_path, sensitive=rules)  # type: ignore[arg-type]


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
        return unmarked(await self.tools[name].execute(arguments, context))


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
    assert "and no user is available to ask" in result.plain_text
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
        (EOFError(), "no user is available to ask"),
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
    assert first.path == ".env"
    assert first.text == (
        "read_file(path='.env', offset=1, limit=1000)\n[.env: it looks like a file with secrets]"
    )


def talking(conversation_id: str | None) -> AgentContext:
    return AgentContext(identity=RunIdentity.root(conversation_id=conversation_id))


@pytest.mark.parametrize("answer", [Approval.ALWAYS, Approval.NEVER])
async def test_an_answer_for_good_is_for_this_path(tmp_path: Path, answer: Approval) -> None:
    person = Person(answer, Approval.NO)
    desk = Desk(tmp_path, person)
    (tmp_path / "a.pem").write_text("key\n")
    model: list[ToolCall | str] = [
        call("read_file", path=".env"),
        call("read_file", path="./.env"),
        call("search_files", pattern="KEY", path=".env"),
        call("read_file", path="a.pem"),
        "ok",
    ]
    result, _ = await completed(model, *desk.tools.values())
    refused = answer is Approval.NEVER
    assert [message.is_error for message in results(result)] == [refused] * 3 + [True]
    assert [request.path for request in person.asked] == [".env", "a.pem"]


@pytest.mark.parametrize("conversations", [("a", "b"), ("a", None), (None, "a"), (None, None)])
async def test_an_answer_for_good_is_for_this_conversation(
    tmp_path: Path, conversations: tuple[str | None, ...]
) -> None:
    person = Person(Approval.ALWAYS, Approval.NO)
    desk = Desk(tmp_path, person)
    refused: list[bool] = []
    for conversation_id in (conversations[0], *conversations):
        model = ScriptedStream([call("read_file", path=".env"), "ok"])
        context = talking(conversation_id)
        result, _ = await completed(model, *desk.tools.values(), context=context)
        refused += [message.is_error for message in results(result)]
    is_one = conversations[0] is not None
    assert refused == [False, not is_one, True]
    assert len(person.asked) == 3 - is_one


async def test_one_call_is_one_question(tmp_path: Path) -> None:
    """Also if there is a reason to ask about reading and one to ask about writing."""
    person = Person(Approval.ALWAYS, Approval.NO)
    desk = Desk(tmp_path, person)
    (tmp_path / ".envrc").write_text("KEY=1\n")
    edits = [call("edit_file", path=".envrc", old=f"={n}", new=f"={n + 1}") for n in (1, 2)]
    result, _ = await completed([*edits, "ok"], *desk.tools.values())
    assert [message.is_error for message in results(result)] == [False, False]
    (asked,) = person.asked
    assert asked.text.splitlines()[1:] == [
        "[.envrc: it looks like a file with secrets]",
        "[.envrc: a shell or the system runs it at its start]",
        *("--- .envrc", "+++ .envrc", "@@ -1 +1 @@", "-KEY=1", "+KEY=2"),
    ]
    assert (await desk.use("edit_file", path=".envrc", old="=3", new="=4")).plain_text == (
        "'.envrc' was not read or written: it looks like a file with secrets; a shell or the "
        "system runs it at its start, and the user has refused it"
    )


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


@pytest.mark.slow
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
    # The two run at the same time, in threads: either may ask first.
    assert sorted([request.tool_call_id for request in person.asked]) == [
        message.tool_call_id for message in results(result)
    ]


# --- with a gate --------------------------------------------------------------------------------


def gated(root: Path, *answers: Any, **settings: Any) -> tuple[Desk, ApprovalGate, Person]:
    person = Person(*answers)
    gate = ApprovalGate(person, **settings)
    return Desk(root, gate.ask), gate, person


SENSITIVE = {
    "read_file": call("read_file", path=".env"),
    "read_file, from the start": call("read_file", path=".env", offset=1),
    "search_files": call("search_files", pattern="KEY", path=".env"),
    "write_file": call("write_file", path=".bashrc", content="x\n"),
    "edit_file": call("edit_file", path=".env", old="KEY", new="K"),
}


@pytest.mark.parametrize("made", SENSITIVE.values(), ids=SENSITIVE)
@pytest.mark.parametrize(
    "settings",
    [{}, {"tools": ["read_file", "search_files", "write_file"]}, {"always": ["write_file"]}],
    ids=str,
)
@pytest.mark.parametrize("answer", [Approval.ONCE, Approval.NO])
async def test_the_gate_and_the_tool_ask_one_question(
    tmp_path: Path, made: Any, settings: Any, answer: Approval
) -> None:
    """Whoever of them asks, the person sees the whole call and why it is asked about."""
    desk, gate, person = gated(tmp_path, answer, **settings)
    result, _ = await completed(ScriptedStream([made, "ok"]), *desk.tools.values(), plugins=[gate])
    (asked,) = person.asked
    first, reason, *_ = asked.text.splitlines()
    assert first.startswith(f"{made.name}(")
    assert reason.startswith(f"[{made.arguments['path']}: ")
    assert [message.is_error for message in results(result)] == [answer is Approval.NO]
    assert (tmp_path / ".bashrc").exists() == (
        made.name == "write_file" and answer is Approval.ONCE
    )


async def test_always_for_a_tool_is_not_for_secrets(tmp_path: Path) -> None:
    desk, gate, person = gated(tmp_path, Approval.ALWAYS, Approval.NO)
    paths = ("a", "b", ".bashrc")
    model = ScriptedStream([*[call("write_file", path=path, content="x") for path in paths], "ok"])
    result, _ = await completed(model, *desk.tools.values(), plugins=[gate])
    assert [message.is_error for message in results(result)] == [False, False, True]
    assert [(request.arguments["path"], request.path) for request in person.asked] == [
        ("a", None),
        (".bashrc", ".bashrc"),
    ]


async def test_never_for_a_tool_is_for_secrets_too(tmp_path: Path) -> None:
    desk, gate, person = gated(tmp_path, Approval.NEVER)
    model = ScriptedStream(
        [*[call("write_file", path=path, content="x") for path in ("a", ".bashrc")], "ok"]
    )
    result, _ = await completed(model, *desk.tools.values(), plugins=[gate])
    assert [message.is_error for message in results(result)] == [True, True]
    assert len(person.asked) == 1


async def test_an_approval_is_for_the_call_that_was_shown(tmp_path: Path) -> None:
    """What another plugin makes of the call behind the gate was not shown, and is asked about."""

    class Redirect:
        is_interactive = True

        def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Rewrite:
            return Rewrite({**ctx.args, "path": ".bashrc"})

    desk, gate, person = gated(tmp_path, Approval.ONCE, Approval.NO)
    model = ScriptedStream([call("write_file", path="harmless", content="x"), "ok"])
    result, _ = await completed(model, *desk.tools.values(), plugins=[gate, Redirect()])
    assert [request.arguments["path"] for request in person.asked] == ["harmless", ".bashrc"]
    assert [message.is_error for message in results(result)] == [True]
    assert sorted(os.listdir(tmp_path)) == [".env", "code.py"]


async def test_an_approval_is_used_once(tmp_path: Path) -> None:
    person = Person(Approval.ONCE, Approval.NO)
    gate = ApprovalGate(person)
    said: list[Approval | Denied] = []

    async def ask_twice(args: Any, ctx: ToolContext) -> str:
        request = ApprovalRequest("work", args, "work()", ctx.tool_call_id, ctx.identity)
        said.extend([await gate.ask(request), await gate.ask(request)])
        return "done"

    await completed([call("work"), "ok"], Work("work", ask_twice), plugins=[gate])
    assert said == [Approval.ONCE, Approval.NO]
    assert len(person.asked) == 2


async def test_questions_of_the_gate_and_of_tools_wait_for_each_other(tmp_path: Path) -> None:
    open_questions = 0
    asked: list[str] = []

    async def ask(request: ApprovalRequest) -> Approval:
        nonlocal open_questions
        open_questions += 1
        assert open_questions == 1
        asked.append(request.tool_name)
        await let_others_run()
        open_questions -= 1
        return Approval.ONCE

    gate = ApprovalGate(ask)
    tools = tuple(Desk(tmp_path, gate.ask).tools.values())
    batch = [call("read_file", path=".env"), call("write_file", path="a", content="x")]
    config = LoopConfig(stream=ScriptedStream([batch, "ok"]), tools=tools, plugins=[gate])
    configs = [config.replace(stream=ScriptedStream([batch, "ok"])) for _ in range(3)]
    found = await asyncio.gather(*[run("go", AgentContext(), each) for each in configs])
    assert [m.is_error for result in found for m in results(result)] == [False] * 6
    assert sorted(asked) == ["read_file"] * 3 + ["write_file"] * 3


@pytest.mark.parametrize("allowed", [(), ("write_file",)])
async def test_a_gate_without_anybody_refuses(tmp_path: Path, allowed: tuple[str, ...]) -> None:
    gate = ApprovalGate(None, always=allowed)
    desk = Desk(tmp_path, gate.ask)
    model = ScriptedStream([SENSITIVE["read_file"], SENSITIVE["write_file"], "ok"])
    result, _ = await completed(model, *desk.tools.values(), plugins=[gate])
    read, write = texts(result)
    assert read == (
        "'.env' was not read: it looks like a file with secrets, and no user is available to ask. "
        "Go on without it, or tell the user that you need it"
    )
    assert "no user is available to ask" in write
    assert sorted(os.listdir(tmp_path)) == [".env", "code.py"]


async def test_a_person_who_is_slow(tmp_path: Path) -> None:
    async def ask(request: ApprovalRequest) -> Approval:
        await asyncio.Event().wait()
        raise AssertionError

    desk = Desk(tmp_path, ApprovalGate(ask, timeout=0.01).ask)
    assert (
        "the user did not answer in time" in (await desk.use("read_file", path=".env")).plain_text
    )


async def test_a_run_that_is_cancelled_takes_the_question_back(tmp_path: Path) -> None:
    token = CancellationToken()
    withdrawn = False

    async def ask(request: ApprovalRequest) -> Approval:
        nonlocal withdrawn
        token.cancel("enough")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            withdrawn = True
            raise
        raise AssertionError

    gate = ApprovalGate(ask, always=["write_file"])
    desk = Desk(tmp_path, gate.ask)
    model = ScriptedStream([SENSITIVE["write_file"], "ok"])
    await failed(RunAborted, model, *desk.tools.values(), plugins=[gate], signal=token)
    assert withdrawn
    assert not (tmp_path / ".bashrc").exists()


def test_who_asks_must_be_a_function(workspace: Workspace) -> None:
    nonsense: Any = "ask"
    with pytest.raises(ConfigError, match="file_tools: ask must be a function"):
        file_tools(workspace, ask=nonsense)
