"""The guide can be pasted into the interactive interpreter, as it says."""

from __future__ import annotations

import ast
from codeop import CommandCompiler

import pytest

from tests.test_readme import ROOT, Block, python_blocks

BLOCKS = [block for block in python_blocks(ROOT / "docs/guide/tracing.md") if block.run]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"line {block.line}")
def test_a_block_can_be_pasted(block: Block) -> None:
    compiler = CommandCompiler()
    compiler.compiler.flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    waiting: list[str] = []
    for line in [*block.source.split("\n"), ""]:
        waiting.append(line)
        if compiler("\n".join(waiting), "<stdin>", "single") is not None:
            waiting = []
    assert not waiting
