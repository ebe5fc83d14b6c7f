"""What a command writes: its answer on stdout, progress on stderr."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from prism.common.text import one_line, visible

if TYPE_CHECKING:
    from prism.present.answer import Answer

SHOW_AFTER_S = 0.5  # work shorter than this shows no progress [s]


@contextmanager
def progress_line(what: str, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """Show how far work is and how long it still takes, on a terminal and where it is worth it."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task(f"{what}: preparing", total=None)
    timer = threading.Timer(SHOW_AFTER_S, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: bar.update(task, description=what, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()


def say(text: str) -> None:
    """Write a line to stderr; nothing in it steers the terminal, whose width it keeps to."""
    text = visible(one_line(text))
    if sys.stderr.isatty():
        import shutil
        import textwrap

        width = shutil.get_terminal_size().columns
        text = textwrap.fill(
            text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    click.echo(text, err=True)


def print_answer(answer: Answer, as_json: bool, details: bool) -> None:
    """Tell warnings on stderr, and print an answer on stdout: nothing in it steers the terminal."""
    for warning in answer.warnings:  # they stay when a command is quiet
        say(f"prism: warning: {warning}")
    if as_json:
        click.echo(to_json(answer.json()))
        return
    from rich.console import Console
    from rich.segment import Segments

    from prism.present.terminal import render

    # a pipe has no width; 120 keeps tables whole and still fits a wide terminal
    console = Console(
        width=None if sys.stdout.isatty() else 120, highlight=False, markup=False, emoji=False
    )
    parts = console.render(render(answer, details))
    segments = [part._replace(text=visible(part.text)) for part in parts]
    with console.capture() as capture:
        console.print(Segments(segments), soft_wrap=True, end="")
    # through click, so that a closed pipe ends here as it does for every other output
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def to_json(value: Any, indent: int | None = None) -> str:
    """Write JSON that every parser reads: what is not a finite number becomes null.

    Examples
    --------
    >>> to_json({"a": float("nan"), "b": (1, 2.5)})
    '{"a": null, "b": [1, 2.5]}'
    """
    return visible(json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    """Turn mappings, sequences and arrays into what JSON has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
