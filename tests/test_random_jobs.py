"""Some random job files through estimate, rank, place and sweep: no traceback, invariants hold."""

import json
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from job_files import (
    NOT_DRAWN,
    SCHEMA,
    STRUCTURE,
    entries,
    job_files,
    resolved,
    structures,
    values,
)
from job_invariants import BUDGETS, Broken, check_estimate, check_job, check_sweep

RANDOM = settings(
    deadline=None, database=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def test_random_jobs(run, tmp_path, monkeypatch):
    for place, value in BUDGETS.items():
        monkeypatch.setattr(place, value)
    taken = Counter()

    @settings(RANDOM, max_examples=6)
    @given(job_files())
    def draw(tree):
        taken["files"] += 1
        taken.update(name for name, done in check_job(run, tree, tmp_path).items() if done)

    draw()
    assert taken["files"] >= 6
    # not by refusing: most are jobs, and most of these can be asked anything
    assert taken["estimate"] >= 0.5 * taken["files"]
    assert min(taken[name] for name in ("rank", "place", "sweep")) >= 0.5 * taken["files"]


def keys_of(schema, path=""):
    """Every key of the schema that has a value."""
    schema = resolved(schema)
    if "properties" in resolved(entries(schema)):
        return keys_of(entries(schema), f"{path}.*")
    if "properties" not in schema:
        return {path}
    return {
        key
        for name, kind in schema["properties"].items()
        if path or name not in ("name", "source")
        for key in keys_of(kind, f"{path}.{name}".lstrip("."))
    }


KEYS = keys_of(SCHEMA)


def some(strategy, n):
    """Draw n values."""
    out = []

    @settings(RANDOM, max_examples=n)
    @given(strategy)
    def draw(value):
        out.append(value)

    draw()
    return out


def kind_of(path):
    """A key's own part of the schema."""
    schema = SCHEMA
    for name in path.split("."):
        schema = resolved(schema)
        schema = entries(schema) if name == "*" else schema["properties"][name]
    return schema


def written(tree, schema=SCHEMA, path=""):
    """Keys of a file and of its blocks, * for a name that the user chose."""
    schema = resolved(schema)
    free = resolved(entries(schema))
    for name, value in tree.items():
        kind = free if "properties" in free else schema["properties"][name]
        here = f"{path}.{'*' if kind is free else name}".lstrip(".")
        yield here
        if isinstance(value, dict) and ("properties" in kind or here not in KEYS):
            yield from written(value, kind, here)


def test_every_key_of_the_schema_can_be_drawn():
    """A key that is added to a block is drawn too; one of a new kind fails here."""
    built = Counter(key for tree in some(structures(), 600) for key in written(tree))
    strategies = {}
    for path in sorted(KEYS - NOT_DRAWN):
        if any(f"{path}.".startswith(f"{block}.") for block in STRUCTURE):
            assert built[path], path
        else:
            strategies[path] = values(kind_of(path), path)
    drawn = some(st.fixed_dictionaries(strategies), 5)
    assert drawn
    for path in strategies:
        assert all(each[path] is not None for each in drawn), f"{path}: its kind has no values"


def test_the_checks_fail_what_is_wrong(run, tmp_path):
    """Negative controls."""
    path = tmp_path / "job.yaml"
    path.write_text("model: {durations: {forward_s: 1.0, backward_s: 2.0}}\nrun: {steps: 200}\n")
    sizes = ("--replicates", 256, "--run-replicates", 20, "--seed", 7, "--json", "-q")
    found = json.loads(run("estimate", path, *sizes)[1])
    check_estimate(found, path)
    for wrong, said in (
        ({"p95": 0.5}, "quantiles fall"),
        ({"mean": 9.0}, "mean outside"),
        ({"p5": -1.0}, "p5 below all"),
    ):
        with pytest.raises(Broken, match=said):
            check_estimate(found | {"step_time": found["step_time"] | wrong}, path)
    with pytest.raises(Broken, match="ideal"):
        check_estimate(found | {"ideal_step_time": 2.0 * found["step_time"]["mean"]}, path)
    vary = "cluster.scale.compute.cv=1.0,1.5"
    swept = json.loads(run("sweep", path, "--vary", vary, *sizes[:2], *sizes[4:])[1])
    check_sweep(swept, found, "cluster.scale.compute.cv", 1.0)
    step = found["step_time"] | {"mean": 1.01 * found["step_time"]["mean"]}
    with pytest.raises(Broken, match="own row"):
        check_sweep(swept, found | {"step_time": step}, "cluster.scale.compute.cv", 1.0)
