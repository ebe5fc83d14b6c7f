"""The simulated training program against closed forms, and its files against its own times."""

import numpy as np
import programs_made as made
import pytest
from deviceprogram import GAP, LATENCY, RETURN, Program, simulate

QUIET = {"kernel_cv": 0.0, "host_cv": 0.0, "step_cv": 0.0}
HOST = 20e-6  # python and call of one launch


def one(n, us, *more, **options):
    return Program(((*[made.kernel("k", us)] * n, *more),), **options)


def test_a_device_bound_step_is_the_sum_of_its_kernels_and_gaps():
    run = simulate(one(50, 100.0))
    assert run.periods == pytest.approx(50 * (100e-6 + GAP), rel=1e-9)
    assert run.ends[0] == pytest.approx(HOST + LATENCY + 50 * (100e-6 + GAP) - GAP)
    assert run.gap_share() == 0.0
    assert run.gap_share(since="start") == pytest.approx(GAP / (100e-6 + GAP))
    assert np.diff(run.lead[:, 0]) == pytest.approx(run.periods - 50 * HOST)


def test_a_host_bound_step_is_the_hosts_time():
    run = simulate(one(50, 5.0))
    assert run.periods == pytest.approx(50 * HOST)
    assert run.gap_share() == pytest.approx((HOST - LATENCY - 5e-6) / HOST)


@pytest.mark.parametrize(("pinned", "sync"), [(False, 5e-6), (True, 0.0)])
def test_a_read_scalar_makes_host_and_device_take_turns(pinned, sync):
    run = simulate(one(50, 100.0, *made.item(pinned=pinned)))
    serial = HOST + LATENCY + 50 * (100e-6 + GAP) + 1.5e-6 + RETURN + sync
    assert run.periods == pytest.approx(serial)
    assert run.gap_share() == pytest.approx((RETURN + sync + HOST) / serial)
    assert (run.lead < 0.0).all()


def test_a_full_queue_holds_the_host():
    run = simulate(one(50, 100.0, depth=20))
    assert run.most_pending == [20]
    assert run.periods == pytest.approx(50 * (100e-6 + GAP))
    long = [call.end - call.start for call in run.calls[0][30:]]
    assert np.array(long) == pytest.approx(100e-6 + GAP - 12e-6)
    assert run.lead.max() < 20 * (100e-6 + GAP)


def test_a_collective_ends_for_all_after_the_last_arrival():
    actions = (made.kernel("k", 100.0), made.all_reduce(300.0, (0, 1), 8, stream=7))
    run = simulate(Program((actions,) * 2, slowness=(1.0, 3.0), kernel_cv=0.1), 20)
    mine, other = (run.activities(rank)[1::2] for rank in (0, 1))
    assert [a.end for a in mine] == [a.end for a in other]
    for a, b in zip(mine, other, strict=True):
        assert a.end == pytest.approx(max(a.start, b.start) + a.seconds) and a.start < b.start
    waited = run.busy()[made.NCCL] - run.busy(waiting=False)[made.NCCL]
    assert waited == pytest.approx(100e-6, rel=0.2) and run.busy()["k"] == pytest.approx(2e-4, 0.1)


def test_a_stream_waits_for_what_the_other_held_at_the_record():
    actions = [*made.wait("a", 7, 20), made.kernel("b", 400.0, stream=20), *made.wait("b", 20, 7)]
    run = simulate(one(1, 100.0, *actions, made.kernel("c", 100.0)))
    first, b, c = run.activities(0)[-3:]
    assert (b.start, c.start) == pytest.approx((first.end + GAP, b.end + GAP))
    assert run.periods == pytest.approx(600e-6 + 3 * GAP)


@pytest.mark.parametrize("name", ["device_bound", "host_bound", "mixed", "cuda_graphs"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.7, 1.0), (1.0, 2.0), (0.7, 0.5)])
def test_scales_change_the_period_by_what_bounds_it(name, scales):
    program = made.PROGRAMS[name](kernel_cv=0.0, host_cv=0.0, step_cv=0.0)
    kernels = [s for a in program.ranks[0] for _, s in a.kernels]
    host = sum(a.python + a.call for a in program.ranks[0])
    run = simulate(program, 12, kernel_scale=scales[0], launch_scale=scales[1])
    expected = max(scales[0] * sum(kernels) + len(kernels) * GAP, scales[1] * host)
    assert run.periods[8:] == pytest.approx(expected, rel=1e-9)
    assert {len(c.made) for c in run.calls[0] if c.action.graph} <= {60, 120}


def test_a_what_if_changes_no_draw():
    program = made.eight_ranks()
    run, same, other = (simulate(program, 6, seed) for seed in (0, 0, 1))
    assert (run.ends == same.ends).all() and not (run.ends == other.ends).any()
    faster = simulate(program, 6, kernel_scale=0.5)
    drawn, half = (np.array([a.seconds for a in r.activities(0)]) for r in (run, faster))
    assert half == pytest.approx(0.5 * drawn)
