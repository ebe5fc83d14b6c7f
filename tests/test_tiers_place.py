"""Slow nodes of a job over several sites: where they go, and how far nodes move for it."""

import json

import xarray as xr
from place_jobs import problem_of, small

import prism
from prism import place, slow_node
from prism.present.answers.place import place_answer

SITE = {"gpus": 8, "distance_km": 1000}


def test_replicas_stay_whole_where_sites_are_far_apart():
    """Two slow nodes in two sites: one replica for both would be best, were they not so far."""
    near, far = (
        problem_of(small(dp=4, cluster=c), {0: 1.2, 15: 1.2})
        for c in ({}, {"tiers": {"site": SITE}})
    )
    hosts = near.hosts.copy()
    hosts[[1, 15]] = hosts[[15, 1]]  # both in replica 0, and one of its nodes in the other site
    before, after = near.times([near.hosts, hosts])
    assert after < before
    before, after = far.times([far.hosts, hosts])
    assert after > before + 0.01


def test_an_answer_counts_what_goes_between_sites():
    """The worst placement takes a node of the other site into a replica; were it the best..."""
    slow = {0: slow_node(1.3), 13: slow_node(1.3)}
    job = small(dp=4, cluster={"tiers": {"site": SITE}})
    found = prism.summary(place(job, nodes=slow, seed=5, threads=2))
    rows = {row["name"]: row for row in found["placements"]}
    assert rows["current"]["moved_between"] == {}
    assert rows["worst"]["moved_between"] == {"site": 2}
    assert rows["worst"]["saved"] < -0.3  # its hops go 1,000 km
    assert "moved_between" not in codes(found)
    slow_nodes = [
        {**node, "after": {**node["before"], "stages": [9]}} for node in found["slow_nodes"]
    ]
    rows["worst"]["saved"] = 0.1
    told = codes({**found, "best": "worst", "slow_nodes": slow_nodes})["moved_between"]
    assert f"{rows['worst']['hosts_changed']} slots" in told and "2 from another site" in told


def codes(numbers):
    """Findings of a summary by code."""
    answer = place_answer(xr.Dataset(attrs={"summary": json.dumps(numbers)}))
    return {found.code: found.text for found in answer.findings}
