"""The typed result of a simulation or an estimate."""

from functools import cached_property
from typing import TYPE_CHECKING, Any

from prism.common.results import Columns, Field, Result
from prism.simulation.results import PARTS
from prism.simulation.summary import QUANTILES, summarize_simulation

if TYPE_CHECKING:
    import pandas as pd

QUANTITIES = Columns("quantity", (
    Field("name", "text"),
    Field("mean", "s", "mean"),
    Field("mean_se", "s", "standard error of the mean, by cluster draw"),
    Field("std", "s", "standard deviation"),
    Field("cv", "1", "coefficient of variation"),
    *(Field(name, "s", f"quantile at {p:g}") for name, p in QUANTILES.items()),
    Field("within_cluster_std", "s", "standard deviation within a cluster draw"),
    Field("between_cluster_std", "s", "standard deviation between cluster draws"),
))  # fmt: skip
TERMS = Columns("term", (
    Field("name", "text"),
    Field("delay", "s", "mean time that it adds to the run"),
    Field("delay_se", "s", "its standard error, by cluster draw"),
    Field("variance", "1", "share of the variance of the run"),
    Field("variance_se", "1", "its standard error, by cluster draw"),
))  # fmt: skip


class Estimate(Result):
    """Step times, and times of the run where one was drawn.

    Examples
    --------
    >>> import prism
    >>> result = prism.estimate("pipeline-8x32", replicates=256, steps=1000, seed=1)
    >>> result.step_time.size, float(result.quantities.p95["step_time"].round(1))  # s
    (256, 121.5)
    >>> result.parts.mean_share.idxmax()
    'compute'
    """

    def is_whole(self) -> bool:
        """See `Result.is_whole`."""
        return "job_world_size" in self or "data_error_mean" in self

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        return summarize_simulation(self.dataset)

    @cached_property
    def _figures(self) -> dict[str, Any]:
        return self.figures()

    @cached_property
    def quantities(self) -> "pd.DataFrame":
        """Mean, spread and quantiles of ``step_time`` and ``time_to_train`` [s]."""
        names = ("step_time", "time_to_train")
        rows = [{"name": n, **self._figures[n]} for n in names if n in self._figures]
        return QUANTITIES.frame(rows)

    @cached_property
    def parts(self) -> "pd.DataFrame":
        """Where the time of a step goes, and its variance; shares [1]."""
        return PARTS.frame(self._figures.get("time_loss", []))

    @cached_property
    def terms(self) -> "pd.DataFrame":
        """What delays the run [s], and its share of the run's variance [1]."""
        found = self._figures
        keys = {"delay": "delay_by_term", "delay_se": "delay_by_term_se",
                "variance": "variance_by_term", "variance_se": "variance_by_term_se"}  # fmt: skip
        return TERMS.frame([
            {"name": term, **{name: found[key].get(term) for name, key in keys.items()}}
            for term in found.get("delay_by_term", {})
        ])  # fmt: skip
