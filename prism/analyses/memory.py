"""Memory of a job's fullest GPU, without simulating a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prism.jobs.job import Job, load_job
from prism.workload.memory import memory_figures


def memory(job: Job | str | Path) -> dict[str, Any] | None:
    """Estimate the memory of a job's fullest GPU, also where it does not fit.

    Returns
    -------
    dict or None
        ``gib``, its 90 % interval ``ci_gib``, ``allocated_gib`` by the job's tensors (what torch's
        ``max_memory_allocated`` counts) and ``limit_gib`` of the card [GiB]; the probability
        ``p_fits``, calibrated on layouts that ran or not; the ``stage``; the ``parts`` [GiB]:
        ``parameters``, ``gradients``, ``optimizer``, ``gathered`` (shards and buckets), activations
        by kind (``checkpoints``, ``norms``, ``attention``, ``mlp``, ``logits``), ``workspace``,
        ``fragmentation``, ``reserve``; and ``stages``, each with its own. None where the sizes of
        the model are not known.

    Examples
    --------
    >>> import prism
    >>> found = prism.memory("llama3-70b-fsdp-512")
    >>> round(found["gib"], 1), found["limit_gib"], found["stage"]
    (38.5, 79.1, 0)
    >>> round(sum(found["parts"].values()) / found["gib"], 9)
    1.0
    """
    return memory_figures(job if isinstance(job, Job) else load_job(job))
