"""``clark-agent run`` without a terminal: what comes out, what is asked, and how it ends."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path

import pytest

from clark_agent.cli.options import DEFAULT_TOOLS
from clark_agent.run_log.records import RunFailed
from tests.cli.command_line import PATIENCE, CommandLine, Said, calls, command_line, hangs, says
from tests.transports.servers.bytes_server import Answer
from tests.transports.wires_chat import bodies

pytestmark = pytest.mark.slow


async def test_the_answer_goes_to_stdout_and_the_rest_to_stderr(tmp_path: Path) -> None:
    script = [calls("calculator", expression="17% * 2340"), says("It is ", "397.8.")]
    async with command_line(tmp_path, script) as (run, server):
        said = await run("run", "What", "is", "17%?")
    assert (said.code, said.out) == (0, "It is 397.8.\n")
    assert said.err.splitlines()[:2] == ["● calculator(expression='17% * 2340')", "  397.8"]
    assert "done · 2 turns · 1 tool call · 200 tokens in, 40 out" in said.err
    assert "\x1b" not in said.out + said.err
    request = bodies(server)[0]
    assert request["messages"][-1]["content"] == "What is 17%?"
    assert {tool["function"]["name"] for tool in request["tools"]} == {
        *DEFAULT_TOOLS,
        "read_earlier",
    }
    [logged] = run.store.runs()
    assert logged.outcome == "done"
    assert f"run {logged.run_id[:8]}" in said.err


async def test_options_and_piped_text_reach_the_model(tmp_path: Path) -> None:
    (tmp_path / "system.txt").write_text("Be a pirate.")
    async with command_line(tmp_path, [says("Aye."), says("Aye again.")]) as (run, server):
        options = ("--system", f"@{tmp_path}/system.txt", "-t", "none", "--no-log")
        first = await run.anew("run", *options, "Sum it up", given="a long text\n")
        second = await run("run", "-t", "calculator,finish", "-", given="all of it")
    assert (first.code, second.code) == (0, 0)
    said, again = bodies(server)
    assert [m["content"] for m in said["messages"]] == ["Be a pirate.", "Sum it up\n\na long text"]
    assert "tools" not in said
    assert again["messages"][-1]["content"] == "all of it"
    assert [t["function"]["name"] for t in again["tools"]] == [
        "calculator",
        "finish",
        "read_earlier",
    ]
    assert len(run.store.runs()) == 1  # the first had --no-log


async def test_what_changes_something_needs_leave(tmp_path: Path) -> None:
    script = [
        answer
        for name in ("refused", "allowed", "trusted")
        for answer in (calls("write_file", path=name, content="hello"), says("Well."))
    ]
    async with command_line(tmp_path, script) as (run, server):
        refused, allowed, trusted = await run.each(
            [
                ("run", "Write it"),
                ("run", "--allow", "write_file", "Write it"),
                ("run", "--yes", "Write it"),
            ]
        )
    assert sorted(path.name for path in run.root.iterdir()) == ["allowed", "trusted"]
    assert (refused.code, allowed.code, trusted.code) == (0, 0, 0)
    assert "no user is available to ask" in bodies(server)[1]["messages"][-1]["content"]
    assert "Created allowed" in bodies(server)[3]["messages"][-1]["content"]
    assert "Created trusted" in bodies(server)[5]["messages"][-1]["content"]
    assert "to allow it: --allow write_file, or --yes" in refused.err


async def test_without_a_terminal_secrets_are_refused(tmp_path: Path) -> None:
    """Whatever tools are allowed."""
    script = [
        calls("read_file", path=".env"),
        calls("write_file", path=".bashrc", content="x"),
        says("Well."),
    ]
    async with command_line(tmp_path, script) as (run, server):
        (run.root / ".env").write_text("KEY=1\n")
        said = await run("run", "--yes", "Look")
    refused, _, _ = said.err.partition("done · ")
    read, write = [bodies(server)[n]["messages"][-1]["content"] for n in (1, 2)]
    assert said.code == 0
    assert read == (
        "'.env' was not read: it looks like a file with secrets, and no user is available to ask. "
        "Go on without it, or tell the user that you need it"
    )
    assert write.startswith("'.bashrc' was not written: a shell or the system runs it at its start")
    assert refused.count("no user is available to ask") == 2
    assert [path.name for path in run.root.iterdir()] == [".env"]


async def test_tools_cannot_touch_the_log(tmp_path: Path) -> None:
    look = [calls("list_files"), calls("read_file", path="log/x.jsonl"), says("Nothing.")]
    async with command_line(tmp_path, look) as (run, server):
        (run.root / "log").mkdir()
        (run.root / "log" / "x.jsonl").write_text("{}")
        said = await run("run", "--log", "log", "Look around")
    listed, read = [bodies(server)[n]["messages"][-1]["content"] for n in (1, 2)]
    assert said.code == 0
    assert "log" not in listed
    assert "protected" in read


async def test_json_is_an_event_a_line_and_then_the_result(tmp_path: Path) -> None:
    script = [calls("current_time"), says("Late\x9b. \u202e")]
    async with command_line(tmp_path, script) as (run, _):
        said = await run("run", "--json", "How late is it?")
    rows = [json.loads(line) for line in said.out.splitlines()]
    kinds = [row["type"] for row in rows]
    assert (kinds[0], kinds[-2], kinds[-1]) == ("agent_start", "agent_end", "run_result")
    assert kinds.count("tool_execution_end") == 1
    assert rows[-1]["outcome"] == "done"
    assert rows[-1]["text"] == "Late\x9b. \u202e"
    assert rows[-1]["run_id"] == run.store.runs()[0].run_id
    assert not {"\x9b", "\u202e"} & set(said.out)
    assert said.err == ""


async def test_limits_and_failures_have_exit_codes(tmp_path: Path) -> None:
    fails = Answer(status=401, body=b'{"error": {"message": "no such key"}}')
    script = [calls("calculator", expression="1"), calls("calculator", expression="2"), fails]
    async with command_line(tmp_path, script) as (run, _):
        limit, failure = await run.each(
            [("run", "--max-iterations", "2", "Go on and on"), ("run", "Go on")]
        )
    assert (limit.code, failure.code) == (3, 1)
    assert "hit_max_iterations · 2 turns" in limit.err
    last = failure.err.splitlines()[-1]
    assert "no such key" in last
    assert "resume" not in last  # the key would still be wrong
    assert "Traceback" not in failure.err


async def test_what_a_model_says_cannot_move_the_terminal(tmp_path: Path) -> None:
    evil = says("a\x1b[2J", "\x1b]0;title\x07b\r", "c\x9b31m\u202e")
    async with command_line(tmp_path, [evil]) as (run, _):
        said = await run("run", "Hi")
    assert said.out == "a\\x1b[2J\\x1b]0;title\\x07bc\\x9b31m\\u202e\n"


async def test_an_interrupt_stops_it_cleanly_and_it_can_be_resumed(tmp_path: Path) -> None:
    async with command_line(tmp_path, [hangs("Once upon "), says("The end.")]) as (run, server):
        process = await run.start("run", "Tell a story")
        assert process.stdout is not None
        assert await process.stdout.read(5) == b"Once "
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        assert process.returncode == 130
        assert b"stopping" in err
        await server.client_gone()
        [logged] = run.store.runs()
        assert logged.outcome == "failed"
        resumed, again = await run.each([("resume", "last")] * 2)
    assert (resumed.code, resumed.out) == (0, "The end.\n")
    assert run.store.runs()[0].outcome == "done"
    assert again.code == 2
    assert "nothing to resume" in again.err


async def test_a_service_manager_can_stop_it_and_the_run_goes_on_elsewhere(tmp_path: Path) -> None:
    script = [calls("calculator", expression="6*7"), hangs("It is "), says("It is 42.")]
    async with command_line(tmp_path, script) as (run, server):
        process = await run.start("run", "Compute")
        assert process.stdout is not None
        assert await process.stdout.read(5) == b"It is"
        process.send_signal(signal.SIGTERM)
        _, err = await process.communicate()
        await server.client_gone()
        [logged] = run.store.runs()
        let_go = run.store.load(logged.run_id).records[-1].entry
        resumed = await run.anew("resume", "last")
    short = logged.run_id[:8]
    assert process.returncode == 143
    assert err.decode().splitlines()[-1] == (
        f"✗ stopped, and the run has not ended; to continue: clark-agent resume {short}"
    )
    assert (logged.outcome, isinstance(let_go, RunFailed)) == (None, False)
    assert (resumed.code, resumed.out) == (0, "It is 42.\n")
    assert [m["content"] for m in bodies(server)[-1]["messages"] if m["role"] == "tool"] == ["42"]


async def test_json_says_that_the_run_was_let_go(tmp_path: Path) -> None:
    async with command_line(tmp_path, [hangs("It is ")]) as (run, _):
        process = await run.start("run", "--json", "Compute")
        assert process.stdout is not None
        out = await process.stdout.readuntil(b'"delta":"It is "')
        process.send_signal(signal.SIGTERM)
        rest, _ = await process.communicate()
    last = json.loads((out + rest).splitlines()[-1])
    assert process.returncode == 143
    assert (last["outcome"], last["error"]) == ("let_go", "RunLetGo")


async def test_a_second_interrupt_leaves_at_once_and_the_log_stands(tmp_path: Path) -> None:
    stubborn = calls("shell", command="trap '' INT TERM; sleep 100 & sleep 99")
    script = [calls("calculator", expression="6*7"), stubborn]
    async with command_line(tmp_path, [*script, says("It was stopped.")]) as (run, server):
        process = await run.start("run", "--yes", "-t", "calculator,shell", "Work")
        assert process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            await process.stderr.readuntil(b"shell(")
            process.send_signal(signal.SIGINT)
            await process.stderr.readuntil(b"stopping")
            process.send_signal(signal.SIGINT)
            _, err = await process.communicate()
        assert process.returncode == 130
        assert b"exited before the run ended; to continue: clark-agent resume" in err
        unsaid = await run("resume", "last", "--yes")
        resumed = await run("resume", "last", "--yes", "--tools", "calculator,shell")
    assert (unsaid.code, unsaid.out) == (2, "")
    assert "  tools           calculator,shell\nto use them, pass them as options: " in unsaid.err
    assert "pass them as options: clark-agent" in unsaid.err
    assert unsaid.err.endswith("--tools calculator,shell\n")
    assert (resumed.code, resumed.out) == (0, "It was stopped.\n")
    results = [m for m in bodies(server)[-1]["messages"] if m["role"] == "tool"]
    assert results[0]["content"] == "42"  # it was not computed again, and nothing is lost
    assert len(results) == 2


async def test_a_reader_that_leaves_ends_it_quietly(tmp_path: Path) -> None:
    async with command_line(tmp_path, [says(*["line\n"] * 5_000)]) as (run, _):
        process = await run.start("run", "Talk")
        assert process.stdout is not None
        assert process.stderr is not None
        await process.stdout.readline()
        process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
        assert await process.stderr.read() == b""
        assert await process.wait() == 141


async def test_wrong_usage_is_one_sentence_and_2(tmp_path: Path) -> None:
    run = CommandLine(tmp_path, "openai:gpt-5.1")
    wrong = {
        ("run",): "missing prompt",
        ("run", "Hi"): "set OPENAI_API_KEY",
        ("run", "-m", "opnai:x", "Hi"): "Did you mean openai:?",
        ("run", "-t", "shel", "Hi"): "Did you mean shell?",
        ("run", "-C", "nowhere", "Hi"): "does not exist: create it first",
        ("run", "--log", "/dev/null", "Hi"): "is a file",
        ("rnu", "Hi"): "Did you mean run?",
        ("show", "nobody"): "no run 'nobody' in",
        ("models", "opnai"): "Did you mean openai?",
        ("gateway", "openai:x"): "set OPENAI_API_KEY",
        ("gateway", "ollama:x", "--token", "a=NOT_SET"): "is not set",
    }
    said = await run.each(wrong)
    for words, left in zip(wrong, said, strict=True):
        assert left.code == 2, (words, left)
        assert wrong[words] in left.err, (words, left)
        assert "Traceback" not in left.err
        assert left.out == ""


async def test_the_gateway_says_where_it_listens_or_why_it_cannot(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    process = await run.start("gateway", "ollama:x", "--port", "0")
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        line = (await process.stderr.readline()).decode()
        found = re.fullmatch(r"serving default at http://127.0.0.1:(\d+); Ctrl-C stops\n", line)
        assert found is not None, line
        second = await run("gateway", "ollama:x", "--port", found[1])
        _, writer = await asyncio.open_connection("127.0.0.1", int(found[1]))
        writer.close()
        process.terminate()
        await process.communicate()
    taken = "Address already in use; choose another port, or 0 for any that is free"
    why = f"cannot listen on 127.0.0.1 port {found[1]}: {taken}"
    assert (second.code, second.err) == (2, f"clark-agent: {why}\n")


async def test_where_an_error_came_from_is_shown_on_request(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    said = await run("show", "nobody", "--debug")
    assert said.code == 1
    assert "Traceback" in said.err
    assert "RunNotFound: no run 'nobody' in" in said.err


@pytest.mark.parametrize(
    ("status", "code"), [(401, "invalid_api_key"), (404, "model_not_found"), (400, "bad_request")]
)
async def test_what_stays_wrong_is_not_offered_again(
    tmp_path: Path, status: int, code: str
) -> None:
    body = json.dumps({"error": {"message": "no", "code": code}}).encode()
    refusal = Answer(status=status, headers={"content-type": "application/json"}, body=body)
    async with command_line(tmp_path, [refusal]) as (run, _):
        said = await run("run", "Hi")
    assert said.code == 1
    assert "✗ the model's stream failed (fatal)" in said.err
    assert "resume" not in said.err


async def test_a_missing_key_is_told_in_words_for_the_command_line(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    told = await run.each([("run", "-m", name, "Hi") for name in ("openai:gpt-5", "gemini:x")])
    for said, variables in zip(
        told, ("OPENAI_API_KEY", "GOOGLE_API_KEY or GEMINI_API_KEY"), strict=True
    ):
        assert said.code == 2
        assert f"needs a key: set {variables} in the environment, or choose another" in said.err
        assert "--model" in said.err
        assert "api_key" not in said.err


async def test_wrong_usage_is_one_sentence(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    said = await run.each(
        [("run", "--max-iteration", "x"), ("show",), ("nope",), ("-x",), ("run",)]
    )
    assert [(each.code, each.out, each.err) for each in said] == [
        (2, "", f"clark-agent: {text} --help'\n")
        for text in (
            "no such option '--max-iteration'. Did you mean '--max-iterations'? "
            "See 'clark-agent run",
            "missing argument 'RUN'. See 'clark-agent show",
            "unknown command 'nope'. To run an agent: clark-agent run \"…\". See 'clark-agent",
            "no such option '-x'. See 'clark-agent",
            'missing prompt: clark-agent run "Read notes.txt.". See \'clark-agent run',
        )
    ]


async def test_notes_that_cannot_be_written_do_not_stop_a_run(tmp_path: Path) -> None:
    script = [
        answer for _ in range(2) for answer in (calls("calculator", expression="1"), says("One."))
    ]
    async with command_line(tmp_path, script) as (run, _):
        full = await run.redirected("2>/dev/full", "run", "Count")
        closed = await run.redirected("2>&-", "run", "Count")
    assert full == closed == Said(0, "One.\n", "")


async def test_an_answer_that_cannot_be_written_ends_the_run_with_an_error(tmp_path: Path) -> None:
    async with command_line(tmp_path, [hangs("One "), hangs("One ")]) as (run, _):
        said = await run.redirected(">/dev/full", "run", "Count")
        events = await run.redirected(">/dev/full", "run", "--json", "Count")
    assert (said.code, events.code) == (1, 1)
    assert said.err.splitlines()[-1] == "clark-agent: No space left on device"
    assert events.err == "clark-agent: No space left on device\n"


async def test_a_closed_stdout_is_nowhere(tmp_path: Path) -> None:
    async with command_line(tmp_path, [says("One.")]) as (run, _):
        said = await run.redirected(">&- <&-", "run", "Count")
    assert (said.code, said.out) == (0, "")
    assert said.err.startswith("done · 1 turn")


async def test_a_signal_stops_a_run_that_cannot_say_so(tmp_path: Path) -> None:
    async with command_line(tmp_path, [hangs("One ")]) as (run, _):
        process = await run.start_redirected("2>/dev/full", "run", "Count")
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            await process.stdout.readexactly(3)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 143


async def test_without_a_command_there_is_the_help(tmp_path: Path) -> None:
    bare, helped = await CommandLine(tmp_path).each([(), ("--help",)])
    assert (bare.code, bare.out, bare.err) == (2, "", helped.out)
