"""What a page of the documentation holds: its blocks, their marks and commands."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass
class Command:
    """One command and the lines shown after it; `first` and `end` are line indices of those."""

    text: str
    first: int
    end: int


@dataclass
class Block:
    """A fenced block: its language, the comments right before it, its lines from `first` on."""

    language: str
    marks: dict[str, str]
    first: int
    lines: list[str] = field(default_factory=list)


def read_blocks(lines: list[str]) -> list[Block]:
    """Fenced blocks, and marks that stand alone (language "") in the order of the page."""
    blocks: list[Block] = []
    marks: dict[str, str] = {}
    inside: Block | None = None
    fence = ""
    for i, line in enumerate(lines):
        if inside is not None:
            if line.strip() == fence:
                inside = None
            else:
                inside.lines.append(line)
            continue
        if opened := re.fullmatch(r"(`{3,})\s*(\w*).*", line.strip()):
            fence = opened[1]
            inside = Block(opened[2] or "text", marks, i + 1)
            blocks.append(inside)
            marks = {}
        elif mark := re.fullmatch(r"<!-- (file|run|output|status)(?:: (.*?))? -->", line.strip()):
            marks[mark[1]] = mark[2] or ""
        elif copied := re.fullmatch(r"<!-- picture: (.+) (\S+) -->", line.strip()):
            blocks.append(Block("", {"picture": copied[1], "to": copied[2]}, i))
        elif line.strip():
            marks = {}
    return blocks


def read_commands(block: Block) -> list[Command]:
    """Commands of a console block, with where their output stands in the page."""
    found: list[Command] = []
    i = 0
    while i < len(block.lines):
        if not block.lines[i].startswith("$ "):
            if not found:
                raise ValueError(f"line {block.first + i + 1}: output before the first command")
            i += 1
            found[-1].end = block.first + i
            continue
        text = block.lines[i][2:]
        while text.endswith("\\") and i + 1 < len(block.lines):
            i += 1
            text += "\n" + block.lines[i]
        i += 1
        found.append(Command(text, block.first + i, block.first + i))
    return found
