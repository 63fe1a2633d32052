"""The run log from the shell, and what else can be asked without an agent."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from clark_agent.cli.app import run_command_line
from clark_agent.cli.commands.log import _opened
from clark_agent.cli.options import state_folder
from clark_agent.errors import ConfigError
from clark_agent.messages.wire import decode_json, encode_json
from clark_agent.run_log import JsonlStore, RunLog
from clark_agent.run_log._checksums import seal_all
from clark_agent.run_log.records import Record
from tests.cli.command_line import CommandLine, calls, command_line, hangs, says
from tests.run_log import stories
from tests.transports.wires_chat import bodies

pytestmark = pytest.mark.slow


async def test_a_run_is_listed_shown_replayed_and_exported(tmp_path: Path) -> None:
    script = [calls("write_file", path="a.txt", content="x"), says("I **cannot**.")]
    async with command_line(tmp_path, script) as (run, _):
        await run("run", "-t", "all", "Write a file")
    os.rename(run.root, tmp_path / "elsewhere")  # a replay needs neither folder, model nor key
    run.root.mkdir()
    run.env["CLARK_AGENT_MODEL"] = "openai:gpt-5.1"
    [logged] = run.store.runs()
    short = logged.run_id[:8]
    asked = [
        ("runs",),
        ("runs", "--json"),
        ("show", short),
        ("replay", "last"),
        ("replay", short, "--tools", "calculator"),
        ("diff", short, "last"),
        ("export", short),
        ("export", short, "-f", "openai"),
        ("export", short, "-f", "anthropic"),
        ("export", short, "-f", "records", "-o", "log.jsonl"),
        ("export", short, "-f", "trajectory"),
        ("prefix", short, "--require", "100"),
        ("export", short, "--html", "-o", "run.html"),
        ("export", short, "--html", "-f", "openai"),
        ("export", short, "--max-size", "1"),
    ]
    said = await run.each(asked)
    listed, as_json, shown, same, other, no_diff, page, openai, anthropic, records, steps = said[
        :11
    ]
    assert (said[11].code, said[11].out.count("\n")) == (0, 3)
    assert "100.0% of what could repeat was kept, in 2 requests" in said[11].out
    written, both, no_page = said[12:]
    html = (run.root / "run.html").read_text("utf-8")
    assert (written.code, written.out, written.err) == (0, "", "")
    assert f'"root":"{logged.run_id}"' in html
    assert "I **cannot**." in html
    assert (both.code, both.err) == (2, "clark-agent: --html and --format exclude each other\n")
    assert (no_page.code, no_page.err) == (2, "clark-agent: --max-size goes with --html\n")
    assert re.match(rf"{short}  [-0-9]+ [:0-9]+  done +http://.*#m +Write a file\n$", listed.out)
    assert json.loads(as_json.out)["run_id"] == logged.run_id
    assert "> Write a file\n● write_file(path='a.txt', content='x')\n  turn 1 · " in shown.out
    assert "I **cannot**." in shown.out
    assert (same.code, same.out) == (0, "identical\n")
    assert other.code == 1
    assert other.out.startswith("not identical: at the beginning, record 0 (run_began): tools")
    assert (no_diff.code, no_diff.out) == (0, "the same\n")
    assert "## Assistant\n\nI **cannot**." in page.out
    assert [m["role"] for m in json.loads(openai.out)][-2:] == ["tool", "assistant"]
    assert json.loads(anthropic.out)["messages"][0]["role"] == "user"
    assert records.code == 0
    assert (run.root / "log.jsonl").read_bytes() == run.store.path_of(logged.run_id).read_bytes()
    assert all(json.loads(line)["run_id"] == logged.run_id for line in steps.out.splitlines())


async def test_commands_in_a_python_of_their_own_say_the_same(tmp_path: Path) -> None:
    """The other tests run them in forks of a process that has imported everything."""
    async with command_line(tmp_path, [says("Ahoy.")]) as (run, _):
        said = await run.anew("run", "-t", "none", "Greet me")
    assert (said.code, said.out) == (0, "Ahoy.\n")
    commands = [
        *[(name, "last") for name in ("show", "follow", "replay", "prefix", "export")],
        ("export", "last", "--html", "-o", "run.html"),
        ("diff", "last", "last"),
        *[("runs",), ("waiting",), ("doctor", "--offline"), ("completion", "bash"), ("nope",)],
    ]
    for words in commands:
        assert await run.anew(*words) == await run(*words), words


async def test_one_variable_says_where_runs_are_logged(tmp_path: Path) -> None:
    script = [says("Ahoy."), says("Aye."), calls("write_file", path="a.txt", content="x")]
    async with command_line(tmp_path, script) as (run, _):
        run.env["CLARK_AGENT_STORE"] = str(tmp_path / "other.db")
        await run("run", "-t", "none", "Greet me")
        readers = ["replay", "prefix", "export", "show"]
        asked = [(command, "last") for command in readers]
        said = await run.each(
            [*asked, ("runs",), ("diff", "last", "last"), ("doctor", "--offline")]
        )
        forked = await run("fork", "last", "--root", str(run.root), "-t", "none", "Again")
        waits = await run("run", "--suspend", "Write a file")
    assert [each.code for each in said[:6]] == [0] * 6
    assert "Ahoy." in said[2].out
    assert f"{tmp_path / 'other.db'}, 1 runs" in said[6].out
    assert forked.code == 0
    assert "clark-agent decide " in waits.err
    assert "then: clark-agent resume " in waits.err
    assert "--log" not in waits.err
    assert run.store.runs() == []
    del run.env["CLARK_AGENT_STORE"]
    there = await run("runs", "--store", str(tmp_path / "other.db"))
    assert there.out.count("\n") == 3


async def test_what_is_intact_of_a_damaged_log_can_be_forked(tmp_path: Path) -> None:
    script = [calls("calculator", expression="2+3"), says("5."), says("Anew.")]
    async with command_line(tmp_path, script) as (run, _):
        await run("run", "-t", "calculator", "Sum")
        [logged] = run.store.runs()
        path = run.store.path_of(logged.run_id)
        path.write_bytes(path.read_bytes().replace(b"2+3", b"2+8"))
        refused, forked = await run.each(
            [
                ("resume", "last"),
                ("fork", logged.run_id, "--before", "2", "-t", "calculator", "Once more."),
            ]
        )
    assert refused.code == 1
    assert "is damaged: its checksum is wrong (at line 3, byte " in refused.err
    assert f"clark-agent fork {logged.run_id} --before 2" in refused.err
    assert (forked.code, forked.out) == (0, "Anew.\n")


async def test_a_log_with_a_hole_shows_what_can_be_read(tmp_path: Path) -> None:
    script = [calls("calculator", expression="1"), says("It is one.")]
    async with command_line(tmp_path, script) as (run, _):
        await run("run", "Count")
    [logged] = run.store.runs()
    path = run.store.path_of(logged.run_id)
    lines = path.read_text().splitlines()
    lines[3] = "{{{"
    path.write_text("\n".join([*lines, ""]))
    listed, shown, again = await run.each([("runs",), ("show", "last"), ("resume", "last")])
    assert listed.out.startswith(logged.run_id[:8])
    assert shown.code == 0
    assert "> Count\n" in shown.out
    assert "It is one.\n" not in shown.out  # nobody knows whether that is what was said
    assert re.search(r"^✗ the log of run .* is damaged: .*line 4", shown.out, re.MULTILINE)
    assert again.code != 0  # what is missing might be done again


async def test_each_step_has_its_time_its_tokens_and_its_cost(tmp_path: Path) -> None:
    script = [calls("calculator", expression="2+3"), says("5."), hangs("And")]
    async with command_line(tmp_path, script) as (run, _):
        await run("run", "Sum")
        shown, priced, wrong = await run.each(
            [
                ("show", "last"),
                ("show", "last", "--price", "10", "1000"),
                ("show", "last", "--price", "10", "-1"),
            ]
        )
    step = r"  turn {} · [0-9:]{{8}} · [0-9.]+ s · 100 tokens in, 20 out"
    asked = step.format(1) + r" · calculator [0-9.]+ s\n  5\n5\.\n" + step.format(2) + "\n"
    assert re.search(asked, shown.out)
    assert re.search(step.format(1) + r" · 0\.0210 · calculator", priced.out)
    assert priced.out.endswith("0.0420 in all\n")
    assert (wrong.code, "--price" in wrong.err) == (2, True)


async def test_a_fork_goes_on_from_the_middle(tmp_path: Path) -> None:
    script = [calls("calculator", expression="2+3"), says("5."), says("Cinq."), says("Five.")]
    async with command_line(tmp_path, script) as (run, server):
        log = ("--log", str(tmp_path / "runs.db"))
        _, forked, alone, nothing, runs = await run.each(
            [
                ("run", *log, "-t", "calculator", "Sum"),
                ("fork", "last", "And in French?", "-t", "calculator", *log),
                ("fork", "last", "--turn", "0", "-t", "calculator", *log),
                ("fork", "last", *log),
                ("runs", *log),
            ]
        )
        ids = [line[:8] for line in runs.out.splitlines()]
        parted, *replays = await run.each(
            [("diff", *ids[:2], *log), *[("replay", run_id, *log) for run_id in ids]]
        )
    assert (forked.out, alone.out) == ("Cinq.\n", "Five.\n")
    assert nothing.code == 2
    assert [replayed.out for replayed in replays] == ["identical\n"] * 3
    assert parted.code == 1
    assert len(server.requests) == 4


def moved(run: CommandLine, root: str) -> str:
    """Do what a command of the agent could do: rewrite the root in the log."""
    (logged,) = run.store.runs()
    path = run.store.path_of(logged.run_id)
    text = path.read_text().replace(f'"root":"{run.root}"', f'"root":"{root}"')
    records = [decode_json(line, Record) for line in text.splitlines()]
    seal_all(records)
    path.write_bytes(b"".join([encode_json(record) + b"\n" for record in records]))
    return logged.run_id


@pytest.mark.parametrize("words", [("resume", "last"), ("fork", "last", "Go on")])
async def test_a_log_that_was_changed_does_not_lead_elsewhere(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("geheim")
    read = calls("read_file", path="key")
    async with command_line(tmp_path, [hangs("I"), read, says("There.")]) as (run, server):
        process = await run.start("run", "Hi")
        assert process.stdout is not None
        await process.stdout.read(1)
        process.kill()
        await process.wait()
        run_id = moved(run, f"{secret}")
        refused = [await run(*words), await run(*words, "--yes")]
        assert len(server.requests) == 1
        async with run.terminal(*words) as terminal:
            await terminal.sees("Continue with these? [y/N]:")
            assert f"  root            {secret}\r\n" in terminal.text
            terminal.type("n\n")
            assert await terminal.ended() == 2
        assert len(server.requests) == 1
        said = await run(*words, "--root", ".")
        assert (said.code, said.out) == (0, "There.\n")
    for told in refused:
        assert told.code == 2
        assert f"clark-agent {words[0]} {run_id[:8]} --root {secret}\n" in told.err
    assert "geheim" not in str(server.requests)


async def test_what_a_log_says_can_be_agreed_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "else\u202ewhere"
    elsewhere.mkdir()
    (elsewhere / "note").write_text("Here.")
    script = [hangs("I"), calls("read_file", path="note"), says("There.")]
    async with command_line(tmp_path, script) as (run, server):
        process = await run.start("run", "Hi")
        assert process.stdout is not None
        await process.stdout.read(1)
        process.kill()
        await process.wait()
        moved(run, f"{elsewhere}")
        async with run.terminal("resume", "last") as terminal:
            await terminal.sees("Continue with these? [y/N]:")
            assert r"else\u202ewhere" in terminal.text
            terminal.type("y\n")
            assert await terminal.ended() == 0
    assert "Here." in bodies(server)[2]["messages"][-1]["content"]


async def test_the_log_is_outside_of_the_root_and_the_doctor_says_where(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    usual, inside = await run.each(
        [("doctor", "--offline"), ("doctor", "--offline", "--log", str(run.root / "runs"))]
    )
    assert f"ok   run log                  {tmp_path}/clark-agent/runs, 0 runs\n" in usual.out
    assert "is inside this folder, where commands of an agent can change it" in inside.out


@pytest.mark.parametrize(
    ("platform", "home", "folder"),
    [
        ("linux", "", "~/.local/state/clark-agent"),
        ("darwin", "", "~/Library/Application Support/clark-agent"),
        ("darwin", "/state", "/state/clark-agent"),
        ("linux", "not/absolute", "~/.local/state/clark-agent"),
    ],
)
def test_where_what_should_last_is_kept(
    monkeypatch: pytest.MonkeyPatch, platform: str, home: str, folder: str
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setenv("XDG_STATE_HOME", home)
    assert state_folder() == Path(folder).expanduser()


async def test_a_list_that_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    there, here = os.pipe()
    os.close(there)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "clark_agent", "models"),
        env=CommandLine(tmp_path).env,
        stdout=here,
        stderr=subprocess.PIPE,
    )
    os.close(here)
    _, err = await process.communicate()
    assert (process.returncode, err) == (141, b"")


async def test_doctor_says_what_is_there_and_never_a_key(tmp_path: Path) -> None:
    async with command_line(tmp_path, [says("Hello.")]) as (run, _):
        run.env |= {"OPENAI_API_KEY": "sk-very-secret", "XAI_API_KEY": " "}
        offline, models = await run.each([("doctor", "--offline"), ("models",)])
    assert offline.code == 0
    assert re.search(r"^ok +keys +OPENAI_API_KEY$", offline.out, re.MULTILINE)
    assert re.search(r"^-- +keys that are not set .*XAI_API_KEY", offline.out, re.MULTILINE)
    assert re.search(r"^openai:MODEL +ready$", models.out, re.MULTILINE)
    assert re.search(r"^xai:MODEL +set XAI_API_KEY$", models.out, re.MULTILINE)
    here = "needs a server at http://localhost:11434/v1"
    assert re.search(rf"^ollama:MODEL +{here}$", models.out, re.MULTILINE)
    for package in ("psycopg", "dbos", "temporalio", "mcp"):
        assert re.search(rf"^ok +{package} +[0-9]", offline.out, re.MULTILINE)
    assert "very-secret" not in offline.out + offline.err + models.out


@pytest.mark.parametrize(
    ("words", "count", "expected"),
    [
        (["clark-agent", "re"], 1, {"resume", "replay"}),
        (["clark-agent", "run", "--tools", "calculator,sh"], 3, {"calculator,shell"}),
        (["clark-agent", "show", ""], 2, {"last"}),
        (["clark-agent", "show", "3f"], 2, set()),
        (["clark-agent", "models", "open"], 2, {"openai", "openrouter", "openai-responses"}),
    ],
)
async def test_a_shell_completes(
    tmp_path: Path, words: list[str], count: int, expected: set[str]
) -> None:
    run = CommandLine(tmp_path)
    run.env |= {
        "_CLARK_AGENT_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(count),
    }
    said = await run()
    assert {line.partition(",")[2] for line in said.out.splitlines() if line} == expected


async def test_every_command_has_help_with_examples(tmp_path: Path) -> None:
    from clark_agent.cli.app import COMMANDS

    run = CommandLine(tmp_path)
    *said, script = await run.each(
        [("--help",), *[(name, "--help") for name in COMMANDS], ("completion", "bash")]
    )
    for helped in said:
        assert (helped.code, helped.err) == (0, "")
        assert "Examples:\n    " in helped.out
    assert "_CLARK_AGENT_COMPLETE=bash_complete" in script.out
    assert "Export a run as Markdown, JSON or HTML." in said[0].out


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("tools", "[FILE|URL] [-- COMMAND...]"),
        ("call", "[FILE|URL] TOOL [ARG]... [-- COMMAND...]"),
        ("read", "[FILE|URL] URI [-- COMMAND...]"),
        ("prompts", "[FILE|URL] [NAME [ARG]...] [-- COMMAND...]"),
    ],
)
def test_the_usage_of_mcp_names_what_follows_the_target(
    command: str, usage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command_line(["mcp", command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.partition("\n\n")[0].split())
    assert shown == f"Usage: clark-agent mcp {command} [OPTIONS] {usage}"


async def test_the_spans_of_a_run_are_drawn_at_its_end_and_later(tmp_path: Path) -> None:
    script = [calls("calculator", expression="1+2"), says("It is three.")]
    async with command_line(tmp_path, script) as (run, _):
        said = await run("run", "--trace", "-t", "calculator", "1 + 2?")
        shown = await run("show", "last", "--trace")
        refused = await run.each([("run", "--trace", option, "Hi") for option in LOG_OPTIONS])
    assert said.code == shown.code == 0
    assert said.out == "It is three.\n"
    for text in (said.err, shown.out):
        lines = text[text.index("invoke_agent") :].splitlines()
        drawn = [re.sub(r"(?<=\w)  .*", "", line) for line in lines]
        model = drawn[2].rpartition("chat ")[2]
        assert drawn == [
            "invoke_agent",
            "├─ turn 1",
            f"│  ├─ chat {model}",
            "│  └─ execute_tool calculator",
            "└─ turn 2",
            f"   └─ chat {model}",
        ]
        assert lines[0].endswith("done")
    for each, option in zip(refused, LOG_OPTIONS, strict=True):
        assert each.code == 2
        assert f"--trace does not go with {option}" in each.err


LOG_OPTIONS = ("--json", "--no-log")


async def test_the_id_of_a_run_is_not_that_of_its_child(tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(
        "from clark_agent import Agent\n"
        "from clark_agent.testing import ScriptedStream, call\n"
        "child = Agent(ScriptedStream(['Here.']), name='child')\n"
        "parent = Agent(ScriptedStream([call('child', task='x'), 'Done.']), name='parent',\n"
        "               tools=[child.as_tool('Finds.')])\n"
    )
    async with command_line(tmp_path, []) as (run, _):
        run.env["PYTHONPATH"] = str(tmp_path)
        said = await run("run", "--yes", "--trace", "--agent", "family:parent", "Go.")
        with_both = await run("runs")
        (child,) = [each.run_id for each in run.store.runs() if each.depth]
        (root,) = [each for each in run.store.runs() if not each.depth]
        path = run.store.path_of(root.run_id)
        path.rename(path.with_suffix(".elsewhere"))
        without_parent = await run.each([("runs",), ("show", "last")])
        path.with_suffix(".elsewhere").rename(path)
    assert (len(with_both.out.splitlines()), child[:8] in with_both.out) == (1, False)
    assert without_parent[0].out.startswith(child[:8])
    assert f"run       {child}" in without_parent[1].out
    (root,) = [each for each in run.store.runs() if not each.depth]
    assert said.code == 0, said.err
    assert f"run {root.run_id[:8]}" in said.err
    assert "\n│  └─ execute_tool child" in said.err
    assert "\n│     └─ invoke_agent child" in said.err


ABOUT_RUNS = [
    ("runs",), ("show", "x"), ("show", "x", "--trace"), ("replay", "x"), ("diff", "x", "y"),
    ("prefix", "x"), ("export", "x", "--html"), ("waiting",), ("decide", "x", "allow"),
    ("steer", "x", "Hi"), ("cancel", "x"), ("follow", "x"), ("resume", "x"), ("fork", "x", "Hi"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "name"),
    [
        *[(words, "none.db") for words in ABOUT_RUNS],
        (("runs",), "no/such/none.db"),
        (("runs",), "none"),
    ],
)
def test_commands_about_runs_create_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command_line([*words, "--store", name]) == 2
    assert f"there is no log at {tmp_path / name}: " in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_damaged_logs_that_cannot_be_listed_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(stories.tell("plain", RunLog(JsonlStore(tmp_path))))
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "new.jsonl").write_text('{"v":2,')
    assert run_command_line(["runs", "--log", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == "not listed: the first record of broken.jsonl cannot be read\n"
    assert len(said.out.splitlines()) == 1


def test_an_export_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    path.write_text("the last export")
    path.chmod(0o640)

    def break_off() -> None:
        with _opened(str(path)) as file:
            file.write("half of the next one")
            file.flush()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_off()
    assert path.read_text() == "the last export"
    with _opened(str(path)) as file:
        file.write("all of it")
    assert path.read_text() == "all of it"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    new = tmp_path / "new.html"
    with _opened(str(new)) as file:
        file.write("private")
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["new.html", "run.html"]
    with pytest.raises(ConfigError, match=r"cannot write .*: No such file"), _opened("/no/such/x"):
        raise AssertionError
