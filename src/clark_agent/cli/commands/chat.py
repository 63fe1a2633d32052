"""The command ``chat``: connects a terminal to a `Chat`."""

from __future__ import annotations

import asyncio
import signal
import sys

import click
from msgspec.structs import replace
from rich.console import RenderableType

from clark_agent.cli.app import PROGRAM, examples, is_debugging
from clark_agent.cli.chat_session import Chat
from clark_agent.cli.input_line import ChatPrompt
from clark_agent.cli.options import (
    DEFAULT_MODEL,
    TOO_SMALL,
    Approvals,
    Given,
    Log,
    agent_options,
    approval_options,
    find_run,
    log_options,
    read_system,
    settings_again,
    settings_from,
    state_folder,
    system_option,
)
from clark_agent.cli.slash import complete, is_command, obey
from clark_agent.cli.view import RichScreen, has_terminal, one_line, show_log_messages, usage_text
from clark_agent.errors import ClarkAgentError, ConfigError

__all__ = ["chat"]


@click.command(
    epilog=examples(
        "clark-agent chat",
        "clark-agent chat -m anthropic:claude-sonnet-5 -t files,shell",
        "clark-agent chat --resume last",
    )
)
@agent_options
@system_option
@approval_options()
@click.option("--resume", metavar="RUN", help="Resume a run from the log; 'last' is the newest.")
@log_options(can_be_off=True)
def chat(
    *,
    given: Given,
    system: str | None,
    approvals: Approvals,
    resume: str | None,
    log: Log | None,
) -> int:
    """Chat with an agent in the terminal.

    Enter sends a message. A message sent while the agent works reaches it in its next turn. Ctrl-C
    stops the agent, twice aborts it; Ctrl-D leaves. /help lists the commands. Tools with side
    effects ask before they run; with --suspend they suspend the run, for others to decide.

    SIGTERM ends the chat with exit code 143. Its run does not end then, and can be resumed.
    """
    if not (has_terminal() and sys.stdin.isatty()):
        raise ConfigError(f'chat needs a terminal; without one use {PROGRAM} run "…"')
    run_id, settings = None, settings_from(given)
    if resume is not None:
        if log is None:
            raise ConfigError("--resume needs a log, and --no-log turns it off")
        run_id = find_run(log, resume)
        can_ask = not approvals.yes
        settings = settings_again(given, log, run_id, command="chat --resume", can_ask=can_ask)
    settings = approvals.applied_to(replace(settings, suspend=False), log=log)  # a person is here
    screen = ChatScreen()
    talk = Chat(settings, screen, log=log, approvals=approvals, system=read_system(system))
    with show_log_messages(screen, debug=is_debugging()):
        left_by = asyncio.run(_talk(talk, screen, run_id))
    if log is not None and talk.run_id is not None and talk.can_resume:
        screen.note(f"to continue: {PROGRAM} chat{log.option} --resume {talk.run_id[:8]}")
    return 128 + left_by if left_by is signal.SIGTERM else 0


async def _talk(talk: Chat, screen: ChatScreen, resume: str | None) -> signal.Signals | None:
    """Chat until the person leaves, or a signal ends it: return which."""
    prompt = ChatPrompt(
        state_folder() / "history",
        live=screen.live,
        label=lambda: talk.label,
        status=lambda: _toolbar(talk, screen),
        interrupt=talk.interrupt,
        complete=lambda before: complete(talk, before),
        keeps=lambda: not talk.is_asking,
    )
    screen.prompt = prompt
    with prompt.owning():
        try:
            if talk.agent.settings.model == DEFAULT_MODEL:
                screen.note(TOO_SMALL)
            screen.note(f"{talk.agent.title} in {talk.agent.settings.root}; /help for help")
            if resume is not None:
                await _handle_line(talk, f"/resume {resume}")
            while True:
                await _handle_line(talk, await prompt.read())
        except EOFError:
            pass
        finally:
            await talk.close(let_go=prompt.left_by is signal.SIGTERM)
            screen.prompt = None
    return prompt.left_by


async def _handle_line(talk: Chat, line: str) -> None:
    try:
        if is_command(line):
            talk.screen.note(one_line(line), "user")
            await obey(talk, line)
        elif line.strip() or talk.is_asking:
            talk.take(line.strip())
    except (ClarkAgentError, OSError) as error:
        talk.screen.note(one_line(str(error), 400), "error")


def _toolbar(talk: Chat, screen: ChatScreen) -> str:
    doing = screen.under_way if talk.state == "working" else ""
    return f"{talk.agent.title} · {usage_text(talk.usage)} · {doing or talk.state}"


class ChatScreen(RichScreen):
    """Prints above the input line; the prompt draws the unfinished part."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt: ChatPrompt | None = None

    def live(self, characters: int) -> str:
        """Return the end of the model's unfinished text."""
        return self.blocks.tail(characters)

    def print(self, shown: RenderableType) -> None:
        """Print above the input line."""
        with self.console.capture() as printed:
            self.console.print(shown)
        text = printed.get().strip("\n") + "\n"  # rich adds blank lines around some blocks
        if self.prompt is None:
            sys.stdout.write(text)
        else:
            self.prompt.write(text)

    def draw(self) -> None:
        """Redraw the prompt."""
        if self.prompt is not None:
            self.prompt.refresh()
