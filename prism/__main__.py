"""Entry point of the ``prism`` command: exit statuses, and no traceback for bad input.

0 done; 1 something went wrong inside; 2 the input or the usage is wrong; 130 interrupted.
``PRISM_DEBUG=1`` lets every exception through with its traceback.
"""

import errno
import gc
import io
import os
import signal
import sys
import threading
from _thread import interrupt_main
from types import FrameType
from typing import Any

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
# New objects until Python looks for cycles among them: imports and jobs make hundreds of thousands
# that stay, and looking through them takes a fifth of a second of every command.
OBJECTS = 500_000


def main(arguments: list[str] | None = None) -> int:
    """Run one command, of the process's own arguments where None; gives the exit status."""
    debug = os.environ.get("PRISM_DEBUG", "") not in ("", "0")
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed before
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))
    try:  # imports too: they take most of the time in which a command can be interrupted early
        import click

        from prism.cli.app import prism
        from prism.common.errors import PrismError, as_typed
        from prism.common.text import visible

        with as_typed():
            status = prism.main(arguments, prog_name="prism", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except KeyboardInterrupt:  # first: before the imports the other names are not known
        return _interrupted()
    except PrismError as error:
        if debug:
            raise
        click.echo(f"prism: {visible(str(error))}", err=True)
        return 2
    except click.ClickException as error:
        said = io.StringIO()
        error.show(said)
        click.echo(visible(said.getvalue()), err=True, nl=False)
        return 2
    except click.Abort as error:  # click's for an interrupt, and for an EOFError of ours
        if not isinstance(error.__cause__, EOFError):
            return _interrupted()
        if debug:
            raise
        return _failed(error.__cause__)
    except (BrokenPipeError, SystemExit):
        # the reader (`| head`) has what it wanted, which click turns into an exit with 1; keep the
        # interpreter from complaining when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        return _interrupted() if _follows_interrupt(error) else _failed(error)


def _follows_interrupt(error: BaseException | None) -> bool:
    """Tell whether an interrupt led to an error, as imports make one of their own of it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _failed(error: BaseException) -> int:
    """Say what went wrong inside."""
    import click

    from prism.common.text import visible

    if isinstance(error, OSError) and error.errno in FULL:
        said = f"cannot write the answer: {error.strerror}; make room"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no second complaint
    elif isinstance(error, MemoryError):
        said = "there is not enough memory; free some, or ask for less"
    else:
        text = visible(" ".join(str(error).split()))
        said = f"internal error: {type(error).__name__}: {text}"
        said += "\nset PRISM_DEBUG=1 for the traceback"
    click.echo(f"prism: {said}", err=True)
    return 1


def _interrupted() -> int:
    print("prism: interrupted; no result was written", file=sys.stderr)
    return 130


def _raise_again(dropped: Any) -> None:
    """Interrupt once more what was interrupted in a callback, where Python drops exceptions."""
    if dropped.exc_type is KeyboardInterrupt:
        threading.Timer(0.01, interrupt_main).start()
    else:
        sys.__unraisablehook__(dropped)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise what Ctrl-C is; once an import is done, as extensions drop what is raised in theirs."""
    inside = frame
    while inside is not None:
        if inside.f_code.co_filename.startswith("<frozen importlib"):
            threading.Timer(0.02, interrupt_main).start()
            return
        inside = inside.f_back
    signal.default_int_handler(number, frame)


def run() -> None:
    """Run the command line of this process and exit."""
    # matrices are small here: threads that wait for work took 3/4 of a calibration's processor time
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.set_threshold(OBJECTS)
    sys.unraisablehook = _raise_again
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not under nohup
        signal.signal(signal.SIGINT, _interrupt)
    status = main()
    gc.freeze()  # the system takes back what is left, which Python would go through for 0.3 s
    sys.exit(status)


if __name__ == "__main__":
    run()
