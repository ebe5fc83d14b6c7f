"""PyTorch-profiler (Kineto) traces of one or several ranks, to the tidy table.

Left out: CPU ops as rows, memory, Python stacks.
"""

from __future__ import annotations

from collections.abc import Sequence

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces.file import COPY_AGAIN, RecordedFile
from prism.traces.kineto.events import read_events
from prism.traces.kineto.join import read_ranks
from prism.traces.kineto.rank import RankTrace, read_rank
from prism.traces.table import Trace


def read_kineto(files: Sequence[RecordedFile]) -> Trace:
    """Read the profiler's files of one job, one file a rank."""
    return read_ranks(files, _read_file, "kineto")


def _read_file(file: RecordedFile) -> list[RankTrace]:
    """Read one file; refuse one without device activities."""
    rank = read_rank(read_events(file.path))
    if len(rank.table):
        return [rank]
    broken = f" ({rank.n_bad:,} without a time)" if rank.n_bad else ""
    more = "profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
    raise PrismError(
        f"{file.source}: holds {format_count(rank.n_host_events, 'host event')} but no "
        f"device activity{broken}; "
        f"expected kernels, copies or fills of a GPU; {COPY_AGAIN if rank.cut else more}"
    )
