"""Golden results: the same job and seed give the same bits as before.

A hash is 64 bits of BLAKE2b over the little-endian float32 step times of the first two clusters.
A change here changes what users get for their seed. If it is meant, put the new numbers below and
say in CHANGELOG.md, first under "Results change", which results change, by how much and why; the
mean beside each hash tells a new model (mean moves) from a new order of draws or of rounding.

The numbers do not depend on machine or threads as long as the quantile tables come out alike. The
tables are made by SciPy and NumPy in float64, whose special functions may differ by 1e-16 between
versions and processors, and are then rounded to float32: nearly always to the same number. A change
with equal means after an update of SciPy or NumPy is therefore no change of the model, and is
recorded all the same.
"""

import hashlib

import pytest

from prism import load_job, simulate

REPLICATES, SEED = 128, 1

# fsdp over a pipeline with every effect. No node share: it goes through the C library's erfc.
FSDP = {
    "model": {
        "n_layers": 8, "hidden_size": 2048, "ffn_size": 5632, "n_heads": 16, "vocab_size": 32000,
        "seq_len": 4096,
    },
    "parallelism": {
        "tp": 2, "pp": 2, "vpp": 2, "dp": 4, "data_parallel": "fsdp", "microbatches": 4,
    },
    "cluster": {"nodes": 2, "node_slowdowns": {1: 1.1}},
    "variability": {
        "library": None,
        "effects": {
            "rank": {
                "cv": 0.015, "lemon_fraction": 0.05, "lemon_slowdown": [1.06, 1.2], "node_share": 0,
            },
            "step": {"cv": 0.0115},
            "microbatch": {"cv": 0.014, "backward_loading": 1.5, "loss_loading": 0.67},
            "call": {"cv": 0.005},
            "residual": {"law": "gamma", "cv": 0.05},
            "stall": {"entity": "rank", "rate_per_hour": 600.0, "duration_s": 0.2},
        },
    },
}  # fmt: skip
INDEPENDENT = FSDP | {"variability": FSDP["variability"] | {"dependence": "none"}}

# name: job, hash, mean step time [s]
GOLDEN = {
    "pipeline-8x32": (load_job("pipeline-8x32"), "bb60aaf49a0bb37d", 120.62210911512375),
    "fsdp": (load_job(FSDP), "198c52d84b516824", 0.09943069523433223),
    "fsdp, dependence none": (load_job(INDEPENDENT), "c69394c3f15c9016", 0.09916733560385182),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_results_are_as_before(name):
    job, expected, expected_mean = GOLDEN[name]
    step_time = simulate(job, REPLICATES, seed=SEED, threads=1).step_time.to_numpy()
    found = hashlib.blake2b(step_time.astype("<f4").tobytes(), digest_size=8).hexdigest()
    mean = float(step_time.mean())
    assert mean == pytest.approx(expected_mean, rel=1e-6), f"hash {found}, mean {mean!r} s"
    assert found == expected, f"hash {found}, though the mean is {mean!r} s as before"


def test_another_seed_is_another_result():
    job, golden, _ = GOLDEN["pipeline-8x32"]
    step_time = simulate(job, REPLICATES, seed=SEED + 1, threads=1).step_time.to_numpy()
    assert hashlib.blake2b(step_time.astype("<f4").tobytes(), digest_size=8).hexdigest() != golden
