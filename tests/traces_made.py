"""Made-up pipeline traces and files for the tests of the readers."""

import numpy as np
import pandas as pd

OPS = ("forward-compute", "forward-send", "forward-recv", "backward-compute", "optimizer")


def pipeline_frame(n_stages=2, n_replicas=2, n_steps=3, n_microbatches=4, seed=0):
    """Pipeline trace: per worker and step, every microbatch in turn, then the optimizer."""
    rng = np.random.default_rng(seed)
    rows = []
    for step in range(10, 10 + n_steps):
        for dp_rank in range(n_replicas):
            for stage in range(n_stages):
                clock = 0.0
                for optype in OPS:
                    compute = optype.endswith("compute")
                    for ordinal in range(1 if optype == "optimizer" else n_microbatches):
                        duration = 0.1 * rng.lognormal(sigma=0.05)
                        rows.append(
                            {
                                "dp_rank": dp_rank,
                                "stage": stage,
                                "rank": dp_rank * n_stages + stage,
                                "step": step,
                                "optype": optype,
                                "start_ts": clock,
                                "duration": duration,
                                "seq_id": ordinal,
                                "mc": 0 if compute else -1,
                                "mb_id": ordinal if compute else -1,
                                "gmc": stage if compute else -1,
                            }
                        )
                        clock += duration
    return pd.DataFrame(rows).sample(frac=1.0, random_state=seed, ignore_index=True)


def write_csv(path, frame):
    """Write a frame as CSV and return its path."""
    frame.to_csv(path, index=False)
    return path
