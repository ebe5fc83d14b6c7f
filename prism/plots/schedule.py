"""A pipeline schedule: a row per stage, a box per action."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib import rcParams
from matplotlib.axes import Axes

from prism.jobs.schedule import Schedule, Slots, action_times, play_schedule
from prism.plots.base import (
    BLUE,
    GREEN,
    ORANGE,
    SKY,
    ink,
    legend_above,
    name_rows,
    new_axes,
    styled,
)

LOOKS = {
    "F": (BLUE, "forward"), "B": (ORANGE, "backward"), "I": (SKY, "backward, inputs"),
    "W": (GREEN, "backward, weights"),
}  # fmt: skip


@styled
def plot_schedule(
    schedule: Schedule, ax: Axes | None = None, durations: Mapping[str, float] | None = None
) -> Axes:
    """Draw a pipeline schedule as a Gantt chart, one row per stage.

    `durations` are those of F, of a whole backward (B) and of its weight half where it is split
    (W), in any one unit; 1, 2 and 1 where None. Numbers are microbatches; later model chunks are
    lighter.

    Examples
    --------
    >>> import prism.plots
    >>> ax = prism.plots.plot_schedule(prism.make_schedule("1f1b", 4, 8))
    """
    schedule, given = Schedule(schedule), {"F": 1.0, "B": 2.0, "W": 1.0, **(durations or {})}
    slots = Slots(given["F"], given["B"], given["W"])
    starts, lengths = play_schedule(schedule, *slots), action_times(schedule, slots)
    n_stages, letters = len(schedule), schedule.letters
    end = max(s[-1] + length[-1] for s, length in zip(starts, lengths, strict=True))
    ax = new_axes(ax, min(16.0, max(7.0, 0.14 * end / slots.forward)), 1.4 + 0.3 * n_stages)
    inches = ax.figure.get_window_extent().width / ax.figure.dpi * 0.88 / end
    widest = max(len(str(action.microbatch)) for row in schedule for action in row)
    seen: set[str] = set()
    for stage, row in enumerate(schedule):
        actions = zip(row, letters[stage], starts[stage], lengths[stage], strict=True)
        for action, kind, start, length in actions:
            colour, name = LOOKS[kind]
            new = not action.chunk and kind not in seen
            ax.barh(
                stage, length, left=start, height=0.86, color=colour, linewidth=0.4,
                edgecolor=rcParams["axes.facecolor"], label=name if new else None,
                alpha=1.0 - 0.6 * action.chunk / schedule.n_chunks,
            )  # fmt: skip
            seen |= {kind} if new else set()
            if length * inches >= 0.058 * widest:  # wide enough for its number
                on = ink() if action.chunk else "white" if kind == "F" else "black"
                ax.text(start + 0.5 * length, stage, str(action.microbatch), ha="center",
                        va="center", fontsize=6.0, color=on)  # fmt: skip
    name_rows(ax, [f"stage {stage}" for stage in range(n_stages)])
    ax.grid(visible=False)
    ax.set_xlim(0.0, end)
    ax.set_xlabel("time [forward of one chunk]" if durations is None else "time")
    ax.spines["left"].set_visible(False)
    legend_above(ax, ncols=4)
    return ax
