"""Schedules: published makespans, bubbles and memory; every action once; text, CSV and picture."""

import json
import os
import re
import subprocess
import sys
import termios

import pytest
from campaign import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import prism

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
V = ("zb-v", "dualpipe-v")
PAIRS = 2  # microbatches that DualPipeV needs for each stage
stages, times = st.integers(2, 6), st.floats(0.2, 5.0)


def virtual_of(name, p, stage, chunk):
    """Virtual stage, written from the definition: a V turns round on the last stage."""
    if name in V:
        return stage if chunk == 0 else 2 * p - 1 - stage
    return chunk * p + stage


def items_of(name, schedule, f, b, w):
    """Every action as an item of its own: [(kind, virtual stage, microbatch, duration)]."""
    rows = []
    for stage, row in enumerate(schedule):
        late = {(c, m) for kind, c, m in row if kind == "W"}
        whole = {"F": f, "B": b + w, "W": w}
        rows.append([
            [(kind, virtual_of(name, len(schedule), stage, c), m,
              b if kind == "B" and (c, m) in late else whole[kind])]
            for kind, c, m in row
        ])  # fmt: skip
    return rows


def span(rows):
    """Longest path by repeated sweeps: the makespan, and every stage's idle time inside."""
    last = max(v for row in rows for item in row for _, v, _, _ in item)
    end = {}
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


def bubble(name, p, m, f, b, w, v=None):
    """What a step takes over a stage's work, in times of a chunk."""
    schedule = prism.make_schedule(name, p, m, v)
    makespan, _ = span(items_of(name, schedule, f, b, w))
    return makespan - (v or (2 if name in V else 1)) * m * (f + b + w)


# ------------------------------------------------------------------------------------- bubbles
@settings(max_examples=40)
@given(name=st.sampled_from(["gpipe", "1f1b"]), p=st.integers(1, 6), m=st.integers(1, 12),
       f=times, b=times)  # fmt: skip
def test_bubble_without_chunks(name, p, m, f, b):
    assert bubble(name, p, m, f, b, 0.0) == pytest.approx((p - 1) * (f + b))


@settings(max_examples=40)
@given(p=stages, groups=st.integers(1, 4), v=st.integers(2, 4), f=times, b=times)
def test_interleaved_bubble_is_divided_by_chunks(p, groups, v, f, b):
    # arXiv:2104.04473, section 2.2; here f and b are of a chunk
    assert bubble("interleaved", p, p * groups, f, b, 0.0, v) == pytest.approx((p - 1) * (f + b))
    for stage, row in enumerate(prism.make_schedule("interleaved", p, p * groups, v)):
        first_backward = next(i for i, action in enumerate(row) if action.kind == "B")
        warmup = min((p - stage - 1) * 2 + (v - 1) * p, p * groups * v)  # as in Megatron-LM
        # the last warm-up forward is followed by the forward of the first pair, if one is left
        assert first_backward == min(warmup + 1, p * groups * v)


@settings(max_examples=40)
@given(p=stages, more=st.integers(0, 9), f=times, b=times, share=st.floats(0.05, 1.0))
def test_zb_h1_bubble(p, more, f, b, share):
    # arXiv:2401.10241, table 2: (p - 1) (T_F + T_B - T_W), where W is the shortest
    w = share * min(f, b)
    assert bubble("zb-h1", p, p + more, f, b, w) == pytest.approx((p - 1) * (f + b - w))


@pytest.mark.parametrize(("p", "m"), [(2, 3), (3, 5), (4, 8), (7, 13)])
def test_bubbles_of_equal_thirds(p, m):
    # arXiv:2401.10241: a third of 1F1B's with ZB-H1; ZB-V leaves nothing but the way to a stage
    thirds = 1.0, 1.0, 1.0
    assert bubble("zb-h1", p, m, *thirds) == pytest.approx(bubble("1f1b", p, m, *thirds) / 3)
    schedule = prism.make_schedule("zb-v", p, m)
    assert span(items_of("zb-v", schedule, *thirds))[1] == pytest.approx([0.0] * p)
    assert bubble("zb-v", p, m, *thirds) == pytest.approx(p - 1)


@settings(max_examples=40)
@given(p=stages, m=st.integers(1, 20), f=times, more=times, share=st.floats(0.05, 1.0))
def test_zb_v_with_other_durations(p, m, f, more, share):
    m, b, w = max(m, 2 * p - 1), f + more, share * f
    assert bubble("zb-v", p, m, f, b, w) == pytest.approx((p - 1) * max(b, 2 * (b - w)))


@settings(max_examples=30)
@given(p=stages, more=st.integers(0, 9), f=times, share=st.floats(0.05, 1.0))
def test_dualpipe_v_bubble(p, more, f, share):
    m, b, w = PAIRS * p + more, f, share * f
    # DualPipe's README: (PP / 2 - 1) (F&B + B - 3 W), where a pair ends as one and PP = 2 p; a
    # forward that does not wait for the backward beside it leaves less
    assert bubble("dualpipe-v", p, m, f, b, w) == pytest.approx((p - 1) * (f + b - w))


# --------------------------------------------------------------------------------------- orders
def test_interleaved_megatron_order():
    row = prism.make_schedule("interleaved", 2, 4, 2)[1]
    assert " ".join(f"{kind}{microbatch}.{chunk}" for kind, chunk, microbatch in row) == (
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
    )
    assert prism.make_schedule("interleaved", 4, 6) == prism.make_schedule("1f1b", 4, 6)


@pytest.mark.parametrize("name", NAMES)
def test_one_stage_is_sequential(name):
    (row,) = prism.make_schedule(name, 1, 2, 2)
    once = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    assert row == tuple((kind, c, m) for m in range(2) for kind, c in once)


def refused(name, p, m, v):
    """What a schedule cannot have, by its definition."""
    if p == 1:
        return False
    if name == "interleaved":
        return v > 1 and m % p > 0
    if name in V:
        return v != 2 or (name == "dualpipe-v" and m < PAIRS * p)
    return v > 1


@settings(max_examples=examples(120))
@given(name=st.sampled_from(NAMES), p=st.integers(1, 8), m=st.integers(1, 24),
       v=st.integers(1, 4))  # fmt: skip
def test_everything_once_and_to_the_end(name, p, m, v):
    if refused(name, p, m, v):
        with pytest.raises(prism.PrismError):
            prism.make_schedule(name, p, m, v)
        return
    schedule = prism.make_schedule(name, p, m, v)
    once = [(c, k) for c in range(v) for k in range(m)]
    for row in schedule:
        for kind in "FB":
            assert sorted((c, k) for own, c, k in row if own == kind) == once
        late = sorted((c, k) for kind, c, k in row if kind == "W")
        assert len(late) == len(set(late))
        if p > 1 and name in ("zb-h1", "zb-v"):
            assert late == once
        elif name != "dualpipe-v" or p == 1:
            assert not late
    makespan, _ = span(items_of(name, schedule, 1.0, 1.0, 1.0))  # ends, or would go on for ever
    assert makespan >= 3 * m * v


def in_flight(schedule):
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


@pytest.mark.parametrize(("p", "m"), [(2, 16), (3, 24), (4, 16), (8, 24)])
def test_activations_in_flight_as_published(p, m):
    table = {
        # chunk activations of every stage
        "gpipe": [m] * p,
        "1f1b": [p - s for s in range(p)],  # arXiv:2104.04473, 2.2.1
        "zb-h1": [p] * p,  # arXiv:2401.10241, 2.1: all workers hold p, as 1F1B's first
        "zb-v": [2 * p] * p,  # its section 6: p of both chunks, as 1F1B's first
    }
    for name, counts in table.items():
        assert in_flight(prism.make_schedule(name, p, m)) == counts
    # arXiv:2205.05198, 4.2.3: 1 + (p - 1) / (p v) of p stages' worth, in chunks p v + p - 1
    v, rounds = 3, p * max(2, m // p)
    assert max(in_flight(prism.make_schedule("interleaved", p, rounds, v))) == p * v + p - 1
    # DualPipe's README: PP + 1, where PP = 2 p for the one in a V
    assert max(in_flight(prism.make_schedule("dualpipe-v", p, m))) == 2 * p + 1


# ------------------------------------------------------------------------------------ the command
@pytest.mark.parametrize("name", NAMES)
def test_figures_and_files_of_a_schedule(run, tmp_path, name):
    p, m, v = 3, 6, 2 if name in (*V, "interleaved") else 1
    schedule, csv = prism.make_schedule(name, p, m, v), tmp_path / "schedule.csv"
    status, out, _ = run(
        "schedule", name, "--stages", p, "--microbatches", m, "--chunks", v, "--csv", csv, "--json"
    )
    assert status == 0
    found = json.loads(out)
    makespan, _ = span(items_of(name, schedule, 1.0, 1.0, 1.0))
    assert found["slots"] == {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "step": makespan}
    assert found["idle_fraction"] == pytest.approx(1.0 - 3.0 * m * v / makespan)
    assert [found[key] for key in ("stages", "microbatches", "chunks")] == [p, m, v]
    cells = [line.split(",") for line in csv.read_text().splitlines()]
    for stage, (row, letters, line) in enumerate(
        zip(schedule, found["actions"], cells, strict=True)
    ):
        late = {(c, k) for kind, c, k in row if kind == "W"}
        own = [("I" if kind == "B" and (c, k) in late else kind, c, k) for kind, c, k in row]
        assert own == [tuple(action) for action in letters]
        assert line == [f"{virtual_of(name, p, stage, c)}{kind}{k}" for kind, c, k in own]


@pytest.mark.parametrize(
    ("name", "m", "slots", "rows"),
    [
        ("1f1b", 2, 9, ["F0 F1 . . B0 - . B1 -", ". F0 B0 - F1 B1 - . ."]),
        ("zb-h1", 3, 10, ["F0 F1 . I0 W0 F2 I1 W1 I2 W2", ". F0 I0 F1 I1 W0 F2 I2 W1 W2"]),
        ("dualpipe-v", 4, 25, None),
    ],
)
def test_text_of_a_schedule(run, name, m, slots, rows):
    *text, last = run("schedule", name, "--stages", 2, "--microbatches", m)[1].splitlines()
    assert re.match(rf"{slots}\b", last)
    if rows is not None:
        assert [" ".join(line.partition("|")[2].split()) for line in text] == rows


@pytest.mark.parametrize(
    ("args", "numbers"),
    [
        (("1f2b", 2, 2), ()),
        (("1f1b", 0, 2), (0,)),
        (("1f1b", 2, 0), (0,)),
        (("1f1b", 2, 2, 2), (1,)),
        (("interleaved", 4, 6, 2), (4, 8)),
        (("interleaved", 4, 3, 2), (4,)),
        (("zb-h1", 2, 4, 2), (1,)),
        (("zb-v", 2, 4, 1), (2,)),
        (("zb-v", 2, 4, 3), (2,)),
        (("dualpipe-v", 4, 7, 2), (8,)),
    ],
)
def test_counts_that_are_refused_name_those_that_are_not(args, numbers):
    with pytest.raises(prism.PrismError) as error:
        prism.make_schedule(*args)
    assert {str(n) for n in numbers} <= set(re.findall(r"\d+", str(error.value)))


@pytest.mark.parametrize("name", NAMES)
def test_a_circle_is_a_deadlock(name):
    """Schedules of other makes are played as they are, until one stage waits for another."""
    schedule = prism.make_schedule(name, 3, 9)
    rows = [list(row) for row in schedule]
    i, j = (next(k for k, a in enumerate(rows[1]) if a.kind == kind) for kind in "FB")
    rows[1][i], rows[1][j] = rows[1][j], rows[1][i]
    with pytest.raises(prism.PrismError):
        prism.plots.plot_schedule(type(schedule)(rows, schedule.shape))


def test_drawn_weights_have_a_colour_of_their_own():
    ax = prism.plots.plot_schedule(prism.make_schedule("dualpipe-v", 2, 4))
    colours = {}
    for container in ax.containers:
        (bar,) = container.patches
        colours.setdefault(bar.get_facecolor()[:3], set()).add(bar.get_width())
    # forward, whole backward, and its halves
    assert sorted(map(sorted, colours.values())) == [[1.0], [1.0], [1.0], [2.0]]
    assert len(ax.get_legend().get_texts()) == 4


def test_a_chart_goes_on_below_where_a_terminal_is_narrow(run):
    words = ("schedule", "dualpipe-v", "--stages", "4", "--microbatches", "8")
    whole = run(*words)[1]
    ours, its = os.openpty()
    termios.tcsetwinsize(its, (50, 60))
    with open(its, "wb") as end:
        command = [sys.executable, "-m", "prism", *words]
        env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        subprocess.run(command, stdout=end, stdin=end, stderr=subprocess.PIPE, env=env, check=True)
    parted = os.read(ours, 1 << 16).decode().replace("\r", "")
    os.close(ours)
    assert max(map(len, whole.splitlines())) > 60 >= max(map(len, parted.splitlines()))

    def cells(text):
        rows = [line.split(" | ") for line in text.splitlines() if " | " in line]
        return {stage: " ".join(row for own, row in rows if own == stage).split()
                for stage, _ in rows}  # fmt: skip

    assert cells(whole) == cells(parted) and len(parted.splitlines()) > len(whole.splitlines())
