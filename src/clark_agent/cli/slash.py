"""The slash commands of a chat.

A command is a word, perhaps with an argument. Only a line whose first word is a slash and letters
is a command, so that a path can be sent as it is. A line that starts with a space is always sent.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from clark_agent.cli.chat_session import Chat
from clark_agent.cli.options import TOOLS, find_run, tool_names
from clark_agent.cli.view import one_line, usage_text
from clark_agent.conversation import Conversation
from clark_agent.errors import ConfigError, RunAborted
from clark_agent.export import to_markdown
from clark_agent.toolkit.approval import Approval
from clark_agent.tools.repair import close_match
from clark_agent.types import UserMessage

__all__ = ["COMMANDS", "complete", "is_command", "obey"]


class Command(Struct, frozen=True):
    """A command: its syntax, its description, and whether a run must end before it takes effect."""

    name: str
    takes: str
    help: str
    do: Callable[[Chat, str], Awaitable[None]]
    is_for_idle: bool = False


def is_command(line: str) -> bool:
    """Return whether a line is for the chat and not for the agent."""
    return re.match(r"/[A-Za-z]*(\s|$)", line) is not None


async def obey(chat: Chat, line: str) -> None:
    """Run a command. Raises `ConfigError` and whatever the command raises."""
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        near = close_match(name, COMMANDS)
        hint = f"did you mean {near}?" if near else "/help lists the commands."
        raise ConfigError(f"unknown command {name}; {hint}")
    if argument and not command.takes:
        raise ConfigError(f"{name} takes no argument")
    if command.is_for_idle and argument and chat.is_running:
        raise ConfigError(f"{name} has to wait until the run ends; Ctrl-C stops it")
    await command.do(chat, argument.strip())


def complete(chat: Chat, before: str) -> Iterable[tuple[str, str]]:
    """Return the completions at the end of a line, each with a remark."""
    name, space, _ = before.partition(" ")
    if not space and before.startswith("/"):
        return [(command.name, command.help) for command in COMMANDS.values()]
    if name == "/tools":
        return [(tool, "") for tool in (*TOOLS, "all", "none", "default")]
    if name == "/resume" and chat.log is not None:
        runs = chat.log.store.runs(limit=20)
        return [(run.run_id, run.outcome or "not ended") for run in runs]
    return []


# --- the commands ---------------------------------------------------------------------------------


async def _help(chat: Chat, _: str) -> None:
    for command in COMMANDS.values():
        chat.screen.note(f"{f'{command.name} {command.takes}':18}{command.help}")
    chat.screen.note("A message sent while the agent works reaches it in its next turn.")
    chat.screen.note("Alt-Enter: a new line. Ctrl-C: stop, twice: abort. Ctrl-D: leave.")


async def _model(chat: Chat, name: str) -> None:
    if name:
        await chat.change(replace(chat.agent.settings, model=name))
    chat.screen.note(f"the model is {chat.agent.config.model_id or 'that of the agent'}")


async def _tools(chat: Chat, names: str) -> None:
    if names:
        await chat.change(replace(chat.agent.settings, tools=tool_names(names.split())))
    answers, mcp = chat.answers, chat.agent.mcp
    of_servers = () if mcp is None else await mcp.tools()
    for tool in (*chat.agent.config.registry.values(), *of_servers):
        asks = not tool.reads_only and answers.get(tool.name) is not Approval.ALWAYS
        what = one_line(tool.description.partition("\n")[0], 80)
        chat.screen.note(f"{tool.name:14}{'asks first' if asks else '':12}{what}")
    if not chat.agent.settings.tools and not of_servers:
        chat.screen.note("the agent has no tools")


async def _save(chat: Chat, name: str) -> None:
    if not name:
        raise ConfigError("/save needs a file: talk.md, or talk.json to keep everything")
    _write(chat.conversation, name)
    chat.screen.note(f"saved {len(chat.conversation.messages)} messages to {name}")


def _write(conversation: Conversation, name: str) -> None:
    path = Path(name).expanduser()
    if path.exists():
        raise ConfigError(f"{path} already exists; choose another name")
    if path.suffix == ".json":
        conversation.save(path)
    else:
        path.write_text(to_markdown(conversation.messages), "utf-8")


async def _fork(chat: Chat, number: str) -> None:
    sent = [m for m in chat.conversation.messages if isinstance(m, UserMessage)]
    if not number:
        for at, message in enumerate(sent, 1):
            chat.screen.note(f"{at:3} {one_line(message.plain_text, 70)}")
        chat.screen.note("/fork N goes back to the answer to message N; 0 is the beginning")
        return
    if not number.isdecimal() or int(number) > len(sent):
        raise ConfigError(f"no message {number}: you have sent {len(sent)}")
    left = chat.run_id
    chat.fork(int(number))
    back = "" if left is None or chat.log is None else f"; /resume {left[:8]} goes back"
    chat.screen.note(f"new branch after message {number}{back}")


async def _resume(chat: Chat, given: str) -> None:
    if chat.log is None:
        raise ConfigError("/resume needs a log, and --no-log turns it off")
    if not given:
        for run in chat.log.store.runs(limit=10):
            chat.screen.note(f"{run.run_id[:8]}  {run.outcome or 'not ended'}")
        chat.screen.note("/resume RUN continues a run; a prefix of its id is enough")
        return
    chat.continue_run(chat.log, find_run(chat.log, given))


async def _compact(chat: Chat, _: str) -> None:
    if chat.is_running:
        raise ConfigError("/compact has to wait until the run ends; Ctrl-C stops it")
    try:
        done = await chat.compact()
    except RunAborted:
        chat.screen.note("stopped; the conversation is as it was")
        return
    if done is None:
        chat.screen.note("there is nothing to compact yet")
        return
    if not done.has_summary:
        said = usage_text(done.usage)
        chat.screen.note(f"the model gave no shorter summary, so nothing has changed; {said}")
        return
    count = done.last_turn - done.first_turn + 1
    turns = "1 turn" if count == 1 else f"{count} turns"
    chat.screen.note(
        f"summarised: {turns}, {done.tokens_before:,} → {done.tokens_after:,} tokens; "
        f"{usage_text(done.usage)}"
    )


async def _usage(chat: Chat, _: str) -> None:
    chat.screen.note(f"{usage_text(chat.usage)} since this chat began")


async def _quit(chat: Chat, _: str) -> None:
    raise EOFError


_ALL = (
    Command("/model", "[NAME]", "show the model, or switch to another", _model, is_for_idle=True),
    Command("/tools", "[NAMES]", "show the tools, or choose others", _tools, is_for_idle=True),
    Command("/save", "FILE", "save the conversation as .md or .json", _save),
    Command("/fork", "[N]", "continue after message N on a new branch", _fork, is_for_idle=True),
    Command("/resume", "[RUN]", "continue a run from the log", _resume, is_for_idle=True),
    Command("/compact", "", "summarise older turns now, to save room", _compact),
    Command("/usage", "", "show the tokens used in this chat", _usage),
    Command("/help", "", "show this help", _help),
    Command("/quit", "", "leave the chat", _quit),
)
COMMANDS = {command.name: command for command in _ALL}
