"""What a replay says of jobs whose stragglers are known."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from pipeline_synth import Effects, Layout, as_production, make_trace, run

import prism
from prism.analyses.replay import replay, summarize_replay
from prism.present.answer import Figure

LAYOUT = Layout(4, 4, 8, 8)
EFFECTS = Effects(rank_sd=0.01, step_sd=0.01, residual_sd=0.02, gap_s=0.002)
JOBS = {
    "healthy": (LAYOUT, EFFECTS),
    "lemon": (LAYOUT, replace(EFFECTS, lemons={(2, 1): 1.6})),
    "delay": (LAYOUT, replace(EFFECTS, delays={(1, 3): 0.15})),
    "uneven stages": (LAYOUT, replace(EFFECTS, stage=(1.0, 1.0, 1.0, 1.4))),
    "contents": (Layout(8, 2, 8, 12), replace(EFFECTS, content_sd=0.3)),
    "async lemon": (replace(LAYOUT, p2p="async"), replace(EFFECTS, lemons={(0, 2): 1.6})),
    "one stage": (Layout(4, 1, 8, 8), replace(EFFECTS, lemons={(3, 0): 1.6})),
}


def replayed(folder, layout, effects, seed=0):
    frame, truth = make_trace(layout, effects, seed)
    as_production(frame).to_csv(folder / "ops.csv", index=False)
    dataset = replay(folder / "ops.csv")
    return dataset, summarize_replay(dataset), truth


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Replay of one of `JOBS`, once."""
    return cache(lambda job: replayed(tmp_path_factory.mktemp("job"), *JOBS[job]))


def published(truth):
    """Slowdown of the published definition, from the durations the job had."""
    durations = {k: 0.0 * v if k[0] == "gap" else v for k, v in truth.durations.items()}
    classes = {}
    for key, value in durations.items():
        classes.setdefault(key[0], []).append(value)
    local = ("forward", "backward", "optimizer")
    level = {k: np.mean(v) if k in local else np.median(v) for k, v in classes.items()}
    ideal = {k: np.full_like(v, level[k[0]]) for k, v in durations.items()}
    with_, without = (run(truth.layout, truth.effects, d)[1] for d in (durations, ideal))
    return with_.mean() / without.mean()


def same_work(truth):
    """Mean step over that with every effect at 1 and the stages' work kept."""
    e = truth.effects
    level = {"transfer": e.transfer_s, "optimizer": e.optimizer_s}
    ideal = {}
    for key, value in truth.durations.items():
        of_stage = (*e.stage, *[1.0] * 8)[key[2]] if key[0] in ("forward", "backward") else 1.0
        base = {"forward": e.forward_s, "backward": e.backward_s}.get(key[0])
        nominal = of_stage * base if base else level.get(key[0], e.collective_s)
        nominal = e.gap_s * (key[0] == "gap" and key[3] > 0) if key[0] == "gap" else nominal
        ideal[key] = np.full_like(value, nominal)
    return truth.step_times.mean() / run(truth.layout, e, ideal)[1].mean()


@pytest.mark.parametrize("job", JOBS)
def test_slowdowns_of_known_jobs(known, job):
    layout, effects = JOBS[job]
    dataset, summary, truth = known(job)
    assert summary["steps"] == layout.steps and summary["max_abs_error"] < 1e-4
    np.testing.assert_allclose(dataset["replayed_step_time"], truth.step_times, rtol=1e-4)
    assert summary["slowdown"] == pytest.approx(published(truth), rel=1e-3)
    assert summary["slowdown_same_work"] == pytest.approx(same_work(truth), rel=0.02)
    slow = [*effects.lemons, *effects.delays]
    if slow:
        worst = max(summary["by_worker"], key=lambda w: w["slowdown"])
        assert (worst["dp_rank"], worst["stage"]) == slow[0]
        others = [w["slowdown"] for w in summary["by_worker"] if w is not worst]
        assert worst["slowdown"] > 1.15 > 1.03 > max(others)
        by_stage = summary["by_stage"]
        assert max(by_stage, key=by_stage.get) == str(slow[0][1])


def test_a_healthy_job_has_no_stragglers_and_a_slow_stage_is_no_straggler(known):
    _, healthy, _ = known("healthy")
    _, uneven, truth = known("uneven stages")
    assert 1.0 < healthy["slowdown_same_work"] < 1.05
    assert 1.0 < uneven["slowdown_same_work"] < 1.05 < 1.1 < uneven["slowdown"]
    assert uneven["slowdown"] == pytest.approx(published(truth), rel=1e-3)


def test_without_the_lemon_the_step_is_that_of_the_job_without_it(known):
    layout, effects = JOBS["lemon"]
    _, summary, truth = known("lemon")
    ((place, factor),) = effects.lemons.items()
    cured = {k: v / factor if k[0] in ("forward", "backward") and k[1:3] == place else v
             for k, v in truth.durations.items()}  # fmt: skip
    expected = truth.step_times.mean() / run(layout, effects, cured)[1].mean()
    found = max(w["slowdown"] for w in summary["by_worker"])
    assert found == pytest.approx(expected, rel=0.02)


def test_slowdown_by_op_kind_names_the_slow_one(tmp_path):
    effects = replace(EFFECTS, content_sd=0.4, content_backward=0.2)
    _, summary, _ = replayed(tmp_path, LAYOUT, effects)
    by_kind = summary["by_op_kind"]
    assert max(by_kind, key=by_kind.get) == "forward"


def test_one_step_is_replayed(tmp_path):
    _, summary, truth = replayed(tmp_path, replace(LAYOUT, steps=1), EFFECTS)
    assert summary["replayed_mean"] == pytest.approx(truth.step_times[0], rel=1e-5)
    assert summary["slowdown"] == pytest.approx(published(truth), rel=1e-3)


def test_missing_rows_and_odd_steps_are_said(tmp_path):
    effects = replace(EFFECTS, missing=0.002, odd_steps={3: 6})
    _, summary, _ = replayed(tmp_path, LAYOUT, effects)
    text = " ".join(summary["notes"])
    assert " missing: " in text and "another number of microbatches than 8" in text
    assert summary["steps"] == 7 and abs(summary["mean_error"]) < 0.001


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_one_stage_of_a_pipeline_is_replayed_with_its_waiting(tmp_path, stage):
    """The other sides of its transfers are not there; overlapping ones are one wait, not two."""
    frame, _ = make_trace(LAYOUT, EFFECTS, 3)
    table = as_production(frame)
    table[table["stage"] == stage].to_csv(tmp_path / "ops.csv", index=False)
    summary = summarize_replay(replay(tmp_path / "ops.csv"))
    assert abs(summary["mean_error"]) < 1e-3 and summary["warnings"] == []
    assert any("no other side in the trace" in note for note in summary["notes"])


def test_a_replay_far_off_says_so(tmp_path):
    beside = (("forward", "a", 0.0), ("memory", "b", 0.5))
    rows = [(s, kind, name, at, 1.0) for s in range(4) for kind, name, at in beside]
    text = "step,op_kind,name,start_s,duration_s\n"
    text += "".join(",".join(map(str, row)) + "\n" for row in rows)
    (tmp_path / "ops.csv").write_text(text)
    summary = summarize_replay(replay(tmp_path / "ops.csv"))
    assert summary["mean_error"] == pytest.approx(1 / 3)
    assert "+33.3 % off the measured ones" in summary["warnings"][0]


def test_the_answer_says_the_figures_of_the_json(known):
    dataset, summary, _ = known("healthy")
    answer = prism.answer(dataset)
    assert {key: answer.figures[key] for key in summary} == summary
    assert [finding.code for finding in answer.findings] == ["stragglers", "reproduction"]
    cells = [cell for table in answer.tables for row in table.rows for cell in row]
    values = {cell.value for cell in cells if isinstance(cell, Figure)}
    assert {summary[key] for key in ("measured_mean", "ideal_mean", "slowdown_same_work")} <= values
    assert max(summary["by_op_kind"].values()) in values
    assert [picture.stem for picture in answer.pictures] == ["replay", "slowdown_by_worker"]
    fewer = prism.answer(dataset.drop_vars("slowdown_by_worker"))
    assert [picture.stem for picture in fewer.pictures] == ["replay"]
