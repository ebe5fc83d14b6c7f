"""``prism report``: one self-contained HTML page of results."""

from __future__ import annotations

from typing import Any

import click

from prism.cli.commands.options import NO_EFFECT, common_options
from prism.cli.commands.outputs import Call


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
@common_options(details=False, draws=False, threads=NO_EFFECT)
def report(call: Call, results: tuple[str, ...], output: str, title: str | None) -> None:
    """Make one self-contained HTML page of results.

    RESULT is what -o of estimate, rank, place, sweep, validate, compare, replay or fit wrote: a
    folder, its result.nc, or a model. The page needs no network and no scripts.
    """
    from prism.present.answer import Answer
    from prism.present.cells import Cell, Column, Table
    from prism.present.reports.page import MOST_BYTES, check_page, make_page, read_parts

    check_page(output)
    with call.progress("drawing"):
        found = read_parts(results)
        size = len(make_page(found, output, title).encode())
    warnings = []
    if size > MOST_BYTES:
        warnings.append(
            f"{output} has {size / 1e6:.1f} MB; give fewer results where it is to be sent by mail"
        )
    written: list[dict[str, Any]] = []
    rows: list[tuple[Cell, ...]] = []
    for item in found:
        given = item.answer
        findings = [finding._asdict() for finding in given.findings]
        written.append({"file": item.file, "kind": item.kind, "subject": given.subject,
                         "findings": findings, "warnings": list(given.warnings)})  # fmt: skip
        rows.append((item.file, findings[0]["text"] if findings else given.title))
    columns = (Column(right=False), Column(right=False))
    figures = {"report": output, "bytes": size, "results": written}
    call.print(Answer(
        title="Report", subject=output, head=f": {size / 1e3:,.0f} kB", figures=figures,
        tables=(Table("", columns, tuple(rows)),), warnings=tuple(warnings),
    ))  # fmt: skip
