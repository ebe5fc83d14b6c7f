"""``prism report``: one self-contained HTML page of results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from prism.cli.commands.options import NO_EFFECT, common_options
from prism.cli.commands.terminal import answer, progress_line, tell_warnings


@click.command()
@click.argument("results", metavar="RESULT...", nargs=-1, required=True)
@click.option(
    "-o",
    "--output",
    metavar="FILE.html",
    type=click.Path(),
    default="report.html",
    show_default=True,
    help="The page.",
)
@click.option("--title", metavar="TEXT", help="Of the page.  [default: made of its jobs]")
@common_options(draws=False, threads=NO_EFFECT)
def report(
    results: tuple[str, ...],
    output: str,
    title: str | None,
    as_json: bool,
    quiet: bool,
    seed: int | None,
    threads: int | None,
) -> None:
    """Make one self-contained HTML page of results.

    RESULT is what -o of estimate, rank, place, sweep, validate, compare, replay or fit wrote: a
    folder, its result.nc, or a model. The page needs no network and no scripts.
    """
    from prism.present.reports.page import MOST_BYTES, check_page, make_page
    from prism.present.reports.read import read_results

    check_page(output)
    with progress_line("drawing", quiet):
        found = read_results(results)
        size = len(make_page(found, output, title).encode())
    warnings = []
    if size > MOST_BYTES:
        warnings.append(
            f"{output} has {size / 1e6:.1f} MB; give fewer results where it is to be sent by mail"
        )
    numbers: dict[str, Any] = {
        "report": output,
        "bytes": size,
        "results": [
            {"file": item.file, "kind": item.kind, "subject": item.section.subject,
             "answers": item.section.answers, "warnings": item.section.warnings}
            for item in found
        ],
        "warnings": warnings,
    }  # fmt: skip
    tell_warnings(numbers)
    answer(numbers, as_json, _view)


def _view(numbers: Mapping[str, Any]) -> str:
    """Say what was written, and the first sentence of each result."""
    lines = [f"{numbers['report']}: {numbers['bytes'] / 1e3:,.0f} kB"]
    for item in numbers["results"]:
        first = item["answers"][0] if item["answers"] else item["kind"]
        lines.append(f"  {item['file']}: {first}")
    return "\n".join(lines)
