"""Questions answered in a process of their own, which a newer question of the same page ends.

One process is kept that has loaded and compiled everything; each question is answered by a fork of
it, so that it begins at once, and can be ended at any moment.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from collections import deque
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, NamedTuple

from prism.present.explore.stages import Question, answer_stages


class Reply(NamedTuple):
    """What came of a question: its number, and a word and value as of `answer_stages`."""

    number: int
    word: str
    value: Any


class Answers:
    """The kept process, and its replies by page.

    Parameters
    ----------
    warm : Question, optional
        Answered, and thrown away, before any other, so that the first one is not slow.
    """

    def __init__(self, warm: Question | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, warm), name="prism-explore")
        self._process.start()
        there.close()
        self._replies: dict[str, deque[Reply]] = {}
        self._number = 0

    def ask(self, page: str, question: Question) -> int:
        """Ask a question in place of the page's one before; its number, as of the replies."""
        self._number += 1
        self._replies.setdefault(page, deque())
        self._here.send((page, self._number, question))
        return self._number

    def take(self, page: str) -> list[Reply]:
        """Return the replies to a page since the last call.

        Raises
        ------
        EOFError
            The process has ended.
        """
        while self._here.poll():
            to, told = self._here.recv()
            if to in self._replies:
                self._replies[to].append(told)
        mine = self._replies.get(page, deque())
        out = list(mine)
        mine.clear()
        return out

    def drop(self, page: str) -> None:
        """End what a page asked; it is gone."""
        self._replies.pop(page, None)
        self._here.send((page, 0, None))

    def close(self) -> None:
        """End the process; again has no effect."""
        if self._here.closed:
            return
        self._here.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.terminate()


def _serve(there: Connection, warm: Question | None) -> None:
    """Answer questions until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the page's process hears it, and closes the pipe
    if warm is not None:
        answer_stages(warm, lambda word, value: None)
    running: dict[str, tuple[ForkProcess, Connection, int]] = {}
    while True:
        for ready in wait([there, *(connection for _, connection, _ in running.values())]):
            try:
                if ready is there:
                    page, number, question = there.recv()
                    _end(running, page)
                    if question is not None:
                        running[page] = _start(question, number)
                    continue
                page = next((p for p, item in running.items() if item[1] is ready), "")
                if page:  # not ended meanwhile
                    word, value = running[page][1].recv()
                    there.send((page, Reply(running[page][2], word, value)))
            except (EOFError, OSError):
                if ready is there:
                    for page in list(running):
                        _end(running, page)
                    return
                process, _, number = running[page]
                process.join()
                code = process.exitcode
                _end(running, page)
                if code:
                    there.send((page, Reply(number, "broken", code)))


def _start(question: Question, number: int) -> tuple[ForkProcess, Connection, int]:
    """Answer a question in a fork of this process."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(its, question))
    process.start()
    its.close()
    return process, mine, number


def _answer(its: Connection, question: Question) -> None:
    try:
        answer_stages(question, lambda word, value: its.send((word, value)))
    except Exception:
        traceback.print_exc()
        sys.exit(1)


def _end(running: dict[str, tuple[ForkProcess, Connection, int]], page: str) -> None:
    """End what is running for a page, if anything is."""
    if page in running:
        process, connection, _ = running.pop(page)
        process.terminate()
        process.join()
        connection.close()
