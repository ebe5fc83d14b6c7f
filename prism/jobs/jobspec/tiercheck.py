"""What must hold between the link tiers of a job: sizes nest, latencies grow, one word for a thing.

As in `prism.jobs.jobspec.check` each check is a generator of problems. What depends on the device
(the network's own latency) is checked by `prism.cluster.linktiers`, which knows it.
"""

from collections.abc import Iterator
from itertools import pairwise

from prism.jobs.jobspec.problem import Blocks, Problem

_OUT = ("oversubscription", "bandwidth_gbytes_per_s", "total_gbits_per_s")
_FAR = ("latency_us", "distance_km")
RESERVED = ("nvlink", "network")


def check_tiers(b: Blocks) -> Iterator[Problem]:
    """Check the tiers of a cluster."""
    if b.cluster is None:
        return
    c = b.cluster
    if c.oversubscription > 1 and c.pod_gpus is None:
        key = "cluster.oversubscription"
        text = f"{c.oversubscription:g} needs to know where pods end; set cluster.pod_gpus"
        yield Problem(key, (key, "cluster.pod_gpus"), text)
    for name, tier in c.tiers.items():
        key = f"cluster.tiers.{name}"
        if name in RESERVED:
            text = f"{name} is what cluster.links describes; call the tier rack, pod, zone or site"
            yield Problem(key, (key,), text)
        if name == "pod" and c.pod_gpus is not None:
            text = "pods are described by cluster.pod_gpus already; keep one of the two"
            yield Problem(key, (key, "cluster.pod_gpus"), text)
        for names in (_OUT, _FAR):
            given = [n for n in names if getattr(tier, n) is not None]
            if len(given) > 1:
                text = f"{' and '.join(given)} say the same thing; keep one of them"
                yield Problem(f"{key}.{given[-1]}", tuple(f"{key}.{n}" for n in given), text)
        if tier.efficiency is not None and not any(getattr(tier, n) is not None for n in _OUT[1:]):
            text = "has no effect without bandwidth_gbytes_per_s or total_gbits_per_s; give one"
            yield Problem(f"{key}.efficiency", (f"{key}.efficiency", key), text)
    if c.tiers and b.model is not None and b.model.durations is not None:
        text = "have no effect beside model.durations, which know no messages; leave them out"
        yield Problem("cluster.tiers", ("cluster.tiers", "model.durations"), text)
    if c.tiers:
        yield from _check_nesting(b)


def _check_nesting(b: Blocks) -> Iterator[Problem]:
    """Each unit holds whole units of the next inner tier, and lies no farther away."""
    assert b.cluster is not None
    c = b.cluster
    sizes = [("gpus_per_node", "cluster.gpus_per_node", c.gpus_per_node)]
    if c.nvlink_domain_gpus > c.gpus_per_node:
        sizes.append(("nvlink_domain_gpus", "cluster.nvlink_domain_gpus", c.nvlink_domain_gpus))
    named = c.link_tiers()
    for name, tier in named:
        key = "cluster.pod_gpus" if name not in c.tiers else f"cluster.tiers.{name}.gpus"
        sizes.append((f"the {name}'s", key, tier.gpus))
    for (inner, inner_key, size), (_, key, gpus) in pairwise(sizes):
        if gpus % size or (gpus == size and inner.startswith("the ")):
            least = 2 * size if inner.startswith("the ") else size
            ways = [n for n in (gpus // size * size, (gpus // size + 1) * size) if n >= least]
            ways = ways or [least]
            way_out = " or ".join(str(n) for n in ways)
            text = f"{gpus} GPUs do not hold whole units of {inner} {size}; set {way_out}"
            yield Problem(key, (key, inner_key), text)
    known = [(name, t.latency_us) for name, t in named if t.latency_us is not None]
    for (inner, near), (name, far) in pairwise(known):
        if far < near:
            key = f"cluster.tiers.{name}.latency_us"
            text = f"{far:g} is less than the {near:g} of the {inner} inside it; a message that "
            text += "leaves both takes the longer way; change one"
            yield Problem(key, (key, f"cluster.tiers.{inner}.latency_us"), text)
