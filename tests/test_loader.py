"""Data loading: no step is shorter than its batch takes to load, and batches loaded ahead help."""

from collections import deque

import numpy as np
import pytest
from drawn_steps import draw_steps
from scipy import stats

import prism

STEP = 3.0  # s, of one sequence


def made(loader, effects=None, **run):
    return prism.load_job({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "parallelism": {"microbatches": 1},
        "variability": {"library": "none", "effects": effects or {}},
        "run": run | {"loader": loader},
    })  # fmt: skip


def slower(seconds, **keys):
    return {"samples_per_s": 1.0 / seconds, **keys}


@pytest.mark.parametrize(
    ("loader", "mean"),
    [
        (slower(1.0), STEP), (slower(5.0), 5.0), (slower(5.0, prefetch=50), 5.0),
        (slower(1.0, prefetch=0), 4.0), (slower(5.0, prefetch=0), 8.0),
    ],
)  # fmt: skip
def test_constants_take_the_longer_of_both_and_their_sum_without_prefetching(loader, mean):
    found = prism.estimate(made(loader, steps=1000), replicates=640, run_replicates=64, seed=1)
    assert float(found.step_time.mean()) == pytest.approx(mean)
    assert float(found.ideal_step_time) == STEP
    assert float(found.time_to_train.mean()) == pytest.approx(1000 * mean)
    parts = found.parts.mean_share
    assert parts["data_loading"] == pytest.approx(1.0 - STEP / mean)
    assert parts.sum() == pytest.approx(1.0)
    decides = [text for text in found.figures()["warnings"] if text.startswith("data loading")]
    assert len(decides) == (1 / loader["samples_per_s"] > STEP)


def test_communication_hides_behind_a_loader():
    """It is exposed without the loader, and of no weight while that decides the step."""
    job = prism.load_job("llama3-70b-fsdp-512").replace({"run.loader": slower(20.0 / 512)})
    found = prism.simulate(job, 256, seed=1)
    parts = found.parts.mean_share
    assert float(found.step_time.mean()) == pytest.approx(20.0, rel=1e-3)
    assert parts["exposed_dp"] * 20.0 == pytest.approx(0.21 * 9.15, rel=0.1)
    assert float(found.exposed_communication) == pytest.approx(0.0, abs=1e-3)
    assert parts.min() > -1e-6 and parts.sum() == pytest.approx(1.0)


def test_one_batch_ahead_is_the_larger_of_load_and_step():
    sigma = np.log1p(0.25) ** 0.5
    load = stats.lognorm(s=sigma, scale=2.5 * np.exp(-0.5 * sigma**2))
    mean = STEP + load.expect(lambda x: x - STEP, lb=STEP)
    times = draw_steps(made(slower(2.5, cv=0.5, prefetch=1)), 64_000, 1).step_time
    assert float(times.mean()) == pytest.approx(mean, abs=5 * float(times.std()) / 64_000**0.5)


def by_hand(load, step, prefetch):
    """Mean step, batch after batch."""
    ready = end = 0.0
    taken = deque([0.0] * prefetch)
    for a, b in zip(load, step, strict=True):
        ready = max(ready, taken.popleft() if prefetch else end) + a
        begin = max(end, ready)
        taken.append(begin)
        end = begin + b
    return end / len(step)


@pytest.mark.parametrize("prefetch", [0, 2, 6])
@pytest.mark.parametrize(
    ("seconds", "stalls"), [(2.5, {}), (2.9, {}), (1.0, {"stalls_per_hour": 90.0, "stall_s": 8.0})]
)
def test_a_buffer_absorbs_what_it_does_step_by_step(prefetch, seconds, stalls):
    n, rng = 128_000, np.random.default_rng(1)
    sigma, spread = np.log1p(0.3**2) ** 0.5, np.log1p(0.2**2) ** 0.5
    load = seconds * rng.lognormal(-0.5 * sigma**2, sigma, n)
    if stalls:
        hit = rng.random(n) < -np.expm1(-90.0 * seconds / 3600.0)
        load += np.where(hit, rng.exponential(8.0, n), 0.0)
    step = STEP * rng.lognormal(-0.5 * spread**2, spread, n)
    job = made(slower(seconds, cv=0.3, prefetch=prefetch, **stalls), {"step": {"cv": 0.2}})
    times = draw_steps(job, n, 1).step_time
    # 64 steps in a circle know a little less of long queues
    assert float(times.mean()) == pytest.approx(by_hand(load, step, prefetch), rel=0.006)


@pytest.mark.parametrize(("seconds", "cv"), [(1.0, 0.1), (30.0, 0.0)])
def test_what_slows_all_steps_delays_no_run_that_waits_for_its_loader(seconds, cv):
    job = made(slower(seconds), {"step": {"cv": 0.1}, "run": {"cv": 0.1}}, steps=1000)
    runs = prism.estimate(job, replicates=640, run_replicates=1000, seed=1).time_to_train
    assert float(runs.std() / runs.mean()) == pytest.approx(cv, abs=0.012)
