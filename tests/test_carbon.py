"""Energy and carbon of a run: closed forms, what is stated and what is refused."""

import pytest

import prism

JOB = {
    "base": "llama3-70b-fsdp-512",
    "run": {"steps": 100, "failures": "none", "checkpoint": None, "deadline": None},
    "variability": {"library": "none", "model_error": 0.0},
}
CALL = {"replicates": 64, "run_replicates": 64, "seed": 1}


def carbon_of(**run):
    found = prism.summary(prism.estimate({**JOB, "run": JOB["run"] | run}, **CALL))
    return found, found.get("carbon")


def test_carbon_is_the_machines_energy_times_pue_times_intensity():
    found, carbon = carbon_of(grid_intensity=400.0, pue=1.2)
    energy = found["energy"]
    mwh = energy["machines_mwh_p50"] * 1.2
    assert carbon["operational_t"]["p50"] == pytest.approx(mwh * 0.4, rel=1e-6)
    assert carbon["operational_t"]["p5"] <= carbon["operational_t"]["p95"]
    assert (carbon["intensity_g_per_kwh"], carbon["pue"]) == (400.0, 1.2)
    # a host's share of 350 W, and 3 ports of switches of 1,720 W / 64, for each GPU
    hours = found["time_to_train"]["p50"] / 3600.0
    beside = 512 * (350.0 + 3 * 1720.0 / 64) * hours / 1e6
    assert energy["machines_mwh_p50"] - energy["gpu_mwh_p50"] == pytest.approx(beside, rel=1e-6)
    assert energy["beside_gpus_share"] == pytest.approx(beside / (mwh / 1.2), rel=1e-3)
    # H100's 164 kg and an eighth of a server's 2,500, over six years at 85 %
    each = (164.0 + 312.5) / (6 * 365.25 * 24 * 0.85)
    assert carbon["embodied_t"] == pytest.approx(512 * each * hours / 1000.0, rel=1e-6)


def test_a_region_stands_for_its_grid_and_a_later_answer_replaces_it():
    _, france = carbon_of(region="FRA")
    _, stated = carbon_of(grid_intensity=56)
    assert france == stated
    job = prism.load_job({**JOB, "run": JOB["run"] | {"region": "FRA"}})
    assert job.replace({"run.grid_intensity": 100.0}).run.region is None


def test_nothing_is_assumed_of_the_grid():
    found, carbon = carbon_of()
    assert carbon is None
    assert found["energy"]["machines_mwh_p50"] > found["energy"]["gpu_mwh_p50"]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"region": "Atlantis"}, "FRA"), ({"grid_intensity": -1.0}, "grid_intensity"),
        ({"pue": 0.9}, "pue"), ({"grid_intensity": 5000.0}, "2000"),
        ({"grid_intensity": 100.0, "region": "FRA"}, "keep one"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(run, words):
    with pytest.raises(prism.PrismError, match=words):
        prism.load_job({**JOB, "run": JOB["run"] | run})


def test_durations_say_no_power_and_a_limit_does():
    durations = {"base": "pipeline-8x32", "run": {"steps": 10, "region": "USA"}}
    found = prism.summary(prism.estimate(durations, **CALL))
    assert "carbon" not in found
    assert any("power_limit_w" in text for text in found["warnings"])
    limited = {**durations, "cluster": {"power_limit_w": 500.0}}
    assert prism.summary(prism.estimate(limited, **CALL))["carbon"]["operational_t"]["p50"] > 0.0


def sweep(objective):
    job = {**JOB, "run": JOB["run"] | {"region": "USA"}}
    vary = {"cluster.power_limit_w": [400, 700]}
    return prism.summary(prism.sweep(job, vary, replicates=128, seed=1, objective=objective))


def test_a_sweep_by_carbon_prefers_what_emits_less_for_the_same_work():
    """It names its choice first, as one by time does not."""
    swept = sweep("carbon")
    assert swept["findings"][0]["code"] == "least_carbon"
    assert "least_carbon" not in [x["code"] for x in sweep("p95")["findings"]]
    first, second = swept["rows"]
    assert first["cluster.power_limit_w"] == 400 and swept["best"] == 0
    assert swept["rows"][swept["fastest"]]["cluster.power_limit_w"] == 700
    assert first["carbon_same_work"] < second["carbon_same_work"]
    beside = 350.0 + 3 * 1720.0 / 64
    for row in (first, second):
        joules = 512 * (row["gpu_power_w"] + beside) * row["mean"]
        made = 512 * (164.0 + 312.5) / (6 * 365.25 * 86_400 * 0.85) * row["mean"]
        kg = joules * 1.1 / 3.6e6 * 0.386 + made
        assert row["carbon_same_work"] == pytest.approx(kg, rel=1e-4)


def test_a_sweep_by_carbon_asks_for_an_intensity_and_for_power():
    with pytest.raises(prism.PrismError, match="grid_intensity"):
        prism.sweep(JOB, {"cluster.power_limit_w": [400, 700]}, objective="carbon")
    durations = {"base": "pipeline-8x32", "run": {"region": "USA"}}
    with pytest.raises(prism.PrismError, match="power_limit_w"):
        prism.sweep(durations, {"parallelism.schedule": ["gpipe", "1f1b"]}, objective="carbon")


def test_making_is_that_of_bloom():
    """11.2 t for 1,082,990 hours of A100 (arXiv:2211.02001)."""
    bf16 = {"precision": "bf16"}
    job = {
        **JOB,
        "cluster": {"device": "a100"},
        "parallelism": bf16,
        "run": JOB["run"] | {"region": "FRA"},
    }
    found = prism.summary(prism.estimate(job, **CALL))
    hours = 512 * found["time_to_train"]["p50"] / 3600.0
    assert found["carbon"]["embodied_t"] / hours * 1_082_990 == pytest.approx(11.2, rel=0.005)
