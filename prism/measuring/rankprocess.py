"""One rank as a process: `python -m prism.measuring.rankprocess SPEC.json RANK`.

Started by `prism.measuring.ranks` only. What a user can correct comes out as the last line of
stderr, without a traceback.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError
from prism.measuring.ranks import run_rank, tell_progress


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def main(path: str, rank: int) -> int:
    """Run one rank; 0 when done, 2 where the user can correct what went wrong."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        run_rank(json.loads(Path(path).read_text()), rank, tell_progress if rank == 0 else None)
    except PrismError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    # without torch's teardown: threads of its backend may still run, and end the process with
    # "terminate called without an active exception" after all work is done
    os._exit(status)
