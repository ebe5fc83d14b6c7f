"""Calibration on measured sizes of MLPerf's GPT-3, against a size that it was not shown."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from prism import fit_calibrated, load_job, save
from prism.models.calibration import predict
from prism.models.calibration.model import load_calibration
from prism.simulation.prepare import prepare
from prism.simulation.steps import run_blocks

DATA = Path(os.environ.get("PRISM_DATA", Path(__file__).parents[2] / "shared" / "data"))
TABLE = DATA / "mlperf" / "step_times.parquet"

pytestmark = pytest.mark.skipif(
    not TABLE.is_file(), reason=f"no measured data in {DATA}; set PRISM_DATA to its folder"
)

MICROBATCHES = {64: 128, 512: 16, 768: 16}  # of a replica, by nodes (systems.csv)
SYSTEMS = {64: "eos_n64_ngc23.09_nemo", 512: "eos-dfw_n512_ngc23.09_nemo",
           768: "eos-dfw_n768_ngc23.09_nemo"}  # fmt: skip
WARM_UP = 5  # first steps of a run
WORSE = 0.003  # than a baseline, at most


def job_of(nodes, *more):
    """tp 4, pp 8, vpp 12 on nodes of 8 H100, as submitted."""
    return load_job("gpt3-175b-512", [
        f"cluster.nodes={nodes}", f"parallelism.dp={nodes // 4}",
        f"parallelism.microbatches={MICROBATCHES[nodes]}", *more,
    ])  # fmt: skip


def steps_of(nodes):
    """Logged steps of a system: without warm-up and gaps that an evaluation lies in."""
    table = pd.read_parquet(TABLE, filters=[("round", "==", "v3.1"), ("benchmark", "==", "gpt3"),
                                            ("system", "==", SYSTEMS[nodes])])  # fmt: skip
    table = table[(table.log_idx >= WARM_UP) & ~table.crosses_eval & (table.n_avg == 1)]
    return table.rename(columns={"log_idx": "step"})[["run", "step", "step_s"]]


@pytest.mark.slow
def test_gpt3_of_6144_gpus_from_512_and_4096(tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "CLUSTERS", (8, 8))  # means to 0.04 %, the bound is 2 %
    pytest.importorskip("pyarrow")
    sizes = []
    for nodes in (64, 512):
        path = tmp_path / f"{nodes}.csv"
        steps_of(nodes).to_csv(path, index=False)
        sizes.append((job_of(nodes), path))
    model = tmp_path / "m.nc"
    save(fit_calibrated(sizes, 0), model)
    measured = np.quantile(steps_of(768).step_s, [0.5, 0.95])
    predicted = prepare(job_of(768, f"variability.model={model}"), 1).program
    own = np.quantile(run_blocks(predicted, range(16), 1)[0], [0.5, 0.95])
    found = load_calibration(model)
    nearest = found.nearest(6_144)
    assert nearest.world_size == 4_096
    copy = np.quantile(nearest.steps_s, [0.5, 0.95])
    line = copy * found.line(MICROBATCHES[768]) / np.median(nearest.steps_s)
    errors = {k: np.abs(v / measured - 1.0) for k, v in
              {"own": own, "copy": copy, "line": line}.items()}  # fmt: skip
    assert errors["own"][0] < 0.02 and errors["own"][1] < 0.03
    for baseline in ("copy", "line"):
        assert np.all(errors["own"] < errors[baseline] + WORSE), errors
    # the job as it stands, in a format that the machine did not run, is no prediction
    plain = run_blocks(prepare(job_of(768), 1).program, range(1), 1)[0]
    assert abs(np.median(plain) / measured[0] - 1.0) > 0.1
