"""A tool made of a user's own pattern, for logs that no entry of `TOOLS` reads."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prism.common.errors import PrismError, option
from prism.traces.logs.tools import Tool

EXAMPLE = r"'step[: ]+(?P<step>\d+).*?(?P<s>[\d.]+) ?s'"
_WHATS = {
    "s": "group s", "ms": "group ms", "rate": "1 over group rate", "elapsed": "time between lines",
}  # fmt: skip
_EXPECTED = (
    "expected a Python regular expression with the groups step and one of s, ms, rate (steps per "
    f"second) and elapsed (since the start), such as {EXAMPLE}"
)
_LONGEST_S, _BYTES_PER_S = 5.0, 1e6  # of CPU time that matching may take, and of a long file


def pattern_tool(pattern: str) -> Tool:
    """Make a tool of a pattern; raises PrismError where it is none, or says no time."""
    told = f"{option('pattern')} {pattern}"
    try:
        groups = set(re.compile(pattern).groupindex)
    except (re.error, OverflowError, RecursionError) as error:
        raise PrismError(f"{told}: {error}; {_EXPECTED}") from error
    values = [name for name in _WHATS if name in groups]
    others = sorted(groups - {*_WHATS, "step"})
    if others:
        raise PrismError(f"{told}: group {others[0]} is not known; {_EXPECTED}")
    if len(values) != 1 and (values or "step" not in groups):
        raise PrismError(f"{told}: has {' and '.join(values) or 'none'} of them; {_EXPECTED}")
    what = _WHATS[values[0] if values else "elapsed"]
    of_step = values in (["s"], ["ms"])
    between = what == _WHATS["elapsed"]
    return Tool(
        option("pattern"),
        b"",
        (b"",),
        pattern,
        what,
        pattern,
        is_mean=not of_step,
        is_rate=between,
    )


@contextmanager
def in_time(tool: Tool, size: int) -> Iterator[None]:
    """Stop a user's pattern that backtracks without end on a file of `size` bytes.

    The main thread alone can be stopped, and not on Windows.
    """
    can = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if tool.mark or not can:
        yield
        return

    def stop(*_: object) -> None:
        raise PrismError(
            f"{tool.name} {tool.line}: takes too long; say what is between the groups more "
            f"narrowly, without a repeat inside a repeat; {_EXPECTED}"
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, _LONGEST_S + size / _BYTES_PER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
