"""A pipeline schedule: a row per stage, a box per action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from prism.jobs.schedule import Schedule, Slots, action_times, play_schedule
from prism.plots.base import BLUE, GREEN, ORANGE, YELLOW, new_axes


def plot_schedule(
    schedule: Schedule, durations: Mapping[str, float] | None = None, ax: Axes | None = None
) -> Axes:
    """Draw a pipeline schedule as a Gantt chart, one row per stage.

    Parameters
    ----------
    schedule : Schedule
        The actions of each stage.
    durations : mapping of str to float, optional
        Duration of F, of a whole backward (B) and of its weight half where it is split (W), in any
        one unit; 1, 2 and 1 where None.
    ax : matplotlib.axes.Axes, optional
        Where to draw; a new figure where None.

    Returns
    -------
    matplotlib.axes.Axes
        Numbers are microbatches; later model chunks are lighter.

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
    ax = new_axes(ax, (min(16.0, max(7.0, 0.14 * end / slots.forward)), 1.4 + 0.3 * n_stages))
    colours = {"F": BLUE, "B": ORANGE, "I": YELLOW, "W": GREEN}
    names = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
    seen: set[str] = set()
    for stage, row in enumerate(schedule):
        actions = zip(row, letters[stage], starts[stage], lengths[stage], strict=True)
        for action, kind, start, length in actions:
            ax.barh(
                stage,
                length,
                left=start,
                height=0.86,
                color=colours[kind],
                alpha=1.0 - 0.6 * action.chunk / schedule.n_chunks,
                edgecolor="white",
                linewidth=0.4,
                label=names[kind] if kind not in seen and not action.chunk else None,
            )
            if action.chunk == 0:
                seen.add(kind)
    _number_actions(ax, schedule, starts, lengths, end)
    ax.set_ylim(n_stages - 0.5, -0.5)
    ax.set_xlim(0.0, end)
    ax.set_yticks(range(n_stages), [f"stage {stage}" for stage in range(n_stages)])
    ax.set_xlabel("time [forward of one chunk]" if durations is None else "time")
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=4, frameon=False, fontsize=9)
    return ax


def _number_actions(
    ax: Axes,
    schedule: Schedule,
    starts: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[float]],
    end: float,
) -> None:
    """Write the microbatch into each action that is wide enough for its number."""
    inches = ax.figure.get_window_extent().width / ax.figure.dpi * 0.88 / end
    widest = max(len(str(action.microbatch)) for row in schedule for action in row)
    for stage, row in enumerate(schedule):
        for action, start, length in zip(row, starts[stage], lengths[stage], strict=True):
            text = str(action.microbatch)
            if length * inches < 0.058 * widest:
                continue
            middle = start + 0.5 * length
            dark = action.kind == "F" and action.chunk == 0
            colour = "white" if dark else "black"
            ax.text(middle, stage, text, ha="center", va="center", fontsize=6.0, color=colour)
