"""prism explore: controls and jobs, refusals at their controls, and the process that answers."""

import random
import time

import numpy as np
import pytest

from prism.common.errors import PrismError
from prism.jobs.job import job_from_dict, load_job
from prism.jobs.jobspec.yaml import shipped_jobs
from prism.present.answers.estimate import summarize_estimate
from prism.present.explore import controls
from prism.present.explore.process import Answers
from prism.present.explore.stages import FIRST, REFINED, Question, answer_stages

SMALL = "pipeline-8x32"
BASE = "llama3-70b-fsdp-512"


@pytest.fixture(scope="module")
def unranked():
    """A job whose answer has no ranking and no run: it is there sooner."""
    return job_from_dict({
        "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
        "variability": {"library": None, "dependence": "none"},
    })  # fmt: skip


@pytest.fixture(scope="module")
def answers(unranked):
    kept = Answers(Question(unranked, 1, 1))
    yield kept
    kept.close()


def wait_for(answers, page, word, name=None):
    """Give what was told until a word comes."""
    found, end = [], time.monotonic() + 300
    while time.monotonic() < end:
        found += answers.take(page)
        if any(t.word == word and (not name or t.value.name == name) for t in found):
            return found
        time.sleep(0.01)
    raise AssertionError(found)


@pytest.mark.parametrize("name", shipped_jobs())
def test_controls_that_are_left_alone_change_nothing(name):
    job = load_job(name)
    shown = controls.values_of(job)
    assert controls.overrides(job, shown) == {} and controls.build(job, shown) is job
    assert shown["gpus"] == job.world_size and tuple(shown) == controls.KEYS


@pytest.mark.parametrize(
    ("changed", "sizes"),
    [({"gpus": 1024}, (1, 1, 1024, 128)), ({"parallelism.tp": 8}, (8, 1, 64, 64)),
     ({"parallelism.tp": 4, "gpus": 256}, (4, 1, 64, 32)),
     ({"cluster.gpus_per_node": 4}, (1, 1, 512, 128))],
)  # fmt: skip
def test_replicas_and_nodes_follow_from_the_gpus(changed, sizes):
    job = controls.build(load_job(BASE), changed)
    p = job.parallelism
    assert (p.tp, p.pp, p.dp, job.n_nodes) == sizes


@pytest.mark.parametrize("changed", [
    {"gpus": 1024, "variability.effects.rank.cv": 0.02}, {"model.name": "llama3-8b"},
    {"cluster.device": "b200"}, {"run.checkpoint.interval": "10min", "run.steps": 100},
    {"parallelism.precision": "fp8", "variability.library": "none"}, {},
])  # fmt: skip
def test_the_job_file_and_the_command_give_the_same_job(changed, tmp_path):
    base = load_job(BASE)
    job, keys = controls.build(base, changed), controls.overrides(base, changed)
    file = tmp_path / "job.yaml"
    file.write_text(controls.job_file(base, keys))
    words = controls.command(base, keys, 512, 1).split()
    sets = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
    assert words[:3] == ["prism", "estimate", BASE]
    for again in (load_job(file), load_job(BASE, sets)):
        for block in ("model", "cluster", "parallelism", "variability", "run"):
            assert getattr(again, block) == getattr(job, block)


@pytest.mark.parametrize(
    ("changed", "at"),
    [({"gpus": 100}, "gpus"), ({"parallelism.tp": 3}, "parallelism.tp"),
     ({"run.deadline": "soon"}, "run.deadline"), ({"gpus": None}, "gpus"),
     ({"variability.effects.rank.cv": -1.0}, "variability.effects.rank.cv"),
     ({"parallelism.pp": 7, "gpus": 504}, "parallelism.pp")],
)  # fmt: skip
def test_what_is_wrong_is_said_at_its_control(changed, at):
    with pytest.raises(PrismError) as refused:
        controls.build(load_job(BASE), changed)
    assert at in controls.place_messages(refused.value)


def test_random_settings_make_a_job_or_are_refused():
    base, rng, found = load_job(BASE), random.Random(1), {True: 0, False: 0}
    wild = (None, 0, 1, 2, 3, 8, 64, 1000, 1 << 20, -1, 0.5, 1e9, "", "x", "10min", True)
    for _ in range(300):
        changed = {}
        for key in rng.sample(controls.KEYS, 2):
            choices = controls.control(key).choices
            changed[key] = rng.choice(choices or wild)
        try:
            controls.build(base, changed)
            found[True] += 1
        except PrismError as error:
            assert controls.place_messages(error)
            found[False] += 1
    assert min(found.values()) >= 30


def test_stages_are_those_of_the_commands(monkeypatch):
    told, job = [], load_job(SMALL)
    answer_stages(Question(job, 3, 1), lambda word, value: told.append((word, value)))
    stages = {value.name: value for word, value in told if word == "stage"}
    assert list(stages) == ["step", "run", "ranking"] and told[-1][0] == "done"
    import prism

    step = prism.simulate(job, FIRST, seed=3).step_time
    assert np.array_equal(stages["step"].result.step_time, step)
    run = prism.estimate(job, replicates=REFINED, seed=3)
    assert (
        summarize_estimate(stages["run"].result)["step_time"]
        == (summarize_estimate(run)["step_time"])
    )
    assert "<svg" in stages["run"].html and "critical_path_time" not in stages["step"].result
    pinned = []
    drawn = "prism.present.reports.page.to_svg"
    monkeypatch.setattr(drawn, lambda picture, name: f'<svg viewBox="0 0 9 9" id="{name}"/>')
    answer_stages(
        Question(load_job(SMALL, ["parallelism.pp=4"]), 3, 1, run),
        lambda word, value: pinned.append(value) if word == "stage" else None,
    )
    assert "parallelism.pp" in pinned[1].beside and 'id="beside-f1"' in pinned[1].beside


def test_a_newer_question_ends_the_one_before(answers, unranked):
    slow = load_job(BASE)  # its answer would take seconds
    first = answers.ask("page", Question(slow, 1, 1))
    second = answers.ask("page", Question(unranked, 1, 1))
    other = answers.ask("other", Question(unranked, 2, 1))
    found = wait_for(answers, "page", "done")
    assert {t.number for t in found} == {second} and first != second
    assert {t.number for t in wait_for(answers, "other", "done")} == {other}
    answers.drop("page")
    assert answers.take("page") == []


def test_a_page_needs_its_port_and_its_extra(run, monkeypatch):
    assert run("explore", SMALL, "--json")[0] == 2
    assert run("explore", "no-such-job")[0] == 2
    pytest.importorskip("nicegui", reason="needs the extra app")
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = run("explore", SMALL, "--port", str(port), "--no-browser")
    assert code == 2 and f"--port {port}" in err
