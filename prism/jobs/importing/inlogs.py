"""Configurations inside logs: arguments one a line, or a tree between two marks."""

import ast
import json
import re
from collections.abc import Iterator

DUMP_LINES = 8  # from which a text has its arguments: Megatron's log has some hundreds
DEEPSPEED_LINE = re.compile(r"config\.py:\d+:print\]")
# name ....... value, of NeoX with ....default behind it
_DUMPED = re.compile(r"(?:^|[\s\]:])([A-Za-z_]\w{0,250}) \.{2,} ?")
_DEFAULT = re.compile(r"\.{4}\w+$")
_LONGEST_LINE = 100_000  # characters of a line that can be an argument
_TREES = (
    re.compile(r"-{3,} Task Configuration -{3,}"),  # Megatron Bridge: YAML
    re.compile(r"Running with (?:configs|args): *(?=\{)"),  # torchtitan: JSON, before 2025 Python's
    re.compile(r"\*{3,} Experiment configuration \*{3,}"),  # NeMo 1: YAML
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_YAML = re.compile(r"\s*(- |[\w.\"'-]+:(\s|$)|[\]}#])|\s+\S|\s*$")


def arguments_in(text: str) -> Iterator[tuple[str, str, int]]:
    """Give name, value and line of what Megatron, NeoX or DeepSpeed write at a log's start, once.

    Every rank may write them. DeepSpeed's dots stop where a name is long.
    """
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        line = line.rstrip()
        if len(line) > _LONGEST_LINE:
            continue
        deepspeed = DEEPSPEED_LINE.search(line)
        found = _DUMPED.search(line)
        value = _DEFAULT.sub("", line[found.end() :]) if found else ""
        if found is None and deepspeed:
            line = line[deepspeed.end() :]
            found = re.match(r"\s*(\w+) [. ]\s*", line)
            value = line[found.end() :] if found else ""
        if found and found[1] not in seen:
            seen.add(found[1])
            yield found[1], value, number


def tree_in(text: str) -> tuple[int, str] | None:
    """Give the configuration that a log holds as YAML or JSON, and how many lines are before it."""
    lines = [_COLOUR.sub("", line) for line in text.splitlines()]
    for number, line in enumerate(lines):
        mark = next((m for kind in _TREES if (m := kind.search(line))), None)
        if mark is None:
            continue
        before = line[: mark.start()]
        rank = re.match(r"[\[\w\]]*?\d+\]?:\s?", before)  # of a launcher, before each line
        own = [x.removeprefix(rank[0]) if rank else x for x in lines[number + 1 :]]
        if line[mark.end() :].startswith("{"):
            return number, _braces("\n".join([line[mark.end() :], *own]))
        end = next(
            (k for k, x in enumerate(own) if not _YAML.match(x) or x.startswith("---")), None
        )
        return number + 1, "\n".join(own[:end])
    return None


def _braces(text: str) -> str:
    """Give the mapping that a text begins with as JSON."""
    try:
        _, end = json.JSONDecoder().raw_decode(text)
        return text[:end]
    except ValueError:
        pass
    line = text.partition("\n")[0].strip()
    try:
        return json.dumps(ast.literal_eval(line), default=str)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
