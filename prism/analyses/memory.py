"""Memory of a job's fullest GPU, without simulating a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prism.jobs.job import Job, load_job
from prism.workload.memory import memory_figures


def memory(job: Job | str | Path) -> dict[str, Any] | None:
    """Estimate the memory of a job's fullest GPU, also where it does not fit.

    Parameters
    ----------
    job : Job, str or path
        A job, its file, or the name of a shipped one.

    Returns
    -------
    dict or None
        ``gib`` and ``limit_gib`` [GiB], the estimate's relative ``error`` (90 %), the probability
        ``p_fits``, the ``stage`` and the ``parts`` [GiB]: ``weights``, ``gradients``,
        ``optimizer``, ``activations``, ``workspace``, ``reserve``. None where the sizes of the
        model are not known, or it is a hybrid one.

    Examples
    --------
    >>> import prism
    >>> found = prism.memory("llama3-70b-fsdp-512")
    >>> round(found["gib"], 1), found["limit_gib"], found["stage"]
    (47.4, 79.1, 0)
    >>> round(sum(found["parts"].values()) / found["gib"], 9)
    1.0
    """
    return memory_figures(job if isinstance(job, Job) else load_job(job))
