"""Questions answered in a process of their own, which a newer question of the same page ends.

One process is kept that has loaded and compiled everything; each question is answered by a fork of
it, so that it begins at once, and can be ended at any moment. The page never waits for a pipe: one
thread sends, another takes what comes. The kept process and its forks are one group, which is ended
as one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from prism.present.explore.stages import Question, answer_stages, warm_up

MOST_AT_ONCE = 2
"""Questions being answered; those of further pages wait, as each takes all threads."""


class Reply(NamedTuple):
    """What came of a question: its number, and a word and value as of `answer_stages`.

    Or ``waiting``, where as many are answered as can be; or ``broken``, with an exit status.
    """

    number: int
    word: str
    value: Any


class Running(NamedTuple):
    """A question that is being answered: by what, where the answer comes, its number."""

    process: ForkProcess
    told: Connection
    number: int


class Answers:
    """The kept process, and its replies by page.

    Parameters
    ----------
    warm : Question, optional
        Answered but for its ranking, and thrown away, so that the first one asked is not slow.
    """

    def __init__(self, warm: Question | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, warm), name="prism-explore")
        self._process.start()
        self._group = self._process.pid  # as soon as it runs
        there.close()
        self._replies: dict[str, tuple[int, deque[Reply]]] = {}
        self._asked: SimpleQueue[tuple[str, int, Question | None]] = SimpleQueue()
        self._number, self._ended = 0, False
        for work in (self._send, self._receive):
            Thread(target=work, daemon=True).start()

    def _send(self) -> None:
        with suppress(OSError):
            while True:
                self._here.send(self._asked.get())

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                page, told = self._here.recv()
                number, replies = self._replies.get(page, (0, deque()))
                if told.number == number:
                    replies.append(told)
        self._ended = True

    def ask(self, page: str, question: Question) -> int:
        """Ask a question in place of the page's one before; its number, as of the replies."""
        self._number += 1
        self._replies[page] = self._number, deque()
        self._asked.put((page, self._number, question))
        return self._number

    def take(self, page: str) -> list[Reply]:
        """Return the replies to a page's last question since the last call.

        Raises
        ------
        EOFError
            The process has ended.
        """
        _, replies = self._replies.get(page, (0, deque()))
        found = [replies.popleft() for _ in range(len(replies))]
        if self._ended and not found:
            raise EOFError
        return found

    def drop(self, page: str) -> None:
        """End what a page asked; it is gone."""
        if self._replies.pop(page, None) is not None:
            self._asked.put((page, 0, None))

    def close(self) -> None:
        """End the process and what it started; again has no effect."""
        pid, self._group = self._group, None
        if pid is not None:
            with suppress(ProcessLookupError):  # it has no group yet, and no forks
                os.killpg(pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()


def _serve(there: Connection, warm: Question | None) -> None:
    """Answer questions until nobody asks any more."""
    os.setsid()  # Ctrl-C is for the page, which ends this group
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    try:
        if warm is not None:
            warm_up(warm)
        _answer_all(there)
    except Exception:
        traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)


def _answer_all(there: Connection) -> None:
    waiting: dict[str, tuple[int, Question]] = {}
    running: dict[str, Running] = {}
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the page's process is gone
        while True:
            for ready in wait([there, *(item.told for item in running.values())]):
                if ready is there:
                    page, number, question = there.recv()
                    waiting.pop(page, None)
                    _end(running, page)
                    if question is not None:
                        waiting[page] = number, question
                        if len(running) >= MOST_AT_ONCE:
                            there.send((page, Reply(number, "waiting", None)))
                elif page := next((p for p, item in running.items() if item.told is ready), ""):
                    told = _next_reply(running, page)
                    if told is not None:
                        there.send((page, told))
            while waiting and len(running) < MOST_AT_ONCE:
                page = next(iter(waiting))
                number, question = waiting.pop(page)
                inherited = [there, *(item.told for item in running.values())]
                running[page] = _start(question, number, inherited)


def _start(question: Question, number: int, inherited: list[Connection]) -> Running:
    """Answer a question in a fork of this process."""
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(its, question, [mine, *inherited]))
    process.start()
    its.close()
    return Running(process, mine, number)


def _next_reply(running: dict[str, Running], page: str) -> Reply | None:
    """Take the next reply; None where there is no further one."""
    item = running[page]
    try:
        return Reply(item.number, *item.told.recv())
    except EOFError:
        item.process.join()
        code = item.process.exitcode
        _end(running, page)
        return Reply(item.number, "broken", code) if code else None


def _end(running: dict[str, Running], page: str) -> None:
    """End what is running for a page, if anything is."""
    if page in running:
        process, told, _ = running.pop(page)
        process.kill()
        process.join()
        told.close()


def _answer(its: Connection, question: Question, inherited: list[Connection]) -> None:
    for connection in inherited:  # an end that is held here would hide that its owner is gone
        connection.close()
    try:
        answer_stages(question, lambda word, value: its.send((word, value)))
    except Exception:
        traceback.print_exc()
        sys.exit(1)
