"""What every test shares: hypothesis settings, and a made-up result for plots and tables."""

import gc
import os
import signal

# threads of several processes that wait for work in a loop would take each other's processors
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# of the processes that are started from here on: memory is kept, not given back and asked for again
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 30))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 32))

import numpy as np
import pytest
import xarray as xr
from campaign import examples
from hypothesis import settings

# the first example of a test may compile the engine
settings.register_profile("prism", deadline=None, max_examples=examples(50))
settings.load_profile("prism")

# a shell has it ignored in what it starts in the background, and so in the commands of the tests
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    """Thousands of tests are kept to the end: not looked through again for what can be freed."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def free_beside(monkeypatch):
    """Transfers that take nothing of the compute beside them, for what is told by closed forms."""
    free = "prism.workload.build.contended"
    monkeypatch.setattr(free, lambda cost, again, group, work, *beside: work)


@pytest.fixture
def small_pools(monkeypatch):
    """Pooled distributions of ops as fine as a few thousand steps need."""
    monkeypatch.setattr("prism.simulation.no_dependence.POOL_SAMPLES", 1 << 13)


@pytest.fixture
def few_repeats(monkeypatch):
    """Intervals of fits of step times by as few repetitions as there can be."""
    monkeypatch.setattr("prism.models.steptimes.likelihood._CELLS", 0)


@pytest.fixture
def few_clusters(monkeypatch):
    """Shares and comparisons of a ranking by fewer clusters than answers rest on."""
    monkeypatch.setattr("prism.analyses.estimate.REPLICATES", 2560)
    monkeypatch.setattr("prism.analyses.rankings.shares.MAX_BLOCKS", 16)
    monkeypatch.setattr("prism.analyses.rankings.interventions.MOST_BLOCKS", 8)


@pytest.fixture
def empty_pictures(monkeypatch):
    """Pictures that are empty files, where nobody looks at them: each takes half a second."""

    def touch(ax, *paths):
        for path in paths:
            path.touch()

    monkeypatch.setattr("prism.plots.save_figure", touch)


@pytest.fixture
def made_up_result():
    """Result of known distributions: 50 clusters of 20 steps, 100 runs."""
    generator = np.random.default_rng(3)
    cluster_idx = np.repeat(np.arange(50), 20)
    step_time = 11.0 + 0.1 * generator.standard_normal(50)[cluster_idx]
    step_time = step_time + 0.05 * generator.standard_normal(1_000)
    run = 86_400.0 * (50.0 + generator.standard_normal(100))
    return xr.Dataset(
        {
            "step_time": ("replicate", step_time, {"units": "s"}),
            "cluster_idx": ("replicate", cluster_idx),
            "time_to_train": ("run_replicate", run, {"units": "s"}),
            "ideal_step_time": ((), 10.5, {"units": "s"}),
            "deadline": ((), 51.0 * 86_400.0, {"units": "s"}),
        },
        attrs={"job_name": "made-up", "seed": 3},
    )


@pytest.fixture
def run(capfd):
    """Run a command in this process: status, stdout, stderr."""
    from prism import __main__ as entry

    def call(*arguments):
        status = entry.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return call
