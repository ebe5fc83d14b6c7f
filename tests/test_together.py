"""Variants of a step that are run together: each takes what it takes alone, bit for bit."""

import numpy as np
import pytest
from rank_jobs import small

from prism import engine
from prism.analyses.rankings.freezing import freeze_effect, treat_ops
from prism.analyses.rankings.shares import list_inputs
from prism.jobs.job import Job, load_job
from prism.simulation import steps, together
from prism.simulation.causes import measure_residuals, swap_keys
from prism.simulation.prepare import prepare, silence, treat_classes
from prism.simulation.steps import run_blocks, run_variants
from prism.simulation.variability import Treatment

EFFECTS = {
    "rank": {"cv": 0.02}, "step": {"cv": 0.01}, "microbatch": {"cv": 0.02}, "call": {"cv": 0.01},
    "residual": {"cv": 0.02, "law": "gamma"},
}  # fmt: skip
MEETING = ["parallelism.dp=4", "parallelism.pp=4", "cluster.nodes=16", "parallelism.microbatches=8"]
JOBS = {
    "replicas one after another": lambda: small(**EFFECTS),
    "stalls": lambda: small(**EFFECTS, stall={"rate_per_hour": 40.0, "duration_s": 5.0}),
    "jitter": lambda: small(**EFFECTS, jitter={"mean_s": 0.3, "cv": 0.5}),
    "replicas meet in mid-step": lambda: load_job("llama3-405b-16k", MEETING),
}


def variants_of(job: Job):
    """Programs and keys as a ranking and an estimate have them."""
    step = prepare(job, 1)
    program, inputs = step.program, list_inputs(step, measure_residuals(step, 1))
    programs, keys = [program, program], [1, 2]
    for entry in inputs:
        if not entry.is_constant:
            programs += [program, program]
            keys += [swap_keys(entry, 1, 2, 3), swap_keys(entry, 2, 1, 3)]
    for entry in inputs:
        if entry.kind == "effects":
            changed = freeze_effect(program, entry.name)
        elif step.workload is None:
            k = program.classes.index(entry.name)
            changed = treat_ops(program, program.shares[:, k] > 0.0, Treatment(frozen=True))
        else:
            changed = treat_classes(step, {entry.name: Treatment(frozen=True)}, 1)
        programs.append(changed)
        keys.append(1)
    programs.append(silence(step, 1))
    return programs, [*keys, 1]


@pytest.mark.parametrize("rooms", [together.BUFFERS, 3000], ids=["all replicas", "a few at a time"])
@pytest.mark.parametrize("name", JOBS)
def test_each_takes_what_it_takes_alone(name, rooms, monkeypatch):
    programs, keys = variants_of(JOBS[name]())
    groups = together.group_variants(programs)
    assert sorted(i for group in groups for i in group) == list(range(len(programs)))
    assert name == "stalls" or max(map(len, groups)) > 2
    monkeypatch.setattr(steps, "group_variants", lambda _: groups)
    monkeypatch.setattr(together, "BUFFERS", rooms)
    found = run_variants(programs, range(1, 3), keys, threads=2)
    for program, key, (time, effect) in zip(programs, keys, found, strict=True):
        alone = run_blocks(program, range(1, 3), key)
        assert np.array_equal(time, alone[0]) and np.array_equal(effect, alone[1])
    assert len({time.tobytes() for time, _ in found}) > len(found) // 2  # they do differ


def test_steps_with_stalls_of_their_own_are_run_alone():
    step = prepare(JOBS["stalls"](), 1)
    program = step.program
    assert program.stalls.entity == engine.GROUP_STALL
    assert together.group_variants([program, program]) == [[0], [1]]
    calm = freeze_effect(program, "stall")
    assert together.group_variants([calm, program, calm]) == [[0, 2], [1]]
    other = prepare(small(**EFFECTS, steps=3), 1).program
    assert together.group_variants([calm, other])[0] == [0, 1]
