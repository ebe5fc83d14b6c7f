"""A job written out as a file is the same job."""

import pytest

from prism import Job, load_job
from prism import __main__ as entry
from prism.jobs.jobspec.yaml import shipped_jobs
from prism.present.jobtemplate import job_yaml

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


def reload(job, tmp_path):
    (tmp_path / f"{job.name}.yaml").write_text(job_yaml(job))
    return load_job(tmp_path / f"{job.name}.yaml")


@pytest.mark.parametrize("name", shipped_jobs())
def test_a_shipped_job_comes_back(name, tmp_path):
    job = load_job(name)
    assert reload(job, tmp_path) == job


@pytest.mark.parametrize("name", ["llama3-405b-16k", "deepseek-v3-2048"])
def test_so_does_one_with_every_block(name, tmp_path):
    job = load_job(name, RICH)
    assert reload(job, tmp_path) == job
    assert reload(job, tmp_path) != load_job(name)


def test_defaults_stand_as_comments_that_can_be_taken_away(tmp_path):
    job = load_job("llama3-70b-fsdp-512")
    text = job_yaml(job).replace("  # prefetch: 1", "  prefetch: 2")
    (tmp_path / "job.yaml").write_text(text)
    assert load_job(tmp_path / "job.yaml").parallelism.prefetch == 2
    assert "  # n_layers: 80  # the named model's" in text


def test_every_key_is_there():
    text = job_yaml(load_job("pipeline-8x32"))
    for block in ("parallelism", "cluster", "run"):
        for key in type(getattr(load_job("pipeline-8x32"), block)).model_fields:
            assert f"{key}:" in text
    assert Job.model_fields["model"].description in text


def test_the_command_writes_a_file_and_refuses_what_is_no_job(capsys):
    assert entry.main(["show", "pipeline-8x32", "--yaml", "--set", "run.steps=7"]) == 0
    assert "  steps: 7  # --set\n" in capsys.readouterr().out
    assert entry.main(["show", "pipeline-8x32", "--yaml", "--json"]) == 2
    assert entry.main(["show", "--jobs", "--yaml"]) == 2
    assert "prism show NAME --yaml" in capsys.readouterr().err
    assert entry.main(["show", "h100-healthy", "--yaml"]) == 2
    assert "h100-healthy" in capsys.readouterr().err
