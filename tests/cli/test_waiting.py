"""Runs that wait, from the shell: what they wait for, who decides it, and how they go on."""

from __future__ import annotations

import asyncio
import getpass
import json
import re
from pathlib import Path
from typing import Any

import pytest

from clark_agent.run_log import SqliteStore
from tests.cli.command_line import (
    PATIENCE,
    CommandLine,
    Said,
    calls,
    calls_all,
    command_line,
    hangs,
    says,
)
from tests.transports.wires_chat import bodies

pytestmark = pytest.mark.slow

USER = getpass.getuser()
QUESTION = {"question": "Which colour?", "choices": ["red", "blue"]}


def writes(*names: str) -> list[tuple[str, dict[str, Any]]]:
    return [("write_file", {"path": name, "content": "x"}) for name in names]


async def suspended(run: CommandLine, *words: str) -> str:
    """Start a run that is suspended at once, and return its id."""
    said = await run("run", "--suspend", *words, "Do it")
    assert said.code == 4, said
    return run.store.runs()[0].run_id


def results(request: dict[str, Any]) -> list[str]:
    return [m["content"] for m in request["messages"] if m["role"] == "tool"]


# --- suspending, deciding, going on -----------------------------------------------------------


async def test_a_run_is_suspended_decided_and_resumed(tmp_path: Path) -> None:
    script = [calls("write_file", path="a.txt", content="hello"), says("Written.")]
    async with command_line(tmp_path, script) as (run, server):
        began = await run("run", "--suspend", "Write it")
        [logged] = run.store.runs()
        short = logged.run_id[:8]
        waits, decided, resumed = await run.each(
            [("resume", short), ("decide", short, "allow"), ("resume", short)]
        )
    assert (began.code, began.out) == (4, "")
    lines = began.err.splitlines()
    assert lines[0].startswith("● write_file")
    assert "suspended · 1 turn · 0 tool calls" in began.err
    shown = [
        f"{short}/1/0  write_file(path='a.txt', content='hello')",
        lines[-3],
        f'  clark-agent decide {short}/1/0 allow    # or: deny "why", '
        """arguments '{…}', result "…\"""",
        f"then: clark-agent resume {short}",
    ]
    assert lines[-4:] == shown
    assert re.fullmatch(r"  approval_gate asks for permission · since [-0-9]+ [:0-9]+", shown[1])
    assert (waits.code, waits.out) == (4, "")
    assert waits.err.splitlines() == [f"the run {short} still waits", *shown]
    assert (decided.code, decided.err) == (0, "")
    assert decided.out.splitlines() == [
        f"{short}/1/0  write_file allowed by {USER}",
        f"to go on: clark-agent resume {short}",
    ]
    assert (resumed.code, resumed.out) == (0, "Written.\n")
    assert (run.root / "a.txt").read_text() == "hello"
    assert "Created a.txt" in results(bodies(server)[1])[0]
    assert run.store.runs()[0].outcome == "done"


async def test_each_decision_has_its_effect(tmp_path: Path) -> None:
    batch = calls_all(*writes("a", "b", "c", "d"), ("ask_user", QUESTION))
    async with command_line(tmp_path, [batch, says("Well.")]) as (run, server):
        options = ("-t", "write_file,ask_user")
        run_id = await suspended(run, *options)
        short = run_id[:8]
        said = await run.each(
            [
                ("decide", short, "allow"),
                ("decide", f"{short}/1/0", "deny", "not this one", "--by", "ada"),
                ("decide", f"{short}/1/1", "deny", "--reason", "nor this"),
                ("decide", f"{short}/1/2", "arguments", '{"path": "new", "content": "y"}'),
                ("decide", f"{short}/1/3", "result", "done by hand"),
                ("decide", f"{short}/1/4", "allow"),
                ("decide", short, "result", "blue"),
                ("decide", short, "allow"),
                ("resume", short, *options),
            ]
        )
    several, denied, *_, last_write, has_run, answered, nothing, resumed = said
    assert several.code == 2
    assert several.err.startswith(f"clark-agent: the run {short} has 5 open requests:\n{short}/1/0")
    assert several.err.endswith(f"name one of them: clark-agent decide {short}/1/0 …\n")
    assert denied.out.splitlines()[:3] == [
        f"{short}/1/0  write_file denied (not this one) by ada",
        "still open:",
        f"{short}/1/1  write_file(path='b', content='x')",
    ]
    assert f"{short}/1/4  ask_user(" in last_write.out
    assert (has_run.code, has_run.out) == (2, "")
    assert has_run.err == (
        f"clark-agent: ask_user has run and waits for its result: decide {short}/1/4 with "
        'result "…" or deny\n'
    )
    assert answered.out.splitlines()[-1] == f"to go on: clark-agent resume {short}"
    assert (nothing.code, nothing.err) == (
        2,
        f"clark-agent: the run {short} waits for no decision\n",
    )
    assert (resumed.code, resumed.out) == (0, "Well.\n")
    assert [path.name for path in run.root.iterdir()] == ["new"]
    told = results(bodies(server)[1])
    assert told[0] == "The call was not run: it was refused: not this one"
    assert told[1] == "The call was not run: it was refused: nor this"
    assert "Created new" in told[2]
    assert told[3:] == ["done by hand", "blue"]


async def test_a_decision_goes_on_at_once_if_it_is_the_last(tmp_path: Path) -> None:
    batch = calls_all(*writes("a", "b"))
    async with command_line(tmp_path, [batch, says("Well.")]) as (run, _):
        run_id = await suspended(run)
        first, second = await run.each(
            [
                ("decide", f"{run_id[:8]}/1/0", "allow", "--resume"),
                ("decide", run_id[:8], "deny", "--resume", "--json"),
            ]
        )
    assert first.code == 4
    assert "still open:" in first.out
    rows = [json.loads(line) for line in second.out.splitlines()]
    assert second.code == 0
    assert rows[0] == {
        "request_id": rows[0]["request_id"],
        "run_id": run_id,
        "decision": {"decision": "deny"},
        "by": USER,
        "waiting": [],
    }
    assert (rows[-1]["type"], rows[-1]["outcome"]) == ("run_result", "done")
    assert [path.name for path in run.root.iterdir()] == ["a"]


async def test_a_run_that_goes_on_is_suspended_again_unless_it_should_not(tmp_path: Path) -> None:
    script = [calls("write_file", path=name, content="x") for name in "abc"]
    async with command_line(tmp_path, [*script, says("Well.")]) as (run, _):
        short = (await suspended(run))[:8]
        said = await run.each(
            [
                ("decide", short, "allow", "--resume"),
                ("decide", short, "allow"),
                ("resume", short, "--no-suspend"),
            ]
        )
    again, _, resumed = said
    assert again.code == 4
    assert f"{short}/2/0  write_file(path='b', content='x')" in again.err
    # What was allowed has run; then nobody is asked, because there is no terminal.
    assert (resumed.code, resumed.out) == (0, "Well.\n")
    assert "no user is available to ask" in resumed.err
    assert sorted(path.name for path in run.root.iterdir()) == ["a", "b"]


async def test_what_a_person_at_the_terminal_is_not_asked_again(tmp_path: Path) -> None:
    script = [calls("write_file", path=name, content="x") for name in "ab"]
    async with command_line(tmp_path, [*script, says("Well.")]) as (run, _):
        short = (await suspended(run))[:8]
        await run("decide", short, "allow")
        async with run.terminal("resume", short, "--no-suspend") as terminal:
            await terminal.sees("or type what to do instead\r\n? ")
            assert "May it run?  write_file(path='b'" in terminal.text
            assert "May it run?  write_file(path='a'" not in terminal.text
            terminal.type("y\n")
            assert await terminal.ended() == 0
    assert sorted(path.name for path in run.root.iterdir()) == ["a", "b"]


async def test_a_log_elsewhere_is_in_every_command_that_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "my runs.db"
    log = ("--log", str(path))
    async with command_line(tmp_path, [calls_all(*writes("a", "b")), says("Well.")]) as (run, _):
        began = await run("run", "--suspend", *log, "Do it")
        store = SqliteStore(path)
        short = store.runs()[0].run_id[:8]
        first, last = await run.each(
            [
                ("decide", *log, f"{short}/1/1", "allow"),
                ("decide", *log, short, "allow"),
            ]
        )
        resumed = await run("resume", *log, short)
        store.close()
    assert f"  clark-agent decide --log '{path}' {short}/1/0 allow    # or" in began.err
    assert began.err.endswith(f"then: clark-agent resume --log '{path}' {short}\n")
    assert f"  clark-agent decide --log '{path}' {short}/1/0 allow    # or" in first.out
    assert last.out.endswith(f"to go on: clark-agent resume --log '{path}' {short}\n")
    assert resumed.code == 0


# --- what waits -------------------------------------------------------------------------------


async def test_what_waits_is_listed(tmp_path: Path) -> None:
    ask = calls_all(("write_file", {"path": "a\x1b[2J", "content": "1\n2\n" * 200}))
    script = [calls("ask_user", **QUESTION), ask]
    async with command_line(tmp_path, script) as (run, _):
        first = await suspended(run, "-t", "ask_user")
        second = await suspended(run)
        said = await run.each(
            [
                ("waiting",),
                ("waiting", first[:8]),
                ("waiting", f"{second[:8]}/1/0"),
                ("waiting", "--json"),
                ("waiting", "--assignee", "ada"),
                ("waiting", "--ready"),
                ("decide", first[:8], "result", "red"),
                ("waiting", "--ready"),
                ("waiting", "--ready", "--json"),
                ("waiting",),
                ("waiting", "--ready", first[:8]),
                ("runs",),
            ]
        )
    short, one, other, as_json, ada, none, _, ready, ready_json, left, wrong, runs = said
    lines = short.out.splitlines()
    assert [line[:12] for line in lines[::2]] == [f"{second[:8]}/1/0", f"{first[:8]}/1/0"]
    assert lines[0].startswith(rf"{second[:8]}/1/0  write_file(path='a\x1b[2J', content='1\n2")
    assert re.fullmatch(r"  ask_user waits for its result · since [-0-9]+ [:0-9]+", lines[3])
    assert one.out.splitlines()[2:] == [
        "  arguments:",
        "    question:",
        "      | Which colour?",
        "    choices:",
        "      | ['red', 'blue']",
        "  question:",
        "    Which colour?",
        "  choices:",
        "    red",
        "    blue",
    ]
    assert other.out.count("      | 1\n      | 2\n") == 200  # all of it
    assert "  preview:\n" in other.out
    assert "\x1b" not in other.out + short.out
    rows = [json.loads(line) for line in as_json.out.splitlines()]
    assert [row["tool_name"] for row in rows] == ["write_file", "ask_user"]
    assert rows[1]["request"] == {"kind": "question", **QUESTION}
    assert (ada.out, ada.err) == ("", "nothing waits for a decision\n")
    assert (none.out, none.err) == ("", "no suspended run can be resumed\n")
    assert re.match(rf"{first[:8]}  [-0-9]+ [:0-9]+  suspended  http.*  Do it\n$", ready.out)
    assert json.loads(ready_json.out)["run_id"] == first
    assert [line[:8] for line in left.out.splitlines()[::2]] == [second[:8]]
    assert wrong.code == 2
    assert [line.split()[3] for line in runs.out.splitlines()] == ["suspended"] * 2


async def test_json_has_what_waits(tmp_path: Path) -> None:
    async with command_line(tmp_path, [calls("write_file", path="a", content="x")]) as (run, _):
        began = await run("run", "--suspend", "--json", "Write it")
        again = await run("resume", "last", "--json")
    first, second = [json.loads(said.out.splitlines()[-1]) for said in (began, again)]
    assert (began.code, again.code) == (4, 4)
    assert (first["type"], first["outcome"]) == ("run_result", "suspended")
    assert [request["arguments"] for request in first["waiting"]] == [{"path": "a", "content": "x"}]
    assert second["waiting"] == first["waiting"]
    assert second["run_id"] == first["run_id"]
    assert began.err == again.err == ""


async def test_a_suspended_and_decided_run_is_shown_replayed_and_exported(tmp_path: Path) -> None:
    script = [
        calls_all(("ask_user", QUESTION), *writes("a")),
        says("Blue, then."),
        says("Anew."),
    ]
    async with command_line(tmp_path, script) as (run, server):
        options = ("-t", "write_file,ask_user")
        run_id = await suspended(run, *options)
        short = run_id[:8]
        look = [
            ("show", short),
            ("export", short),
            ("export", short, "-f", "openai"),
            ("export", short, "-f", "anthropic"),
            ("export", short, "-f", "trajectory"),
            ("export", short, "-f", "records"),
            ("replay", short),
            ("diff", short, short),
        ]
        waiting = await run.each(look)
        await run("decide", f"{short}/1/0", "result", "blue", "--by", "ada")
        await run("decide", short, "deny", "no files")
        decided = await run.each(look)
        resumed = await run("resume", short, *options)
        ended = await run.each(look)
        forked = await run("fork", short, "--turn", "0", *options, "--no-suspend")
    assert resumed.out == "Blue, then.\n"
    for state in (waiting, decided, ended):
        assert [said.code for said in state] == [0] * len(look), state
        assert state[-2].out == "identical\n"
        assert state[-1].out == "the same\n"
    date = r"[-0-9]{10} [:0-9]{8}"
    first, second, third = [state[0].out for state in (waiting, decided, ended)]
    assert re.search(rf"\n  ask_user waits for its result \(1/0\) since {date}\n", first)
    assert re.search(rf"\n  write_file waits for permission \(1/1\) since {date}\n", first)
    assert f"\n{short}/1/0  ask_user(" in first
    assert f"\nthen: clark-agent resume {short}\n" in first
    assert re.search(rf"\n  ask_user answered \(blue\) by ada at {date}\n", second)
    assert re.search(rf"\n  write_file denied \(no files\) by {USER} at {date}\n", second)
    assert f"\n{short}/1/0" not in second
    assert f"\nthen: clark-agent resume {short}\n" in second
    assert re.search(r"\n  suspended for [0-9.]+ s\n", third)
    assert "then: " not in third
    assert "suspended" in first.splitlines()[-1]
    assert "done" in third.splitlines()[-1]
    assert forked.out == "Anew.\n"
    assert [m["role"] for m in bodies(server)[-1]["messages"]] == ["system", "user"]


async def test_a_shell_completes_open_requests(tmp_path: Path) -> None:
    async with command_line(tmp_path, [calls("write_file", path="a", content="x")]) as (run, _):
        run_id = await suspended(run)
        run.env |= {"_CLARK_AGENT_COMPLETE": "bash_complete", "COMP_CWORD": "2"}
        said = []
        for words in ("clark-agent decide ", f"clark-agent waiting {run_id[:4]}"):
            run.env["COMP_WORDS"] = words
            said.append((await run()).out)
    assert said == [f"plain,{run_id[:8]}/1/0\n"] * 2


# --- what goes wrong --------------------------------------------------------------------------


async def test_two_processes_decide_at_once_and_one_is_told(tmp_path: Path) -> None:
    async with command_line(tmp_path, [calls("write_file", path="a", content="x")]) as (run, _):
        short = (await suspended(run))[:8]
        said = await asyncio.gather(
            *[run.anew("decide", f"{short}/1/0", what, "--by", what) for what in ("allow", "deny")]
        )
    assert sorted(each.code for each in said) == [0, 1]
    [late] = [each for each in said if each.code == 1]
    [first] = [each for each in said if each.code == 0]
    winner = "allow" if " allowed by allow\n" in first.out else "deny"
    assert late.out == ""
    assert late.err.endswith(f"is already decided by {winner}: {winner}\n")
    assert late.err.count("\n") == 1


async def test_what_cannot_be_decided_is_said_in_a_sentence(tmp_path: Path) -> None:
    async with command_line(tmp_path, [calls("write_file", path="a", content="x")]) as (run, _):
        short = (await suspended(run))[:8]
        wrong = {
            ("decide", short): "missing argument",
            ("decide", short, "maybe"): "'maybe' is not one of",
            ("decide", short, "allow", "now"): "allow takes no VALUE",
            ("decide", short, "result"): "result needs a VALUE",
            ("decide", short, "arguments", "{"): "the arguments are not JSON",
            ("decide", short, "arguments", "[]"): "the arguments must be a JSON object",
            ("decide", short, "allow", "--reason", "x"): "--reason is for deny",
            ("decide", "nobody", "allow"): "no run 'nobody' in",
            ("decide", f"{short}/7/0", "allow"): "has no request",
            ("decide", f"{short}/1/0/ffffffffffffffffff", "allow"): "has no request",
            ("waiting", "nobody"): "no run 'nobody' in",
            ("run", "--suspend", "--no-log", "Hi"): "--suspend needs a log",
            ("steer", "nobody", "Hi"): "no run 'nobody' in",
            ("cancel", "nobody"): "no run 'nobody' in",
        }
        said = await run.each(wrong)
        for words, left in zip(wrong, said, strict=True):
            assert left.code == 2, (words, left)
            assert wrong[words] in left.err, (words, left)
            assert (left.out, left.err.count("\n")) == ("", 1)
        piped = await run("decide", short, "arguments", "-", given='{"path": "b", "content": "y"}')
    assert piped.out.startswith(f"{short}/1/0  write_file allowed with ")


PAYING = """
from clark_agent import Agent, tool
from clark_agent.plugins import BeforeToolCallContext
from clark_agent.testing import ScriptedStream, call
from clark_agent.waiting import Suspend

@tool(reads_only=True)
def pay(amount: int) -> str:
    "Pay."
    return f"paid {amount}"

class Finance:
    name = "finance"

    def on_before_tool_call(self, ctx: BeforeToolCallContext) -> Suspend | None:
        return Suspend({"why": "policy"}, expires_in=EXPIRES, assignee="ada", until=UNTIL)

agent = Agent(ScriptedStream([call("pay", amount=3), "Well."]), tools=[pay], plugins=[Finance()])
"""


async def test_a_request_expires_and_the_run_goes_on_without_it(tmp_path: Path) -> None:
    source = PAYING.replace("EXPIRES", "0.001").replace("UNTIL", "None")
    async with command_line(tmp_path, [calls("pay", amount=3), says("Well.")]) as (run, _):
        options = ("-a", "shop:agent", "-m", run.env["CLARK_AGENT_MODEL"])
        (run.root / "shop.py").write_text(source)
        began = await run("run", *options, "Pay")
        short = run.store.runs()[0].run_id[:8]
        waits, named, late, again, resumed = await run.each(
            [
                ("waiting",),
                ("decide", short, "allow"),
                ("decide", f"{short}/1/0", "allow"),
                ("decide", f"{short}/1/0", "deny"),
                ("resume", short, *options),
            ]
        )
    assert began.code == 4
    assert re.search(r"  finance asks for permission · since .* · for ada · expires ", began.err)
    assert waits.err == "nothing waits for a decision\n"
    assert (named.code, named.err) == (2, f"clark-agent: the run {short} waits for no decision\n")
    for expired in (late, again):
        assert expired.code == 1
        assert re.fullmatch(r"clark-agent: the time to decide .* is over\n", expired.err)
    assert "not decided in time" in resumed.err
    assert (resumed.code, resumed.out) == (0, "Well.\n")


async def test_a_time_comes_and_the_run_is_ready(tmp_path: Path) -> None:
    async with command_line(tmp_path, [calls("pay", amount=3), says("Well.")]) as (run, _):
        options = ("-a", "shop:agent", "-m", run.env["CLARK_AGENT_MODEL"])
        (run.root / "shop.py").write_text(PAYING.replace("EXPIRES", "None").replace("UNTIL", "1"))
        began = await run("run", *options, "Pay")
        ready, shown, resumed = await run.each(
            [("waiting", "--ready"), ("show", "last"), ("resume", "last", *options)]
        )
    assert began.code == 4
    assert ready.out.startswith(run.store.runs()[0].run_id[:8])
    assert " · for ada · until 1970-01-01 " in shown.out
    assert "paid 3" in resumed.err
    assert (resumed.code, resumed.out) == (0, "Well.\n")


async def test_a_run_that_still_works_cannot_be_decided(tmp_path: Path) -> None:
    """Another call of its batch runs: its process has the log."""
    run = CommandLine(tmp_path)
    source = PAYING.replace("EXPIRES", "None").replace("UNTIL", "None")
    source = source.replace("def pay(amount: int) -> str:", "async def pay(amount: int) -> str:")
    source = source.replace(
        '    return f"paid', "    await asyncio.sleep(3600)\n" + '    return f"paid'
    )
    source = source.replace("return Suspend", "return None if ctx.args['amount'] == 1 else Suspend")
    source = source.replace(
        '[call("pay", amount=3)', '[[call("pay", amount=3), call("pay", amount=1)]'
    )
    (run.root / "shop.py").write_text("import asyncio\n" + source)
    process = await run.start("run", "-a", "shop:agent", "Pay")
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        await process.stderr.readuntil(b"pay(amount=1)")
        short = run.store.runs()[0].run_id[:8]
        busy = await run("decide", short, "allow")
        process.kill()
        await process.communicate()
    assert busy.code == 1
    assert "is being written: another process" in busy.err
    assert busy.err.count("\n") == 1


# --- runs of other processes ------------------------------------------------------------------


async def test_a_run_is_steered_from_another_process(tmp_path: Path) -> None:
    script = [hangs("I walk "), says("I fly.")]
    async with command_line(tmp_path, script) as (run, server):
        process = await run.start("run", "Go")
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            await process.stdout.readexactly(7)
            short = run.store.runs()[0].run_id[:8]
            said = await run.anew("steer", short, "--when", "now", "Fly", "instead")
            out, _ = await process.communicate()
    assert said == Said(0, "", f"sent to run {short}\n")
    assert (process.returncode, out) == (0, b"\nI fly.\n")
    assert bodies(server)[1]["messages"][-1]["content"] == "Go\n\nFly instead"


async def test_a_run_is_cancelled_from_another_process(tmp_path: Path) -> None:
    async with command_line(tmp_path, [hangs("I walk ")]) as (run, server):
        process = await run.start("run", "Go")
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            await process.stdout.readexactly(7)
            short = run.store.runs()[0].run_id[:8]
            said = await run.anew("cancel", short, "--reason", "wrong folder")
            _, err = await process.communicate()
            await server.client_gone()
        late = await run("cancel", short)
    assert (said.code, said.out) == (0, "")
    assert process.returncode == 1
    assert "the run was aborted: wrong folder" in err.decode()
    assert late.code == 2
    assert "has ended (failed)" in late.err


async def test_a_suspended_run_is_cancelled(tmp_path: Path) -> None:
    async with command_line(tmp_path, [calls("write_file", path="a", content="x")]) as (run, _):
        short = (await suspended(run))[:8]
        await run("cancel", short, "--reason", "not needed")
        waiting, ready, resumed = await run.each(
            [("waiting",), ("waiting", "--ready"), ("resume", short)]
        )
    assert waiting.out == ""
    assert ready.out.startswith(short)
    assert resumed.code == 1
    assert "the run was aborted: not needed" in resumed.err
    assert run.store.runs()[0].outcome == "failed"
    assert list(run.root.iterdir()) == []


async def test_a_run_is_followed_from_another_process(tmp_path: Path) -> None:
    first = calls_all(("calculator", {"expression": "6*7"}))
    script = [first, hangs("It is "), calls("write_file", path="a", content="x"), says("Done.")]
    async with command_line(tmp_path, script) as (run, _):
        process = await run.start("run", "--suspend", "Compute")
        assert process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            await process.stdout.readexactly(5)
            short = run.store.runs()[0].run_id[:8]
            following = await run.start("follow", short)
            waiting = await run.start("follow", short, "--wait", "--json")
            assert following.stderr is not None
            assert waiting.stdout is not None
            await following.stderr.readuntil(b"  42\n")  # what has happened
            await waiting.stdout.readuntil(b"tool_execution_end")
            await run("steer", short, "--when", "now", "Write it down")
            await process.communicate()
            out, err = await following.communicate()
            assert process.returncode == following.returncode == 4
            await run("decide", short, "allow", "--resume")
            rows, _ = await waiting.communicate()
        again, as_json = await run.each([("follow", short), ("follow", short, "--json")])
    assert out == b"It is \n"
    assert err.decode().splitlines()[-5:][0] == "suspended"
    assert err.decode().endswith(f"then: clark-agent resume {short}\n")
    assert "> Write it down" in err.decode()
    assert waiting.returncode == 0
    last = json.loads(rows.splitlines()[-1])
    assert last["type"] == "agent_end"
    assert again.code == as_json.code == 0
    assert again.out == "It is \nDone.\n"
    assert again.err.startswith("> Compute\n● calculator(expression='6*7')\n  42\n")
    assert again.err.endswith("\ndone\n")
    kinds = [json.loads(line)["type"] for line in as_json.out.splitlines()]
    assert (kinds[0], kinds[-1], kinds.count("agent_end")) == ("agent_start", "agent_end", 2)


COUNTING = """
import asyncio, os
from clark_agent import Agent, AssistantMessage, StopReason, TextContent
from clark_agent.stream import Chunk, Done, Start, TextChunk

async def model(request, signal):
    yield Start(AssistantMessage((), StopReason.END_TURN))
    text = ""
    while not os.path.exists("stop"):
        await asyncio.sleep(0.01)
        delta = f"{len(text)} "
        text += delta
        yield Chunk(TextChunk(delta))
    yield Done(AssistantMessage((TextContent(text),), StopReason.END_TURN))

agent = Agent(model)
"""


async def test_text_is_followed_as_it_comes(tmp_path: Path) -> None:
    run = CommandLine(tmp_path)
    (run.root / "count.py").write_text(COUNTING)
    process = await run.start("run", "-a", "count:agent", "Count")
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        begun = await process.stdout.readexactly(1)
        following = await run.start("follow", "last")
        assert following.stdout is not None
        seen = await following.stdout.readexactly(4)  # while the answer is not complete
        (run.root / "stop").touch()
        out, _ = await process.communicate()
        rest, err = await following.communicate()
    assert (process.returncode, following.returncode) == (0, 0)
    assert (begun + out).strip() in seen + rest  # all of it, even if its beginning was missed
    assert err.endswith(b"done\n")
