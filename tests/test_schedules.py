"""Split-backward schedules: published bubbles and memory, no deadlock, files, virtual stages."""

from __future__ import annotations

import re

import numpy as np
import pytest
from campaign import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from prism import PrismError, make_schedule
from prism.jobs.pipelineshape import TRAITS, Action, Schedule, VirtualStages
from prism.jobs.schedule import (
    SCHEDULES,
    Slots,
    action_times,
    format_schedule,
    play_schedule,
    schedule_to_csv,
)
from prism.jobs.scheduleorders import steady_share
from prism.plots import plot_schedule

SPLIT = ("zb-h1", "zb-v", "dualpipe-v")
PAIRS = 2.0  # microbatches that DualPipeV needs for each stage
Item = list[tuple[str, int, int, float]]  # kind, virtual stage, microbatch, duration, of one item


def virtual_of(name: str, p: int, stage: int, chunk: int) -> int:
    """Virtual stage, written from the definition: a V turns round on the last stage."""
    if name in ("zb-v", "dualpipe-v"):
        return stage if chunk == 0 else 2 * p - 1 - stage
    return chunk * p + stage


def items_of(name: str, schedule: Schedule, f: float, b: float, w: float) -> list[list[Item]]:
    """Every action as an item of its own."""
    rows = []
    for stage, row in enumerate(schedule):
        late = {(c, m) for kind, c, m in row if kind == "W"}
        whole = {"F": f, "B": b + w, "W": w}
        rows.append(
            [
                [(kind, virtual_of(name, len(schedule), stage, c), m,
                  b if kind == "B" and (c, m) in late else whole[kind])]
                for kind, c, m in row
            ]
        )  # fmt: skip
    return rows


def span(rows: list[list[Item]]) -> tuple[float, list[float]]:
    """Longest path by repeated sweeps: the makespan, and every stage's idle time inside."""
    last = max(v for row in rows for item in row for _, v, _, _ in item)
    end: dict[tuple[str, int, int], float] = {}
    while True:
        before, idle = dict(end), []
        for row in rows:
            free, gaps = 0.0, 0.0
            for i, item in enumerate(row):
                ready = free
                for kind, v, m, _ in item:
                    needs = {
                        "F": [("F", v - 1, m)] if v else [],
                        "B": [("F", v, m), *([("B", v + 1, m)] if v < last else [])],
                        "W": [("B", v, m)],
                    }[kind]
                    ready = max([ready, *(end.get(key, 0.0) for key in needs)])
                gaps += ready - free if i else 0.0
                free = ready + sum(duration for *_, duration in item)
                for kind, v, m, _ in item:
                    end[kind, v, m] = free
            idle.append(gaps)
        if end == before:
            return max(end.values()), idle


def bubble(name: str, p: int, m: int, f: float, b: float, w: float) -> float:
    """What a step takes over a stage's work, in times of a chunk."""
    schedule = make_schedule(name, p, m)
    makespan, _ = span(items_of(name, schedule, f, b, w))
    starts = play_schedule(schedule, f, b + w, w)
    lengths = action_times(schedule, Slots(f, b + w, w))
    played = max(s[-1] + length[-1] for s, length in zip(starts, lengths, strict=True))
    assert played == pytest.approx(makespan)
    return makespan - schedule.n_chunks * m * (f + b + w)


# ------------------------------------------------------------------------------------- bubbles
stages, times = st.integers(2, 6), st.floats(0.2, 5.0)


@settings(deadline=None, max_examples=60)
@given(p=stages, more=st.integers(0, 9), f=times, b=times, share=st.floats(0.05, 1.0))
def test_zb_h1_bubble(p: int, more: int, f: float, b: float, share: float) -> None:
    # arXiv:2401.10241, table 2: (p - 1) (T_F + T_B - T_W), where W is the shortest
    w = share * min(f, b)
    assert bubble("zb-h1", p, p + more, f, b, w) == pytest.approx((p - 1) * (f + b - w))
    assert bubble("1f1b", p, p + more, f, b, w) == pytest.approx((p - 1) * (f + b + w))


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 5), (4, 8), (7, 13), (8, 24)])
def test_bubbles_of_equal_thirds(p: int, m: int) -> None:
    # arXiv:2401.10241: a third of 1F1B's with ZB-H1; ZB-V leaves nothing but the way to a stage
    thirds = 1.0, 1.0, 1.0
    assert bubble("zb-h1", p, m, *thirds) == pytest.approx(bubble("1f1b", p, m, *thirds) / 3)
    schedule = make_schedule("zb-v", p, m)
    assert span(items_of("zb-v", schedule, *thirds))[1] == pytest.approx([0.0] * p)
    assert bubble("zb-v", p, m, *thirds) == pytest.approx(p - 1)


@settings(deadline=None, max_examples=60)
@given(p=stages, m=st.integers(1, 20), f=times, more=times, share=st.floats(0.05, 1.0))
def test_zb_v_with_other_durations(p: int, m: int, f: float, more: float, share: float) -> None:
    m, b, w = max(m, 2 * p - 1), f + more, share * f
    expected = (p - 1) * max(b, 2 * (b - w))
    assert bubble("zb-v", p, m, f, b, w) == pytest.approx(expected)


def paired(p: int, m: int, f: float, b: float, w: float) -> list[list[Item]]:
    """DualPipeV with its pairs as one item, as the published figure draws them."""
    rows = []
    for s, row in enumerate(items_of("dualpipe-v", make_schedule("dualpipe-v", p, m), f, b, w)):
        # forwards alone, in pairs of chunks, and then with split backwards in between
        cut = 2 * (p - 1 - s) + 2 * (s + 1) + 3 * (p - 1 - s)
        out, i = row[:cut], cut
        for k in range(2 * (m - 2 * p + s + 1)):
            alone = s == p - 1 and k == 0  # the only pair that is not overlapped
            out += row[i : i + 2] if alone else [row[i] + row[i + 1]]
            i += 2
        for _ in range(p - 1 - s):
            out += [row[i], row[i + 1] + row[i + 2]]
            i += 3
        rows.append(out + row[i:])
    return rows


@settings(deadline=None, max_examples=40)
@given(p=stages, more=st.integers(0, 9), f=times, share=st.floats(0.05, 1.0))
def test_dualpipe_v_bubble(p: int, more: int, f: float, share: float) -> None:
    m, b, w = 2 * p + more, f, share * f
    whole = b + w
    # DualPipe's README: (PP / 2 - 1) (F&B + B - 3 W), B whole and PP = 2 p for the one in a V
    published = (p - 1) * ((f + whole) + whole - 3 * w)
    makespan, _ = span(paired(p, m, f, b, w))
    assert makespan - 2 * m * (f + whole) == pytest.approx(published)
    # a forward that does not wait for the backward beside it leaves less
    assert bubble("dualpipe-v", p, m, f, b, w) == pytest.approx((p - 1) * (f + b - w))


# ------------------------------------------------------------------------- actions and deadlock
def refused(name: str, p: int, m: int, v: int) -> bool:
    """What a schedule cannot have, by its definition."""
    if p == 1:
        return False
    if name == "interleaved":
        return v > 1 and m % p > 0
    if name in ("zb-v", "dualpipe-v"):
        return v != 2 or (name == "dualpipe-v" and m < PAIRS * p)
    return v > 1


@settings(deadline=None, max_examples=examples(200))
@given(name=st.sampled_from(SCHEDULES), p=st.integers(1, 9), m=st.integers(1, 30),
       v=st.integers(1, 4))  # fmt: skip
def test_everything_once_and_to_the_end(name: str, p: int, m: int, v: int) -> None:
    if refused(name, p, m, v):
        with pytest.raises(PrismError, match=r"use .*(vpp|microbatches|\d)"):
            make_schedule(name, p, m, v)
        return
    schedule = make_schedule(name, p, m, v)
    once = {(c, k) for c in range(v) for k in range(m)}
    for row in schedule:
        for kind in "FB":
            found = [(c, k) for own, c, k in row if own == kind]
            assert len(found) == len(once)
            assert set(found) == once
        late = [(c, k) for kind, c, k in row if kind == "W"]
        assert len(late) == len(set(late))
        if p > 1 and name in ("zb-h1", "zb-v"):
            assert set(late) == once
        elif name != "dualpipe-v" or p == 1:
            assert not late
    play_schedule(schedule)
    makespan, _ = span(items_of(name, schedule, 1.0, 1.0, 1.0))  # ends, or would go on for ever
    assert makespan >= 3 * m * v
    cells = [line.split(",") for line in schedule_to_csv(schedule).splitlines()]
    for stage, row in enumerate(schedule):
        where = [schedule.virtual_stages.place(int(re.match(r"\d+", c)[0])) for c in cells[stage]]
        assert where == [(stage, a.chunk) for a in row]


@pytest.mark.parametrize("name", SPLIT)
def test_a_circle_is_a_deadlock(name: str) -> None:
    rows = [list(row) for row in make_schedule(name, 3, 8)]
    i, j = (next(k for k, a in enumerate(rows[1]) if a.kind == kind) for kind in "FB")
    rows[1][i], rows[1][j] = rows[1][j], rows[1][i]
    with pytest.raises(PrismError, match="deadlock"):
        play_schedule(Schedule(rows, TRAITS[name].shape))


# -------------------------------------------------------------------------------------- memory
def in_flight(schedule: Schedule) -> list[int]:
    """Most chunks' activations that each stage holds, until their weight gradients are there."""
    most = []
    for row in schedule:
        late = {(c, m) for kind, c, m in row if kind == "W"}
        held = peak = 0
        for kind, c, m in row:
            held += kind == "F"
            peak = max(peak, held)
            held -= kind == "W" or (kind == "B" and (c, m) not in late)
        assert held == 0
        most.append(peak)
    return most


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("m", [16, 24])
def test_activations_in_flight_as_published(p: int, m: int) -> None:
    table = {
        # chunk activations of every stage
        "gpipe": [m] * p,
        "1f1b": [p - s for s in range(p)],  # arXiv:2104.04473, 2.2.1
        "zb-h1": [p] * p,  # arXiv:2401.10241, 2.1: all workers hold p, as 1F1B's first
        "zb-v": [2 * p] * p,  # its section 6: p of both chunks, as 1F1B's first
    }
    for name, counts in table.items():
        assert in_flight(make_schedule(name, p, m)) == counts
    # arXiv:2205.05198, 4.2.3: 1 + (p - 1) / (p v) of p stages' worth, in chunks p v + p - 1
    v, rounds = 3, p * max(2, m // p)
    assert max(in_flight(make_schedule("interleaved", p, rounds, v))) == p * v + p - 1
    # DualPipe's README: PP + 1, where PP = 2 p for the one in a V
    assert max(in_flight(make_schedule("dualpipe-v", p, m))) == 2 * p + 1


# --------------------------------------------------------------------------- shapes and files
def test_virtual_stages_in_a_v() -> None:
    v = VirtualStages(4, 2, "v")
    assert v.rows(range(8)) == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert [v.link(k, k + 1) for k in range(7)] == [0, 1, 2, None, 2, 1, 0]
    assert v.ends_meet
    looped = VirtualStages(4, 2)
    assert looped.rows(range(8)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert [looped.link(k, k + 1) for k in range(7)] == [0, 1, 2, 3, 0, 1, 2]
    assert not looped.ends_meet
    two = VirtualStages(2, 2)
    assert [two.link(k, k + 1) for k in range(3)] == [0, 1, 0]  # on and round: two links


@given(p=st.integers(1, 8), chunks=st.integers(1, 4), shape=st.sampled_from(["looped", "v"]))
def test_a_place_for_every_virtual_stage(p: int, chunks: int, shape: str) -> None:
    stages = VirtualStages(p, chunks, shape)  # type: ignore[arg-type]
    places = [stages.place(k) for k in range(p * chunks)]
    assert len(set(places)) == p * chunks
    assert [stages.virtual(*place) for place in places] == list(range(p * chunks))
    for k in range(p * chunks - 1):
        (a, _), (b, _), link = places[k], places[k + 1], stages.link(k, k + 1)
        assert (link is None) == (a == b)
        if link is not None:
            assert {a, b} == {link, (link + 1) % p}
            assert stages.link(k + 1, k) == link


@pytest.mark.parametrize(
    ("name", "p", "m", "v"),
    [("1f1b", 4, 8, 1), ("zb-h1", 4, 6, 1), ("interleaved", 4, 8, 2), ("interleaved", 2, 8, 3)],
)
def test_forwards_that_alternate_with_backwards(name: str, p: int, m: int, v: int) -> None:
    shares = []
    for row in make_schedule(name, p, m, v):
        warm_up = [a.kind for a in row].index("B") - 1  # the last before a backward alternates
        shares.append(1 - warm_up / sum(a.kind == "F" for a in row))
    assert steady_share(name, p, m, v) == pytest.approx(np.mean(shares))


def test_csv_of_a_v() -> None:
    text = schedule_to_csv(make_schedule("zb-v", 2, 3))
    assert text == (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2\n"
        "1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2\n"
    )


def test_a_whole_backward_beside_split_ones() -> None:
    schedule = Schedule([
        [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1),
         Action("W", 0, 1)],
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1),
         Action("W", 0, 1)],
    ])  # fmt: skip
    assert schedule_to_csv(schedule) == "0F0,0F1,0B0,0I1,0W1\n1F0,1B0,1F1,1I1,1W1\n"
    assert action_times(schedule, Slots(1.0, 3.0, 1.25))[0] == [1.0, 1.0, 3.0, 1.75, 1.25]
    early = [Action("F", 0, 0), Action("W", 0, 0), Action("B", 0, 0)]
    with pytest.raises(PrismError, match="deadlock"):
        play_schedule(Schedule([early]))


def test_text_of_split_backwards() -> None:
    *rows, last = format_schedule(make_schedule("zb-h1", 2, 3)).splitlines()
    assert rows == [
        "stage 0 | F0 F1 .  I0 W0 F2 I1 W1 I2 W2",
        "stage 1 | .  F0 I0 F1 I1 W0 F2 I2 W1 W2",
    ]
    assert re.search(r"10 slots .*F 1, I 1, W 1.* 10 %", last)
    last = format_schedule(make_schedule("dualpipe-v", 2, 4)).splitlines()[-1]
    assert re.search("25 slots .*F 1, B 2, I 1, W 1", last)


def test_drawn_weights_have_a_colour_of_their_own() -> None:
    schedule = make_schedule("dualpipe-v", 2, 4)
    ax = plot_schedule(schedule)
    colours = {}
    for container in ax.containers:
        (bar,) = container.patches
        colours.setdefault(bar.get_facecolor()[:3], set()).add(bar.get_width())
    # forward, whole backward, and its halves
    assert sorted(map(sorted, colours.values())) == [[1.0], [1.0], [1.0], [2.0]]
    legend = [text.get_text() for text in ax.get_legend().get_texts()]
    assert legend == ["forward", "backward", "backward, inputs", "backward, weights"]
