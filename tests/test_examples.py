"""The examples run as they are, without a warning, and print what they promise."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from clark_agent import AgentContext, LoopConfig, RunResult
from clark_agent.replay import ReplayReport, replay
from clark_agent.run_log import JsonlStore
from clark_agent.testing import ScriptedStream

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))
SCRIPTED = [name for name in EXAMPLES if name != "demo.py"]  # the demo asks a real model

EXPECTED = {
    "minimal.py": """\
Hello! How can I help?
(done, 2 messages)
""",
    "tool_call.py": """\
→ count_words({'text': 'to be or not to be'})
  counting …
← 6
Six words.
""",
    "structured_result.py": """\
invalid arguments for 'finish': path $.decision: expected one of "approve", "reject", got the \
string "maybe"
The answer was accepted.
Verdict(decision='approve', score=9)
""",
    "sub_agents.py": """\
→ ask_about_rust: When was Rust 1.0 released?
→ ask_about_go: When was Go 1.0 released?
  call_1, depth 1: 2 messages
  call_2, depth 1: 2 messages
← Rust 1.0 came out in May 2015. (done)
← Go 1.0 came out in March 2012. (done)
Go is the elder, by three years.
""",
    "budget.py": """\
to the helper: One turn is left: say what you have.
from the helper: The agent ran out of turns. So far it had said:
No trace yet.
It is lost. (6 turns for 0.098)
""",
    "security_gate.py": """\
Paths with '..' are not allowed. Name the file inside the workspace.
    {'decided_by': [{'plugin': 'guard', 'decision': 'block'}]}
/workspace/notes.txt is gone
    {'decided_by': [{'plugin': 'guard', 'decision': 'rewrite', \
'args': {'path': '/workspace/notes.txt'}}]}
One was refused, the other is done.
""",
    "gateway.py": """\
Sunny, 22 °C. Leave the umbrella.
the model's stream failed (fatal): the gateway answered 401: unknown token (check the token)
""",
    "run_log.py": """\
booking room 5
the model's stream failed (fatal): the transport raised ConnectionError: the line went dead
Room 5 is yours.
the run holiday replays as it was
1 tool call
""",
    "steering.py": """\
after_batch:
  [delivered in turn 2]
  3 hotels in Porto
  3 hotels in Lisbon
  Make it Faro, please.
  Faro it is.
before_next_tool:
  [delivered in turn 2]
  3 hotels in Porto
  Not executed: the user intervened. See what they say next, then send this call again if it \
is still wanted.
  Make it Faro, please.
  Faro it is.
now:
  [delivered in turn 2]
  The call was running when the user intervened, and was stopped.
  Not executed: the user intervened. See what they say next, then send this call again if it \
is still wanted.
  Make it Faro, please.
  Faro it is.
""",
    "streaming.py": """\
Let me see.
→ weather({'city': 'Lisbon'})
← 22 °C and sunny in Lisbon
Sunny, 22 °C.
(done, 4 messages)
7 words were enough; the run was aborted: the stream was left
""",
    "web_sse.py": """\
ada: I am Ada.
Hello Ada.
bob: I am Bob.
Hello Bob.
ada: How large is space?
(Ada left, and the tool was stopped)
ada: Never mind. Guess!
It is large, Ada.
(6 messages of Ada's conversation were sent)
""",
    "approval_web.py": """\
ada: 202
(the server is restarted)
approval_gate asks support: refund {'order': 7, 'amount': 120}
bob: 422
bob: 200 {"open":1}
eve: 409 bob was faster: give arguments
bob: 200 {"open":0}
Should Ada also get a voucher? ['10 €', 'none']
ada: 200 {"open":0}
All done: refunded 60 € for order 7; The call was not run: it was refused: Call her instead.; 10 €.
""",
    "conversation.py": """\
Hello Ada.
(no route to host; 3 messages are safe)
A machine that weaves numbers.
You are Ada.
  I am Ada.
  Hello Ada.
  What is an engine?
  A machine that weaves numbers.
  Who am I?
  You are Ada.
""",
}


AT_ONCE = ("sub_agents.py",)
"""What works at the same time may say its lines in either order."""


def play(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example as a user does, from a folder that is not the project's."""
    return python(folder, str(FOLDER / name))


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "utf8", "-W", "error", *arguments],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=120,  # for what would hang
        check=False,
    )


@pytest.mark.parametrize("name", SCRIPTED)
def test_an_example_runs_and_prints_what_it_promises(name: str, tmp_path: Path) -> None:
    ran = play(name, tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    if name in AT_ONCE:
        assert sorted(ran.stdout.splitlines()) == sorted(EXPECTED[name].splitlines())
    else:
        assert ran.stdout == EXPECTED[name]
    assert list(tmp_path.iterdir()) == []  # it leaves nothing lying about


# --- the demo -----------------------------------------------------------------------------------

LOGGED = """
import functools, runpy, sys
import clark_agent
from clark_agent.run_log import JsonlStore, RunLog

program, folder = sys.argv[1:]
logged = functools.partial(clark_agent.LoopConfig, run_log=RunLog(JsonlStore(folder)))
clark_agent.LoopConfig = logged
runpy.run_path(program, run_name="__main__")
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, JsonlStore]:
    """What the demo prints, and its log. It runs once, because a real model takes its time."""
    folder, logs = tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("logs")
    ran = python(folder, "-c", LOGGED, str(FOLDER / "demo.py"), str(logs))
    assert (ran.returncode, ran.stderr) == (0, "")
    assert list(folder.iterdir()) == []  # it leaves nothing lying about
    return ran.stdout, JsonlStore(logs)


def test_the_demo_is_a_real_model_that_uses_two_tools_and_is_right(
    demo: tuple[str, JsonlStore],
) -> None:
    shown = demo[0].splitlines()
    assert [line for line in shown if line.startswith(("→", "←"))] == [
        "→ read_file {'path': 'beans.txt'}",
        "← There are 42 beans in the jar.",
        "→ calculator {'expression': '42*3'}",
        "← 126",
    ]
    assert shown[-2] == "The answer is 126."
    assert shown[-1].startswith("done in ")


async def test_the_run_of_the_demo_is_replayed_and_prints_the_same(
    demo: tuple[str, JsonlStore], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its model: the replay takes the answers from the log."""
    printed, store = demo
    (logged,) = store.runs()
    reports: list[ReplayReport] = []

    async def replayed(prompt: str, context: AgentContext, config: LoopConfig) -> RunResult:
        reports.append(await replay(store, logged.run_id, config))
        assert reports[0].result is not None
        return reports[0].result

    main = runpy.run_path(str(FOLDER / "demo.py"))["main"]
    main.__globals__.update(connect=lambda name: ScriptedStream([]), run=replayed)
    await main()
    assert [str(report.drift) for report in reports] == ["None"]
    assert capsys.readouterr().out.splitlines()[:-1] == printed.splitlines()[:-1]


def test_the_demo_says_what_another_model_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLARK_AGENT_MODEL", "openai:gpt-5.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    ran = play("demo.py", tmp_path)
    assert ran.returncode == 1
    assert "OPENAI_API_KEY" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_every_example_has_its_promise() -> None:
    assert set(EXPECTED) == set(SCRIPTED)


def test_the_first_examples_are_short() -> None:
    """They are what a newcomer reads first."""
    lines = {name: len((FOLDER / name).read_text().splitlines()) for name in EXAMPLES}
    assert lines["minimal.py"] <= 25
    assert lines["tool_call.py"] <= 45


@pytest.mark.parametrize("name", EXAMPLES)
def test_importing_an_example_does_nothing(name: str, tmp_path: Path) -> None:
    """So that an editor or a documentation tool may load it."""
    code = f"import runpy; runpy.run_path({str(FOLDER / name)!r}, run_name='example')"
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "")
