"""What must hold between the keys of a job's run: its end, checkpoints, failures, slow nodes.

Generators of problems like those of `prism.jobs.jobspec.check`. What depends on the length of a
step is checked when the run is simulated (`prism.simulation.runs.states`).
"""

from collections.abc import Iterator
from itertools import pairwise

from prism.jobs.jobspec.blocks import RunBlock
from prism.jobs.jobspec.problem import Blocks, Problem

_SLOW = "variability.effects.fail_slow"


def check_run(b: Blocks) -> Iterator[Problem]:
    """Check the end of the run, its thresholds, and what interrupts it."""
    r = b.run
    if r is None:
        return
    if r.steps is not None and r.tokens is not None:
        keys = ("run.tokens", "run.steps")
        yield Problem("run.tokens", keys, "given beside steps; keep one of the two")
    durations = None if b.model is None else b.model.durations
    if r.tokens is not None and b.model and durations is not None and b.model.seq_len < 1:
        text = "a step's tokens are not known with durations; set steps, or model.seq_len"
        yield Problem("run.tokens", ("run.tokens", "model.seq_len", "model.durations"), text)
    yield from _check_ramp(b, r)
    yield from _check_checkpoint(b, r)
    yield from _check_failures(r)
    thresholds = r.slowdown_thresholds
    if not thresholds or any(low >= high for low, high in pairwise(thresholds)):
        key = "run.slowdown_thresholds"
        yield Problem(key, (key,), "expected rising numbers; write [1.05, 1.1, 1.2]")


def _check_ramp(b: Blocks, r: RunBlock) -> Iterator[Problem]:
    key = "run.batch_ramp"
    if not r.batch_ramp:
        return
    tokens = [phase.tokens for phase in r.batch_ramp]
    if any(low >= high for low, high in pairwise(tokens)):
        text = "expected phases in the order of their tokens, which count from the start"
        yield Problem(key, (key,), text)
    if b.model is not None and b.model.durations is not None:
        text = "has no effect on durations, which are those of one batch; leave one of them out"
        yield Problem(key, (key, "model.durations"), text)
    if b.variability is not None and b.variability.model is not None:
        text = "has no effect with a fitted model, which has the batch of its trace; leave it out"
        yield Problem(key, (key, "variability.model"), text)


def _check_checkpoint(b: Blocks, r: RunBlock) -> Iterator[Problem]:
    c, key = r.checkpoint, "run.checkpoint"
    if c is None:
        return
    if c.interval is None and c.interval_steps is None:
        text = "says not how often; give interval: 30min, or interval_steps: 500"
        yield Problem(key, (key, f"{key}.interval", f"{key}.interval_steps"), text)
    elif c.interval is not None and c.interval_steps is not None:
        keys = (f"{key}.interval_steps", f"{key}.interval")
        yield Problem(keys[0], keys, "given beside interval; keep one of the two")
    if c.write_s is None and b.model is not None and b.model.durations is not None:
        text = "missing: without a model nothing says how large a checkpoint is; give its seconds"
        yield Problem(f"{key}.write_s", (f"{key}.write_s", key, "model.durations"), text)
    if c.interval is not None and c.write_s is not None and c.write_s >= c.interval:
        text = f"a checkpoint takes {c.write_s:g} s to write, but one begins every "
        text += f"{c.interval:g} s; make the interval longer"
        yield Problem(f"{key}.interval", (f"{key}.interval", f"{key}.write_s"), text)


def _check_failures(r: RunBlock) -> Iterator[Problem]:
    f, key = r.failures, "run.failures"
    if f is None:
        return
    if r.checkpoint is None and f.per_1000_node_days > 0.0:
        text = "without checkpoints every failure would lose all work since the start; "
        text += "set run.checkpoint: {interval: 30min}"
        yield Problem(key, (key, "run.checkpoint"), text)
    if f.repair is not None and f.spares is None:
        text = "has no effect where spares are always enough; give spares, or leave it out"
        yield Problem(f"{key}.repair", (f"{key}.repair", f"{key}.spares"), text)


def check_slow_nodes(b: Blocks) -> Iterator[Problem]:
    """Check what fail-slow episodes need from the run, and the other way round."""
    if b.variability is None or b.variability.effects.fail_slow is None:
        return
    slow = b.variability.effects.fail_slow
    if slow.rate_per_1000_node_days is None:
        key = f"{_SLOW}.rate_per_1000_node_days"
        yield Problem(key, (key, _SLOW), "missing, expected episodes per 1,000 node-days; give it")
    if slow.replace and slow.detection is None:
        key = f"{_SLOW}.detection"
        text = "missing: a slow node is replaced once it is found; give for example 10min"
        yield Problem(key, (key, f"{_SLOW}.replace"), text)
    if slow.detection is not None and not slow.replace:
        key = f"{_SLOW}.detection"
        text = "has no effect where a slow node stays; set replace: true, or leave it out"
        yield Problem(key, (key, f"{_SLOW}.replace"), text)
    r = b.run
    if slow.replace and r is not None and (r.checkpoint is None or r.failures is None):
        text = "a replaced node means a restart from a checkpoint; set run.checkpoint and "
        text += "run.failures, whose restart it takes"
        keys = (f"{_SLOW}.replace", "run.checkpoint", "run.failures")
        yield Problem(keys[0], keys, text)
