"""Loads and compiles what answers need, as it is imported: by the process whose forks answer."""

import os
from itertools import islice
from threading import Event, Thread

JOB = "llama3-70b-fsdp-512"  # with kernels, a run and failures


def _warm() -> None:
    from prism.jobs.job import load_job
    from prism.present.explore.computing import Question, answer_stages

    for _ in islice(answer_stages(Question(load_job(JOB), 0)), 4):  # to the answer of the run
        pass


def _end_with(parent: int, done: Event) -> None:
    """End at once where the page's process is gone, as this one would only once it is warm."""
    while not done.wait(0.2):
        if os.getppid() != parent:
            os._exit(1)


_done = Event()
_watch = Thread(target=_end_with, args=(os.getppid(), _done))
_watch.start()
try:
    _warm()
finally:
    _done.set()
    _watch.join()  # a process with threads is not to be forked
