"""What a profile's forward and backward launch: each kernel with its op, shapes and mean time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.traces import find_recording
from prism.traces.kineto.events import Event, arguments, read_events
from prism.traces.kineto.periods import mark_by_rhythm
from prism.traces.kineto.rank import read_rank

WORK = frozenset({"gemm", "attention", "convolution"})
"""Classes of which a pass over a model has at least one kernel."""
FORWARD, BACKWARD, OTHER = 0, 1, 2
_WHOLE = re.compile(r"aten::(embedding|_scaled_dot_product_(flash|cudnn|efficient)_attention)$")
"""Ops that say their shapes better than those that they call: these have others in each backend."""
_SUMS = "torch::autograd::AccumulateGrad"
"""Weight gradients added to those of earlier microbatches: they follow from the weights."""


class Launch(NamedTuple):
    """A kernel of a pass; `dims` and `inputs` are those of the op that says them."""

    kernel_class: str
    op: str
    dims: tuple[tuple[int, ...], ...]
    types: tuple[str, ...]
    inputs: tuple[str, ...]
    seconds: float

    @property
    def kind(self) -> tuple[Any, ...]:
        """What is the same of the same kernel in another pass."""
        return self[:4]


@dataclass(frozen=True)
class Passes:
    """Passes of one microbatch, times in the mean over all that are alike."""

    source: str
    device: str  # product name
    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]
    microbatches: int
    n_steps: int
    beside_s: float  # optimizer, and gradients added up, of a step
    collective_s: float  # of a step
    notes: tuple[str, ...]


def read_passes(path: str | Path) -> Passes:
    """Read the passes of a PyTorch profile; of several ranks the first."""
    recording = find_recording(path)
    if recording.reader is None or recording.reader.name != "kineto":
        what = recording.reader.what if recording.reader else "no known recording"
        raise PrismError(
            f"{path}: is {what}; a table of ops is made of a PyTorch profiler's trace, with "
            "ProfilerActivity.CPU, CUDA and record_shapes=True"
        )
    file, notes = recording.files[0], []
    if len(recording.files) > 1:
        notes.append(f"of {format_count(len(recording.files), 'rank')} the first, {file.path.name}")
    rank = read_rank(read_events(file.path), stacks=True)
    if not rank.steps:
        mark_by_rhythm(rank)
    table = rank.table[rank.table["step"] >= 0]
    table = table.sort_values(["launch", "start"], kind="stable")
    if not len(table):
        raise PrismError(
            f"{file.source}: no device activity in its steps; expected kernels of a GPU: profile "
            "with ProfilerActivity.CUDA"
        )
    if not any(event.cat == "cpu_op" for stack in table["stack"] for event in stack):
        raise PrismError(
            f"{file.source}: no kernel has the host op that launched it; profile with "
            "ProfilerActivity.CPU beside CUDA, and record_shapes=True"
        )
    steps: dict[int, list[tuple[int, list[Launch]]]] = {}
    known: dict[int, _Op] = {}
    beside, collective = 0.0, 0.0
    columns = ("step", "kernel_class", "op_kind", "stack", "duration")
    for step, name, op_kind, stack, us in zip(*(table[c] for c in columns), strict=True):
        way = OTHER
        if op_kind == "optimizer" or any(event.name == _SUMS for event in stack):
            beside += us * 1e-6
        elif op_kind not in ("compute", "memory"):
            collective += us * 1e-6
        elif stack:
            way = BACKWARD if any(map(_is_gradient, stack)) else FORWARD
        op = _op_of(stack, known)
        if op.name == "aten::embedding":
            name = "embedding"
        launch = Launch(name, op.name, op.dims, op.types, op.inputs, us * 1e-6)
        steps.setdefault(step, []).append((way, [launch]))
    whole = {step: _runs(launches) for step, launches in steps.items()}
    counts = Counter(sum(way == FORWARD for way, _ in runs) for runs in whole.values())
    n = counts.most_common(1)[0][0]
    whole = {k: runs for k, runs in whole.items() if sum(way == FORWARD for way, _ in runs) == n}
    if not n or not any(way == BACKWARD for runs in whole.values() for way, _ in runs):
        raise PrismError(
            f"{file.source}: {'no forward' if not n else 'no backward'} with products of matrices "
            "in its steps; a table of ops is made of a step of training"
        )
    passes = [
        _mean([launches for runs in whole.values() for way, launches in runs if way == which])
        for which in (FORWARD, BACKWARD)
    ]
    return Passes(
        file.source, rank.device, passes[0], passes[1], n, len(whole), beside / len(steps),
        collective / len(steps), tuple([*rank.notes, *notes]),
    )  # fmt: skip


class _Op(NamedTuple):
    name: str = ""
    dims: tuple[tuple[int, ...], ...] = ()
    types: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


def _op_of(stack: Sequence[Event], known: dict[int, _Op]) -> _Op:
    """Give the innermost op, with its shapes or, where it has none, those around it."""
    if not stack:
        return _Op()
    inner = next((event for event in stack if _WHOLE.match(str(event.name))), stack[-1])
    if id(inner) not in known:
        name = str(inner.name)
        around = stack[: 1 + stack.index(inner)][-4:]
        with_dims = (_read(event) for event in reversed(around))
        found = next((op for op in with_dims if any(op.dims)), _Op(name))
        known[id(inner)] = found._replace(name=name) if name.startswith("aten") else found
    return known[id(inner)]


def _read(event: Event) -> _Op:
    args = arguments(event)
    dims = tuple(
        tuple(n for n in d if isinstance(n, int)) if isinstance(d, list) else ()
        for d in _listed(bytes(args.input_dims))
    )
    types, inputs = (tuple(map(str, _listed(bytes(raw)))) for raw in (args.input_type, args.inputs))
    return _Op(str(event.name), dims, types, inputs)


@lru_cache(maxsize=4096)  # few shapes, of many launches
def _listed(raw: bytes) -> list[Any]:
    try:
        found = json.loads(raw) if raw else []
    except ValueError:
        return []
    return found if isinstance(found, list) else []


def _is_gradient(event: Event) -> bool:
    return isinstance(event.name, str) and event.name.startswith("autograd::engine")


def _runs(launches: list[tuple[int, list[Launch]]]) -> list[tuple[int, list[Launch]]]:
    """Join what goes one way; what has no work of a model (zeroed gradients) is no pass."""
    out: list[tuple[int, list[Launch]]] = []
    for way, group in groupby((x for x in launches if x[0] != OTHER), key=lambda x: x[0]):
        run = [launch for _, found in group for launch in found]
        if not any(launch.kernel_class in WORK for launch in run):
            continue
        if out and out[-1][0] == way:
            out[-1][1].extend(run)
        else:
            out.append((way, run))
    return out


def _mean(runs: list[list[Launch]]) -> tuple[Launch, ...]:
    """Give the commonest sequence of kernels with their mean times.

    Where others run in some passes, each class takes what it takes in the mean of all.
    """
    kinds = [tuple(launch.kind for launch in run) for run in runs]
    usual = Counter(kinds).most_common(1)[0][0]
    alike = [run for run, kind in zip(runs, kinds, strict=True) if kind == usual]
    seconds = np.mean([[launch.seconds for launch in run] for run in alike], axis=0).tolist()
    found = [x._replace(seconds=mean) for x, mean in zip(alike[0], seconds, strict=True)]
    own, every = by_class(found), by_class(launch for run in runs for launch in run)
    scale = {name: every[name] / len(runs) / own[name] for name in own if own[name]}
    return tuple(x._replace(seconds=x.seconds * scale.get(x.kernel_class, 1.0)) for x in found)


def by_class(launches: Iterable[Launch]) -> dict[str, float]:
    """Add up seconds by class."""
    found: dict[str, float] = {}
    for x in launches:
        found[x.kernel_class] = found.get(x.kernel_class, 0.0) + x.seconds
    return found


class Group(NamedTuple):
    """A stretch of a pass that comes several times in a row."""

    first: int
    length: int
    repeats: int


def find_groups(kinds: Sequence[Any], works: Sequence[bool]) -> list[Group]:
    """Part a sequence into what repeats and what does not, in order; each part has some work.

    Of what repeats that which covers most is taken, the shortest of those; what lies before and
    behind is parted alike.
    """
    codes = np.unique([hash(kind) for kind in kinds], return_inverse=True)[1]
    work = np.asarray(works, np.bool_)
    return list(_part(codes, work, 0, len(codes)))


def _part(codes: Any, work: Any, begin: int, end: int) -> Iterator[Group]:
    best = _most_repeated(codes[begin:end], work[begin:end])
    if best is None:
        if end > begin:
            yield Group(begin, end - begin, 1)
        return
    first = begin + best.first
    yield from _part(codes, work, begin, first)
    yield best._replace(first=first)
    yield from _part(codes, work, first + best.length * best.repeats, end)


def _most_repeated(codes: Any, work: Any) -> Group | None:
    best: Group | None = None
    for period in range(1, codes.size // 2 + 1):
        if best is not None and codes.size - codes.size % period < best.length * best.repeats:
            continue
        same = np.r_[False, codes[period:] == codes[:-period], False]
        edges = np.flatnonzero(np.diff(same.astype(np.int8)))
        for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            repeats = 1 + (stop - start) // period
            covered = best.length * best.repeats if best else 0
            if repeats > 1 and repeats * period > covered and work[start : start + period].any():
                best = Group(start, period, repeats)
    return best
