"""finish: ends the run with a text answer.

The answer is ``RunResult.output``, a `str`. ``RunResult.text`` is what the model wrote beside the
call, which is often nothing. For an answer of another type make a tool with
`clark_agent.finish_tool`. Like every tool of that kind, it must be the only call of its message, so
that the end of the run does not interrupt another call. Otherwise the call is refused and the run
continues.
"""

from __future__ import annotations

from clark_agent.tools.finish import FinishTool, finish_tool

__all__ = ["finish"]

finish: FinishTool[str] = finish_tool(
    str,
    description=(
        "End the work with the final answer. Call it alone, once everything is done: what is not "
        "in the answer does not reach the user."
    ),
)
