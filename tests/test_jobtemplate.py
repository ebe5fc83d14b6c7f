"""A job written out as a file is the same job."""

from pathlib import Path

import pytest

import prism

RICH = [
    "variability.effects.fail_slow={rate_per_1000_node_days: 1, duration: 90min}",
    "variability.effects.fail_slow.detection=10min",
    "variability.effects.fail_slow.replace=true",
    "variability.effects.rank.lemon_slowdown=[1.05, 1.2]",
    "cluster.node_slowdowns={3: 1.2, 17: {network: 1.5}}",
    "cluster.scale.compute.cv=0.5",
    "run.start=2026-01-05",
    "run.checkpoint={interval: 20min, mode: async}",
    "run.failures={restart: 601, spares: 3, causes: {gpu: {share: 1}}}",
    "run.evaluation={interval_steps: 100, duration: 1min}",
]


@pytest.fixture
def written(run, tmp_path):
    """Write a job out by the command, and read it again."""

    def again(name, changes=()):
        sets = [word for change in changes for word in ("--set", change)]
        status, text, err = run("show", name, "--yaml", *sets)
        assert status == 0, err
        (tmp_path / f"{name}.yaml").write_text(text)
        return text, prism.load_job(tmp_path / f"{name}.yaml")

    return again


def shipped():
    folder = Path(__file__).parents[1] / "experiments" / "jobs"
    return sorted(file.stem for file in folder.glob("*.yaml"))


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_job_comes_back(name, written):
    assert written(name)[1] == prism.load_job(name)


@pytest.mark.parametrize("name", ["llama3-405b-16k", "deepseek-v3-2048"])
def test_so_does_one_with_every_block(name, written):
    assert written(name, RICH)[1] == prism.load_job(name, RICH) != prism.load_job(name)


def test_defaults_are_comments_that_can_be_taken_away(tmp_path, written):
    text = written("llama3-70b-fsdp-512")[0].replace("  # prefetch: 1", "  prefetch: 2")
    (tmp_path / "job.yaml").write_text(text)
    assert prism.load_job(tmp_path / "job.yaml").parallelism.prefetch == 2
    assert "  # n_layers: 80" in text


def test_every_key_is_there(written):
    text, job = written("pipeline-8x32", ["run.steps=7"])
    for block in ("parallelism", "cluster", "run"):
        assert all(f"{key}:" in text for key in type(getattr(job, block)).model_fields)
    assert prism.Job.model_fields["model"].description in text
    assert "  steps: 7  # --set\n" in text


@pytest.mark.parametrize("words", [("pipeline-8x32", "--json"), ("--jobs",), ("h100-healthy",)])
def test_what_is_no_job_is_refused(run, words):
    status, out, err = run("show", *words, "--yaml")
    assert (status, out) == (2, "") and err
