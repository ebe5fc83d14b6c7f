"""Ops of a step, op by op, as `prism.timeline` gives them."""

from typing import NamedTuple

import prism


class Op(NamedTuple):
    """An op of a replica's stage [s]."""

    replica: int
    stage: int
    name: str
    kind: str
    microbatch: int
    chunk: int
    start: float
    duration: float
    critical: bool

    @property
    def end(self):
        return self.start + self.duration


def play(job, ideal=True, **shown):
    """Ops of all rows that are shown, stage after stage, by their start."""
    found = prism.timeline(
        job, ideal=ideal, percentiles=(50,), replicates=64, seed=1, **shown
    ).to_xarray()
    text, at = found.label.values, {name: found[name].values for name in found.data_vars}
    rows = at["event_row"]
    mine = at["row_step"][rows] == (1 if ideal else 0)
    ops = [
        Op(
            int(at["replica"][rows[i]]), int(at["stage"][rows[i]]),
            str(text[at["event_name"][i]]), str(text[at["event_kind"][i]]),
            *(int(at[key][i]) for key in ("microbatch", "chunk")),
            *(float(at[key][i]) for key in ("start", "duration")), bool(at["critical"][i]),
        )
        for i in mine.nonzero()[0]
        if text[at["event_stream"][i]] != "waiting"
    ]  # fmt: skip
    return sorted(ops, key=lambda op: (op.replica, op.stage, op.start))


def of_kind(ops, *kinds):
    """Those of some kinds, or names."""
    return [op for op in ops if op.kind in kinds or op.name in kinds]
