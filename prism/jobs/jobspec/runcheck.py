"""What must hold between the keys of a job's run: its end, checkpoints, failures, slow nodes.

What depends on the length of a step is checked when the run is simulated
(`prism.simulation.runs.states`).
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from prism.jobs.jobspec.problem import Blocks, Problem


def _rises(values: Sequence[float]) -> bool:
    return all(low < high for low, high in pairwise(values))


def check_run(b: Blocks) -> Iterator[Problem]:
    """Check the end of the run, its thresholds, and what interrupts it."""
    r, durations = b.run, b.model.durations
    if r.steps is not None and r.tokens is not None:
        yield "given beside steps; keep one of the two", "run.tokens", "run.steps"
    if r.tokens is not None and durations is not None and b.model.seq_len < 1:
        text = "a step's tokens are not known with durations; set steps, or model.seq_len"
        yield text, "run.tokens", "model.seq_len", "model.durations"
    if not _rises([phase.tokens for phase in r.batch_ramp or ()]):
        text = "expected phases in the order of their tokens, which count from the start"
        yield text, "run.batch_ramp"
    if not r.slowdown_thresholds or not _rises(r.slowdown_thresholds):
        yield "expected rising numbers; write [1.05, 1.1, 1.2]", "run.slowdown_thresholds"
    if r.checkpoint is not None:
        yield from _check_checkpoint(b)
    elif r.failures is not None and r.failures.per_1000_node_days > 0.0:
        text = "without checkpoints every failure would lose all work since the start; "
        yield text + "set run.checkpoint: {interval: 30min}", "run.failures", "run.checkpoint"


def _check_checkpoint(b: Blocks) -> Iterator[Problem]:
    c, key = b.run.checkpoint, "run.checkpoint"
    assert c is not None
    interval, steps, write_s = f"{key}.interval", f"{key}.interval_steps", f"{key}.write_s"
    if c.interval is None and c.interval_steps is None:
        text = "says not how often; give interval: 30min, or interval_steps: 500"
        yield text, key, interval, steps
    elif c.interval is not None and c.interval_steps is not None:
        yield "given beside interval; keep one of the two", steps, interval
    if c.write_s is None and b.model.durations is not None:
        text = "missing: without a model nothing says how large a checkpoint is; give its seconds"
        yield text, write_s, key, "model.durations"
    if c.interval is not None and c.write_s is not None and c.write_s >= c.interval:
        text = f"a checkpoint takes {c.write_s:g} s to write, but one begins every "
        yield text + f"{c.interval:g} s; make the interval longer", interval, write_s


def check_slow_nodes(b: Blocks) -> Iterator[Problem]:
    """Check what fail-slow episodes need, of the run too."""
    slow, r, key = b.variability.effects.fail_slow, b.run, "variability.effects.fail_slow"
    if slow is None:
        return
    if slow.rate_per_1000_node_days is None:
        text = "missing, expected episodes per 1,000 node-days; give it"
        yield text, f"{key}.rate_per_1000_node_days", key
    if slow.replace and slow.detection is None:
        text = "missing: a slow node is replaced once it is found; give for example 10min"
        yield text, f"{key}.detection", f"{key}.replace"
    if slow.replace and (r.checkpoint is None or r.failures is None):
        text = "a replaced node means a restart from a checkpoint; set run.checkpoint and "
        text += "run.failures, whose restart it takes"
        yield text, f"{key}.replace", "run.checkpoint", "run.failures"
