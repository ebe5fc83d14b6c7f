"""A fitted model as a typed result."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from prism.common.results import Columns, Field, Result
from prism.distributions.modelfile import json_of

if TYPE_CHECKING:
    import pandas as pd

KERNELS = Columns("kernel", (
    Field("name", "text"),
    Field("n", "count", "durations"),
    Field("mean", "s", "mean duration"),
    Field("cv", "1", "coefficient of variation"),
    Field("p99_p50", "1", "p99 over the median"),
    Field("distribution", "text", "of its durations"),
    Field("ks", "1", "Kolmogorov-Smirnov distance to the durations"),
    Field("step_share", "1", "share of the time"),
))  # fmt: skip
EFFECTS = Columns("effect", (
    Field("name", "text"),
    Field("cv", "1", "coefficient of variation"),
    Field("cv_low", "1", "lower end of its 90 % interval"),
    Field("cv_high", "1", "upper end of its 90 % interval"),
    Field("share", "1", "share of the variance of durations"),
))  # fmt: skip


class Model(Result):
    """What `prism fit` learnt: of a trace, of step times, a calibrated job, or a library.

    Examples
    --------
    >>> import prism
    >>> model = prism.fit("experiments/samples/trace.csv", seed=1)
    >>> model.kernels.n.to_dict()
    {'backward stage 0': 64, 'forward stage 0': 64}
    >>> model.effects.share.idxmax()
    'rank'
    """

    def figures(self) -> dict[str, Any]:
        """Give all figures, see `Result.figures`."""
        kind, report = str(self.attrs["kind"]), json_of(self.dataset, "report")
        for row in report.get("kernels", ()):  # written before 0.2
            if isinstance(row, dict) and "law" in row:
                row["distribution"] = row.pop("law")
        # of a library nothing was drawn
        drawn = {} if kind == "library" else {"seed": int(self.attrs["seed"])}
        return {"kind": kind, **drawn, **report}

    @cached_property
    def kernels(self) -> "pd.DataFrame":
        """Kernels, the longest first; empty without any."""
        rows: Sequence[Mapping[str, Any]] = self.figures().get("kernels", ())
        return KERNELS.frame(rows)

    @cached_property
    def effects(self) -> "pd.DataFrame":
        """What makes durations differ, with 90 % intervals; empty where none was learnt."""
        found: Mapping[str, Mapping[str, Any]] = self.figures().get("effects", {})
        rows = []
        for name, effect in found.items():
            low, high = effect.get("ci") or (None, None)
            rows.append({"name": name, **effect, "cv_low": low, "cv_high": high})
        return EFFECTS.frame(rows)
