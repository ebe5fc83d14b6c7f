"""The one exception a user can cause, and how it names what the user gave."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from prism.common.text import one_line

_TYPED = ContextVar("typed", default=False)
_OPTIONS = {"overrides": "set", "limit_s": "limit"}


class PrismError(Exception):
    """Bad input, with a message that says where, what was expected, and how to correct it.

    Examples
    --------
    >>> import prism
    >>> try:
    ...     prism.load_job("pipeline-8x32", ["parallelism.tp=0"])
    ... except prism.PrismError as error:
    ...     print(error)  # doctest: +ELLIPSIS
    overrides parallelism.tp=0: parallelism.tp: expected ..., got 0; ...
    """

    def __init__(self, *problems: str) -> None:
        super().__init__(*(one_line(problem) for problem in problems))

    def __str__(self) -> str:
        return "\n".join(self.args)


@contextmanager
def as_typed() -> Iterator[None]:
    """Have messages name options of the command line rather than arguments of Python."""
    token = _TYPED.set(True)
    try:
        yield
    finally:
        _TYPED.reset(token)


def is_typed() -> bool:
    """Whether messages name options of the command line."""
    return _TYPED.get()


def option(argument: str) -> str:
    """Name an argument as the caller gave it.

    Examples
    --------
    >>> option("run_replicates")
    'run_replicates'
    >>> with as_typed():
    ...     option("run_replicates"), option("completed")
    ('--run-replicates', '--completed')
    """
    if not _TYPED.get():
        return argument
    return "--" + _OPTIONS.get(argument, argument).replace("_", "-")
