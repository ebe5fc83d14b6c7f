"""Schedules: closed forms of the makespan, completeness, files, messages."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism import PrismError, make_schedule
from prism.jobs.schedule import Action, Schedule, format_schedule, play_schedule

small = st.integers(1, 8)
times = st.floats(0.1, 10.0)


def makespan(schedule: Schedule, forward: float, backward: float) -> float:
    """Longest path by repeated sweeps over all actions, written from the definition."""
    n_stages = len(schedule)
    last = n_stages * (1 + max(a.chunk for row in schedule for a in row)) - 1
    end: dict[tuple[str, int, int], float] = {}
    while True:
        before = dict(end)
        for stage, row in enumerate(schedule):
            free = 0.0
            for kind, chunk, microbatch in row:
                virtual = chunk * n_stages + stage
                ready = [free]
                if kind == "F" and virtual > 0:
                    ready.append(end.get(("F", virtual - 1, microbatch), 0.0))
                if kind == "B":
                    ready.append(end.get(("F", virtual, microbatch), 0.0))
                    if virtual < last:
                        ready.append(end.get(("B", virtual + 1, microbatch), 0.0))
                free = max(ready) + (forward if kind == "F" else backward)
                end[kind, virtual, microbatch] = free
        if end == before:
            return max(end.values())


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(["gpipe", "1f1b"]), p=small, m=st.integers(1, 16), tf=times, tb=times)
def test_makespan_without_chunks(name: str, p: int, m: int, tf: float, tb: float) -> None:
    schedule = make_schedule(name, p, m)
    play_schedule(schedule)
    assert makespan(schedule, tf, tb) == pytest.approx((m + p - 1) * (tf + tb))


@settings(deadline=None, max_examples=60)
@given(p=st.integers(2, 6), groups=st.integers(1, 4), v=st.integers(2, 5), tf=times, tb=times)
def test_interleaved_bubble_is_divided_by_chunks(
    p: int, groups: int, v: int, tf: float, tb: float
) -> None:
    m = p * groups
    schedule = make_schedule("interleaved", p, m, v)
    play_schedule(schedule)
    # tf and tb are of a stage's whole share; a chunk takes 1/v of them
    expected = m * (tf + tb) + (p - 1) * (tf + tb) / v
    assert makespan(schedule, tf / v, tb / v) == pytest.approx(expected)


@given(p=st.integers(2, 8), groups=st.integers(1, 4), v=st.integers(2, 4))
def test_interleaved_warmup(p: int, groups: int, v: int) -> None:
    for stage, row in enumerate(make_schedule("interleaved", p, p * groups, v)):
        first_backward = next(i for i, action in enumerate(row) if action.kind == "B")
        warmup = min((p - stage - 1) * 2 + (v - 1) * p, p * groups * v)
        # the last warm-up forward is followed by the forward of the first pair, if one is left
        assert first_backward == min(warmup + 1, p * groups * v)


def test_interleaved_megatron_order() -> None:
    row = make_schedule("interleaved", 2, 4, 2)[1]
    text = " ".join(f"{kind}{microbatch}.{chunk}" for kind, chunk, microbatch in row)
    assert text == (
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
    )


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    assert make_schedule("interleaved", 4, 6) == make_schedule("1f1b", 4, 6)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_one_stage_is_sequential(name: str) -> None:
    (row,) = make_schedule(name, 1, 2, 2)
    once = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    assert row == tuple(Action(k, c, m) for m in range(2) for k, c in once)  # type: ignore[arg-type]


def test_play_agrees_with_naive() -> None:
    schedule = make_schedule("interleaved", 4, 8, 3)
    starts = play_schedule(schedule, 1.0, 2.5)
    ends = [s[-1] + 2.5 for s in starts]
    assert max(ends) == pytest.approx(makespan(schedule, 1.0, 2.5))


def test_format() -> None:
    *rows, last = format_schedule(make_schedule("1f1b", 2, 2)).splitlines()
    assert rows == [
        "stage 0 | F0 F1 .  .  B0 -  .  B1 -",
        "stage 1 | .  F0 B0 -  F1 B1 -  .  .",
    ]
    assert re.search(r"9 slots .*F 1, B 2.* 33\.3 %", last)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("1f2b", 2, 2), "gpipe"),
        (("1f1b", 0, 2), "stages = 0"),
        (("1f1b", 2, 0), "microbatches = 0"),
        (("1f1b", 2, 2, 2), "or interleaved"),
        (("interleaved", 4, 6, 2), " 4 or 8 "),
        (("interleaved", 4, 3, 2), " 4 microbatches"),
        (("zb-h1", 2, 4, 2), "one chunk .* 2; .*vpp: 1, .*interleaved"),
        (("zb-v", 2, 4, 1), "2 chunks .* 1; .*vpp: 2"),
        (("zb-v", 2, 4, 3), "2 chunks .* 3; .*vpp: 2"),
        (("dualpipe-v", 4, 7, 2), "microbatches = 7, .* 8, 2 .* 4"),
    ],
)
def test_bad_counts(args: tuple[str, int, int], message: str) -> None:
    with pytest.raises(PrismError, match=message):
        make_schedule(*args)


def test_deadlock_across_stages() -> None:
    # stage 1 wants microbatch 1 back before stage 0 sends it
    schedule = schedule_from_rows("F0 B0 F1 B1", "F0 F1 B0 B1")
    with pytest.raises(PrismError, match="deadlock"):
        play_schedule(schedule)


def schedule_from_rows(*rows: str) -> Schedule:
    """Build one-chunk rows from text such as ``F0 B0``."""
    return Schedule(
        [Action(cell[0], 0, int(cell[1:])) for cell in row.split()]  # type: ignore[arg-type]
        for row in rows
    )
