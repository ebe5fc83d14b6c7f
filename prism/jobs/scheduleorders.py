"""Orders of actions by the schedule's name: what every stage of a pipeline does, and when.

All are fixed orders that know no durations.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import chain

from prism.common import sizes
from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.jobs.pipelineshape import TRAITS, Action, Kind, Schedule

SCHEDULES = tuple(TRAITS)  # schedules that :func:`make_schedule` generates


def make_schedule(
    name: str, n_stages: int, n_microbatches: int, n_chunks: int | None = None
) -> Schedule:
    """Generate a schedule.

    Parameters
    ----------
    name : str
        ``gpipe``, ``1f1b``, ``interleaved``, ``zb-h1``, ``zb-v`` or ``dualpipe-v``.
        With one stage all are sequential: every microbatch runs forward through its chunks and
        back, and no backward is split.
    n_stages, n_microbatches : int
        Pipeline stages (pp_size), microbatches per replica and step; each >= 1.
    n_chunks : int, optional
        Model chunks per stage (vpp_size): 2 in a V, else 1 where None.

    Returns
    -------
    Schedule
        By stage a tuple of actions, each with ``kind`` (F, B, I, W), ``chunk``, ``microbatch``.

    Raises
    ------
    PrismError
        If the name is unknown, a count is below one, the schedule forbids the counts, or it has
        more actions than there is memory or time for.

    Notes
    -----
    With p stages, m >= p microbatches, and times F, B (input half) and W of a stage's whole share:

    * 1F1B: stage s starts with min(m, p - 1 - s) forwards; bubble (p - 1) (F + B + W).
    * Interleaved: chunks advance in groups of p microbatches; the warm-up is
      2 (p - 1 - s) + (v - 1) p forwards, as in Megatron-LM. With one chunk it is 1F1B.
    * ZB-H1: 1F1B in which stage s puts off each W by s microbatches, so that every stage holds
      p microbatches at most; bubble (p - 1) (F + B - W), W <= F, B ([1]_, table 2).
    * ZB-V: chunks in a V; no stage idles from its first to its last action where F = B = W and
      m >= 2 p - 1 ([1]_, section 6; [2]_). Where W <= F <= B, the step is longer than the work
      by (p - 1) max(B, 2 (B - W)), of a chunk: the order is fixed and leaves gaps.
    * DualPipeV: chunks in a V, forwards paired with backwards of other microbatches; only the
      backwards that would hold others up are split. The published bubble (p - 1) (F&B + B - 2 W)
      ([3]_, there with 2 p for p and W less, B being whole) takes a pair for one action that gives
      both results at its end. Here F goes first and B + W after it, neither sped up nor slowed by
      the other, and (p - 1) (F + B - W) is left, of a chunk, where W <= B <= F.

    References
    ----------
    Huang et al., arXiv:1811.06965 (GPipe); Narayanan et al., arXiv:2104.04473, section 2.2.

    .. [1] Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
    .. [2] Qi et al., Pipeline Parallelism with Controllable Memory, arXiv:2405.15362.
    .. [3] DeepSeek-AI, DualPipe: DualPipeV in its README; DeepSeek-V3, arXiv:2412.19437, 3.2.1.

    Examples
    --------
    >>> import prism
    >>> schedule = prism.make_schedule("1f1b", n_stages=2, n_microbatches=3)
    >>> [f"{action.kind}{action.microbatch}" for action in schedule[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    if n_chunks is None:
        n_chunks = (TRAITS[name].chunks or 1) if name in TRAITS else 1
    _check_counts(name, n_stages, n_microbatches, n_chunks)
    _check_size(name, n_stages, n_microbatches, n_chunks)
    if n_stages == 1:
        return Schedule((_sequential(n_microbatches, n_chunks),))
    return Schedule(
        (_row(name, stage, n_stages, n_microbatches, n_chunks) for stage in range(n_stages)),
        TRAITS[name].shape,
    )


def _row(
    name: str, stage: int, n_stages: int, n_microbatches: int, n_chunks: int
) -> tuple[Action, ...]:
    if name == "zb-v":
        return _zero_bubble_v(stage, n_stages, n_microbatches)
    if name == "dualpipe-v":
        return _dualpipe_v(stage, n_stages, n_microbatches)
    if n_chunks > 1:
        return _interleaved(stage, n_stages, n_microbatches, n_chunks)
    warmup = n_microbatches if name == "gpipe" else min(n_microbatches, n_stages - 1 - stage)
    forward = [Action("F", 0, microbatch) for microbatch in range(n_microbatches)]
    backward = [Action("B", 0, microbatch) for microbatch in range(n_microbatches)]
    row = _one_forward_one_backward(forward, backward, warmup)
    return _put_off_weights(row, stage) if name == "zb-h1" else row


def steady_share(name: str, n_stages: int, n_microbatches: int, n_chunks: int) -> float:
    """Share of forwards after the warm-up, in the mean over stages [1].

    Of m microbatches 1F1B warms up with (p - 1) / 2, and the interleaved schedule with v p - 1
    chunks of v m (Narayanan et al., arXiv:2104.04473, section 2.2). In a V, activations go both
    ways themselves, from the first on.
    """
    if TRAITS[name].shape == "v":
        return 1.0
    if name == "gpipe":
        return 0.0
    warm_up = n_chunks * n_stages - 1 if n_chunks > 1 else 0.5 * (n_stages - 1)
    return max(0.0, 1.0 - warm_up / (n_chunks * n_microbatches))


def _check_counts(name: str, n_stages: int, n_microbatches: int, n_chunks: int) -> None:
    """Refuse counts that the schedule cannot have."""
    if name not in TRAITS:
        raise PrismError(f"unknown schedule {name!r}; expected one of {', '.join(SCHEDULES)}")
    counts = {"stages": n_stages, "microbatches": n_microbatches, "chunks": n_chunks}
    for what, count in counts.items():
        if count < 1:
            raise PrismError(f"schedule {name}: {what} = {count}; expected at least 1")
    if n_stages == 1:
        return
    chunks, rounds = TRAITS[name].chunks, TRAITS[name].rounds
    fewest = rounds * n_stages
    if chunks is not None and chunks != n_chunks:
        many = "one chunk" if chunks == 1 else format_count(chunks, "chunk")
        raise PrismError(
            f"schedule {name} has {many} per stage, got {n_chunks}; use vpp: {chunks}, "
            "or interleaved"
        )
    if n_microbatches < fewest:
        raise PrismError(
            f"schedule {name}: microbatches = {n_microbatches}, expected at least {fewest}, "
            f"{rounds} for each of the {format_count(n_stages, 'stage')}; use {fewest}, or zb-v"
        )
    if n_chunks > 1 and chunks is None and n_microbatches % n_stages:
        below = n_microbatches // n_stages * n_stages
        valid = f"{below} or {below + n_stages}" if below else f"{n_stages}"
        raise PrismError(
            f"schedule interleaved: microbatches = {n_microbatches} is not a multiple of the "
            f"{format_count(n_stages, 'stage')}; use {valid} microbatches, or "
            "1f1b with vpp: 1"
        )


def _check_size(name: str, n_stages: int, n_microbatches: int, n_chunks: int) -> None:
    """Refuse a schedule of more actions than can be put in order."""
    if name == "zb-v" and n_stages > 1:  # made as long as that, and cut
        n_microbatches = max(n_microbatches, 2 * n_stages - 1)
    halves = 3 if n_stages > 1 and TRAITS[name].splits else 2
    counts = {"actions": (halves * n_stages * n_microbatches * n_chunks, sizes.ORDERED)}
    sizes.check_size(f"schedule {name}", counts, "stages (pp), microbatches or chunks (vpp)")


def _sequential(n_microbatches: int, n_chunks: int) -> tuple[Action, ...]:
    """Every microbatch forward through the chunks and back, one after the other."""
    actions: list[Action] = []
    for microbatch in range(n_microbatches):
        actions += [Action("F", chunk, microbatch) for chunk in range(n_chunks)]
        actions += [Action("B", chunk, microbatch) for chunk in reversed(range(n_chunks))]
    return tuple(actions)


def _interleaved(
    stage: int, n_stages: int, n_microbatches: int, n_chunks: int
) -> tuple[Action, ...]:
    """One stage of Megatron's interleaved 1F1B; microbatches are a multiple of stages."""
    group = n_stages * n_chunks
    forward: list[Action] = []
    backward: list[Action] = []
    for k in range(n_microbatches * n_chunks):
        chunk = k % group // n_stages
        microbatch = k // group * n_stages + k % n_stages
        forward.append(Action("F", chunk, microbatch))
        backward.append(Action("B", n_chunks - 1 - chunk, microbatch))
    warmup = 2 * (n_stages - 1 - stage) + (n_chunks - 1) * n_stages
    return _one_forward_one_backward(forward, backward, min(warmup, len(forward)))


def _one_forward_one_backward(
    forward: list[Action], backward: list[Action], n_warmup: int
) -> tuple[Action, ...]:
    """Warm-up forwards, then pairs of one forward and one backward, then what is left."""
    steady = len(forward) - n_warmup
    pairs = zip(forward[n_warmup:], backward[:steady], strict=True)
    return (*forward[:n_warmup], *chain.from_iterable(pairs), *backward[steady:])


def _put_off_weights(row: Sequence[Action], delay: int) -> tuple[Action, ...]:
    """Split all backwards; each weight half follows the input half `delay` microbatches later."""
    actions: list[Action] = []
    waiting: deque[Action] = deque()
    for action in row:
        actions.append(action)
        if action.kind == "B":
            waiting.append(action._replace(kind="W"))
            if len(waiting) > delay:
                actions.append(waiting.popleft())
    return (*actions, *waiting)


def _zero_bubble_v(stage: int, n_stages: int, n_microbatches: int) -> tuple[Action, ...]:
    """One stage of ZB-V."""
    # of fewer than 2 p - 1 microbatches what is left waits for nothing that is gone
    s, p, m = stage, n_stages, max(n_microbatches, 2 * n_stages - 1)
    row = _Row()
    row.add("F0", 2 * (p - s) - 1)
    row.add("F1 F0", s)
    row.add("F1 I1 W1", p - s)
    row.add("F0 I0 W0 F1 I1 W1", m + s + 1 - 2 * p)
    row.add("I0 W0 F1 I1 W1", p - 1 - s)
    row.add("I0 I1", s)
    row.add("I0 W0", p - s)
    row.add("W1", s)
    row.add("W0", s)
    return tuple(action for action in row.actions if action.microbatch < n_microbatches)


def _dualpipe_v(stage: int, n_stages: int, n_microbatches: int) -> tuple[Action, ...]:
    """One stage of DualPipeV; microbatches are twice the stages, or more."""
    s, p = stage, n_stages
    row = _Row()
    row.add("F0", 2 * (p - 1 - s))
    row.add("F0 F1", s + 1)
    row.add("I1 W F1", p - 1 - s)
    row.add("F0 B1 F1 B0", n_microbatches + s + 1 - 2 * p)
    row.add("B1 F1 B0", p - 1 - s)
    # of the last pairs, the later half of the backwards is split: their weights fill the end
    cells = ["B1", "B0"] * (s + 1)
    row.add(" ".join(c if k <= s else c.replace("B", "I") for k, c in enumerate(cells)))
    row.add("W I0", p - 1 - s)
    row.add("W", s + 1)
    return tuple(row.actions)


class _Row:
    """A stage's actions, written as cells without microbatches: each takes its kind's next one.

    ``F0`` is a forward of chunk 0, ``B0`` a whole backward, ``I0`` its input half, ``W0`` the
    oldest weight half of chunk 0 that waits, and ``W`` the oldest of any.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._done: Counter[tuple[Kind, str]] = Counter()
        self._waiting: list[Action] = []

    def add(self, cells: str, times: int = 1) -> None:
        """Append some cells several times."""
        for cell in cells.split() * times:
            self.actions.append(self._late(cell[1:]) if cell[0] == "W" else self._fresh(*cell))

    def _late(self, chunk: str) -> Action:
        oldest = next(a for a in self._waiting if chunk in ("", str(a.chunk)))
        self._waiting.remove(oldest)
        return oldest._replace(kind="W")

    def _fresh(self, letter: str, chunk: str) -> Action:
        kind: Kind = "F" if letter == "F" else "B"
        action = Action(kind, int(chunk), self._done[kind, chunk])
        self._done[kind, chunk] += 1
        if letter == "I":
            self._waiting.append(action)
        return action
