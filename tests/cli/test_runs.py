"""The run log from the shell, and what else can be asked without an agent."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command_line import CommandLine, calls, command_line, says


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
    ]
    said = await run.each(asked)
    listed, as_json, shown, same, other, no_diff, page, openai, anthropic, records, steps = said
    assert re.match(rf"{short}  [-0-9]+ [:0-9]+  done +http://.*#m +Write a file\n$", listed.out)
    assert json.loads(as_json.out)["run_id"] == logged.run_id
    assert "> Write a file\n● write_file(path='a.txt', content='x')\n✗ The call" in shown.out
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


async def test_what_is_intact_of_a_damaged_log_can_be_forked(tmp_path: Path) -> None:
    script = [calls("calculator", expression="2+3"), says("5."), says("Anew.")]
    async with command_line(tmp_path, script) as (run, _):
        await run("run", "-t", "calculator", "Sum")
        [logged] = run.store.runs()
        path = run.store.path_of(logged.run_id)
        path.write_bytes(path.read_bytes().replace(b"2+3", b"2+8"))
        refused, forked = await run.each(
            [("resume", "last"), ("fork", logged.run_id, "--before", "2", "Once more.")]
        )
    assert refused.code == 1
    assert "is damaged: its checksum is wrong (at line 3, byte " in refused.err
    assert f"clark-agent fork {logged.run_id} --before 2" in refused.err
    assert (forked.code, forked.out) == (0, "Anew.\n")


async def test_a_fork_goes_on_from_the_middle(tmp_path: Path) -> None:
    script = [calls("calculator", expression="2+3"), says("5."), says("Cinq."), says("Five.")]
    async with command_line(tmp_path, script) as (run, server):
        log = ("--log", str(tmp_path / "runs.db"))
        _, forked, alone, nothing, runs = await run.each(
            [
                ("run", *log, "-t", "calculator", "Sum"),
                ("fork", "last", "And in French?", *log),
                ("fork", "last", "--turn", "0", *log),
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


async def test_a_list_that_nobody_reads_ends_quietly(tmp_path: Path) -> None:
    there, here = os.pipe()
    os.close(there)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "clark_agent.cli", "models"),
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
