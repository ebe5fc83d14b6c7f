"""Kernel tables: exact at measured sizes, without jumps between them, never above their best."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism import load_job, load_library
from prism.cluster.devices import DEVICES
from prism.distributions.kerneltables import KernelTable
from prism.workload.build import build_workload
from prism.workload.kernels import Rates

TABLES = {
    (gpu, name): table
    for gpu in ("h100", "h200", "b200", "gb200")
    for name, table in load_library(f"{gpu}-healthy").tables.items()
    if not name.startswith("nvlink/")
}
SIZE = st.floats(1.0, 1e6)


def test_a_table_is_its_points_and_their_geometric_mean_between():
    table = KernelTable({"m": np.array([1.0, 4.0]), "k": np.array([2.0])}, np.array([[1.0], [9.0]]))
    assert [table(m=m, k=7.0, n=3.0) for m in (0.1, 1, 2, 4, 50)] == pytest.approx([1, 1, 3, 9, 9])


@given(st.sampled_from(sorted(TABLES)), st.lists(SIZE, min_size=4, max_size=4))
def test_no_size_is_a_jump_and_none_beats_the_best(key, sizes):
    table = TABLES[key]
    at = dict(zip(table.axes, sizes, strict=False))
    rate = table(**at)
    assert table.rate.min() * (1 - 1e-9) <= rate <= table.rate.max() * (1 + 1e-9)
    for axis in at:
        near = table(**{**at, axis: at[axis] * (1.0 + 1e-7)})
        assert near == pytest.approx(rate, rel=1e-5)


@given(st.sampled_from(sorted(TABLES)), st.data())
def test_measured_sizes_have_their_measured_rate(key, data):
    table = TABLES[key]
    index = tuple(data.draw(st.integers(0, n - 1)) for n in table.rate.shape)
    at = {name: float(grid[i]) for (name, grid), i in zip(table.axes.items(), index, strict=True)}
    assert table(**at) == pytest.approx(table.rate[index], rel=1e-9)


@given(
    st.sampled_from(["h100", "b200", "gb200"]), st.sampled_from(["bf16", "fp8", "fp8_block"]),
    st.sampled_from([1, 2, 4, 8]), st.sampled_from([512, 2048, 8192]), st.integers(1, 4),
)  # fmt: skip
def test_no_job_computes_faster_than_the_best_product(gpu, precision, tp, seq, batch):
    library = load_library(f"{gpu}-healthy")
    job = load_job({
        "model": {"name": "llama3-8b", "n_layers": 2, "seq_len": seq},
        "parallelism": {"tp": tp, "precision": precision, "microbatch_size": batch},
        "cluster": {"nodes": 1, "gpus_per_node": tp, "device": gpu},
    })  # fmt: skip
    work = build_workload(job, library)
    kernels = [k for row in work.chunks for c in row for k in (*c.forward, *c.backward) if k.flop]
    best = max(table.rate.max() for (of, _), table in TABLES.items() if of == gpu)
    derate = library.value("nominal/derate_megatron")
    assert all(k.flop / k.duration <= best * max(derate, 1.0) for k in kernels)
    seconds = sum(k.duration for row in work.chunks for c in row for k in (*c.forward, *c.backward))
    assert work.model_flop / tp / seconds < DEVICES[gpu].flop_per_s(precision)


@given(st.floats(1e3, 1e12), st.floats(1.0, 10.0))
def test_more_bytes_take_longer(n_bytes, more):
    rates = Rates(1e15, 1e9, 5e14, 4e14, 2e12, 1e-6)
    assert rates.memory_time(n_bytes) <= rates.memory_time(more * n_bytes)
