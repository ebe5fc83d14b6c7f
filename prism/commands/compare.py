"""The command that compares two results, or two measurements.

As in `prism.cli`, which adds it to its group; slow imports inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from prism.commands.options import KeyValue, common_options, rows_of
from prism.commands.outputs import tell_warnings, write_folder
from prism.commands.terminal import answer, progress_line

if TYPE_CHECKING:
    import xarray as xr
    from matplotlib.axes import Axes


class Effect(click.ParamType):  # type: ignore[type-arg]
    """A relative difference: ``1%`` or ``0.01``."""

    name = "share"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the share."""
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) * (0.01 if text.endswith("%") else 1.0)
        except ValueError:
            self.fail(f"{text!r} is not a share such as 1% or 0.01", param, ctx)
        if not 0.0 < share < 1.0:
            self.fail(f"{text!r}: expected more than 0 and less than 100 %: 1% or 0.01", param, ctx)
        return share


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--column", metavar="NAME", help="The duration, where step times have several.")
@click.option(
    "--where",
    type=KeyValue(),
    metavar="KEY=VALUE",
    multiple=True,
    help="Keep the rows of both whose column KEY is VALUE; repeatable.",
)
@click.option(
    "--effect",
    type=Effect(),
    default="1%",
    show_default=True,
    metavar="SHARE",
    help="Difference that matters: what it takes to see it, and what is surely less.",
)
@click.option(
    "--skip",
    type=click.IntRange(min=0),
    metavar="N",
    help="First steps of each measured run to leave out.  [default: those that stick out]",
)
@click.option("-o", "--output", metavar="DIR", type=click.Path(), help="Result, summary and plots.")
@common_options
def compare(
    a: str,
    b: str,
    column: str | None,
    where: tuple[tuple[str, str], ...],
    effect: float,
    skip: int | None,
    output: str | None,
    as_json: bool,
    quiet: bool,
    seed: int | None,
    threads: int | None,
) -> None:
    """Tell whether two results, or two measurements of step times, really differ.

    A and B are each the folder or result.nc of `prism estimate`, or step times (CSV, parquet, a
    Megatron or MLPerf log); FILE[column=value,...] chooses rows, so that both can be of one file.
    Differences are those of B against A. The number of threads changes nothing; the seed is 0
    unless given.
    """
    from prism.compare import compare as compare_two
    from prism.compare import summarize_compare
    from prism.files import check_directory
    from prism.views.compare import compare_view

    if output is not None:
        check_directory(output)
    with progress_line("comparing", quiet) as report:
        result = compare_two(
            a, b, column=column, where=rows_of(where), effect=effect, skip=skip, seed=seed,
            progress=report,
        )  # fmt: skip
    numbers = summarize_compare(result)
    if output is not None:
        write_folder(output, result, numbers, _draw, quiet)
    tell_warnings(numbers)
    answer(numbers, as_json, compare_view)


def _draw(result: xr.Dataset) -> dict[str, Axes]:
    """Draw the plots of a comparison, by the stem of their files."""
    import json

    from prism.plots.compare import draw_comparison

    names = json.loads(result.attrs["quantities"])
    return {
        f"compare_{name}" if len(names) > 1 else "compare": draw_comparison(result, name)
        for name in names
    }
