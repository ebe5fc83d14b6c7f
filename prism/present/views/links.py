"""A job's links as a table: NVLink, network and tiers, with the figures that prism computes with.

Rates are those that large messages reach, from the job, its device and its library. Left out: what
a message of the job then takes, which depends on who takes part (`prism.cluster.machine`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from prism.cluster.machine import build_cluster
from prism.distributions.library import load_library
from prism.present.views.tables import table_view
from prism.workload.build import nominal_library

if TYPE_CHECKING:
    from prism.jobs.job import Job

TITLE = "Links, at the rates that large messages reach, one direction"


def describe_links(job: Job) -> list[dict[str, Any]]:
    """List the links of a job's cluster, the innermost first."""
    name = job.variability.library
    cluster = build_cluster(job, nominal_library(job, None if name is None else load_library(name)))
    nvlink, network = cluster.nvlink, cluster.network
    rows = [_row("nvlink", None, nvlink.bytes_per_s, nvlink.latency_s)]
    rows.append(_row("network", cluster.nvlink_gpus, network.bytes_per_s, network.latency_s))
    for tier in cluster.tiers:
        rate = network.bytes_per_s / tier.oversubscription
        rows.append(_row(tier.name, tier.gpus, rate, tier.latency_s, tier.hierarchical))
    return rows


def _row(
    tier: str, gpus: int | None, bytes_per_s: float, latency_s: float, hierarchical: bool = False
) -> dict[str, Any]:
    return {
        "tier": tier,
        "gpus": gpus,
        "gbytes_per_s_per_gpu": 1e-9 * bytes_per_s,
        "gbits_per_s": None if gpus is None else 8e-9 * bytes_per_s * gpus,
        "latency_us": 1e6 * latency_s,
        "collectives": "hierarchical" if hierarchical else "ring",
    }


def links_view(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Lay out what `describe_links` returns."""
    right = ("leaving", "GB/s per GPU", "Gbit/s in all", "latency us")
    shown = [
        {
            "tier": row["tier"],
            "leaving": None if row["gpus"] is None else f"{row['gpus']:,} GPUs",
            "GB/s per GPU": f"{row['gbytes_per_s_per_gpu']:.4g}",
            "Gbit/s in all": None if row["gpus"] is None else f"{row['gbits_per_s']:,.0f}",
            "latency us": f"{row['latency_us']:,.0f}",
            "collectives": row["collectives"],
        }
        for row in rows
    ]
    return table_view(TITLE, shown, right)
