"""Link tiers in job files: what can be said, what is refused in words, what `prism show` tells."""

import re

import pytest
from test_tiers import LIBRARY, make_job

from prism import PrismError, load_job, simulate
from prism.cluster.machine import build_cluster
from prism.present.answer import words
from prism.present.answers.job import describe_links
from prism.present.show import describe
from prism.simulation.results import job_of

JOB = "llama3-405b-two-sites"
SITE = "cluster.tiers.site"


def test_tiers_are_sorted_by_size_and_pods_are_one_of_them():
    job = load_job(JOB, ["cluster.tiers.rack={gpus: 64, latency_us: 17}"])
    names = [name for name, _ in job.cluster.link_tiers()]
    assert names == ["rack", "pod", "site"]
    tiers = build_cluster(job, LIBRARY).tiers
    assert [t.gpus for t in tiers] == [64, 4096, 8192]
    assert [t.latency_s for t in tiers] == pytest.approx([17e-6, 17e-6, 17e-6 + 5e-3])
    assert [t.hierarchical for t in tiers] == [True, False, True]
    assert [t.far for t in tiers] == [True, False, True]


def test_bandwidth_in_three_ways():
    """400 Gbit/s cards: 25.6 Tbit/s out of 8,192 GPUs are 128 times less, or 0.390625 GB/s each."""
    none = f"{SITE}.total_gbits_per_s="
    ways = [], [none, f"{SITE}.oversubscription=128"]
    ways = *ways, [none, f"{SITE}.bandwidth_gbytes_per_s=0.390625"]
    found = [build_cluster(load_job(JOB, way), LIBRARY).tiers[-1] for way in ways]
    assert [t.oversubscription for t in found] == pytest.approx([128.0] * 3)
    achieved = LIBRARY.value("nominal/network_efficiency")
    half = build_cluster(load_job(JOB, [f"{SITE}.efficiency={achieved / 2}"]), LIBRARY).tiers[-1]
    assert half.oversubscription == pytest.approx(256.0)


def test_keys_are_set_and_taken_away_one_by_one():
    assert load_job(JOB, [f"{SITE}="]).cluster.tiers == {}
    assert load_job(JOB, ["cluster.tiers="]).cluster.tiers == {}
    changed = load_job(JOB, [f"{SITE}.distance_km=10"]).cluster.tiers["site"]
    assert (changed.distance_km, changed.total_gbits_per_s, changed.gpus) == (10, 25600, 8192)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([f"{SITE}.gpus=8000"], "site.gpus: 8000 .*pod's 4096"),
        (["cluster.tiers.zone={gpus: 8192}"], "zone.gpus: 8192 .*site's 8192"),
        (["cluster.tiers.rack={gpus: 4}"], "rack.gpus: 4 .*gpus_per_node 8; .* 8"),
        (["cluster.tiers.rack={gpus: 4096}"], "rack's 4096; .* 8192"),
        (
            [f"{SITE}={{gpus: 8192, latency_us: 5000, distance_km: 9}}"],
            "latency_us and distance_km ",
        ),
        (
            [f"{SITE}={{gpus: 8192, oversubscription: 2, total_gbits_per_s: 9}}"],
            "oversubscription and total_gbits_per_s ",
        ),
        (["cluster.tiers.pod={gpus: 64}"], "cluster.pod_gpus "),
        (["cluster.tiers.network={gpus: 64}"], "network: .*rack, pod, zone or site"),
        ([f"{SITE}.total_gbits_per_s=", f"{SITE}.efficiency=0.5"], "efficiency: .*no effect"),
        (["cluster.tiers.zone={distance_km: 5}"], "cluster.tiers.zone.gpus: .*missing"),
        ([f"{SITE}.lattency_us=5"], "lattency_us: .* mean latency_us"),
        ([f"{SITE}.collectives=tree"], "ring or hierarchical, .*'tree'"),
        ([f"{SITE}.total_gbits_per_s=0"], "total_gbits_per_s: .* 0, .* 0"),
        (
            ["cluster.tiers.rack={gpus: 64, latency_us: 50}",
             "cluster.tiers.zone={gpus: 16384, latency_us: 40}"],
            "zone.latency_us: 40 .* 50 .*rack",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_told(changes, words):
    with pytest.raises(PrismError) as caught:
        load_job(JOB, changes)
    (line,) = str(caught.value).splitlines()
    assert re.match(f"overrides .*{words}", line), line


def test_a_tier_nearer_than_the_network_is_refused():
    with pytest.raises(PrismError, match="2, .*network .*14 us"):
        build_cluster(make_job({"site": {"gpus": 8, "latency_us": 2}}), LIBRARY)


def test_jobs_without_messages_have_no_tiers():
    with pytest.raises(PrismError, match="cluster.tiers.*: .*model.durations"):
        load_job(
            {
                "model": {"durations": {"forward_s": 1.0, "backward_s": 2.0}},
                "parallelism": {"pp": 2, "microbatches": 4},
                "cluster": {"tiers": {"site": {"gpus": 8}}},
            }
        )


def test_show_lists_the_links_with_units():
    answer = describe(JOB)
    found = answer.figures
    (links,) = (table for table in answer.tables if table.title == "Links")
    (row,) = (row for row in links.rows if row[0] == "site")
    assert [words(cell) for cell in row[1:]] == [
        "8,192 GPUs", "0.3203 GB/s", "20,992 Gbit/s", "5,014 us", "hierarchical",
    ]  # fmt: skip
    assert found["links"] == describe_links(load_job(JOB))
    assert [link["tier"] for link in found["links"]] == ["nvlink", "network", "pod", "site"]


def test_the_result_of_a_job_with_tiers_rebuilds_its_job():
    job = make_job({"site": {"gpus": 8, "distance_km": 1000, "total_gbits_per_s": 320}})
    result = simulate(job, 64, seed=1, threads=1)
    again = job_of(result)
    assert again == job
    assert simulate(again, 64, seed=1, threads=1).step_time.equals(result.step_time)
