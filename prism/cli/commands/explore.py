"""``prism explore``: a local page in the browser."""

from __future__ import annotations

import click

from prism.cli.commands.options import common_options
from prism.cli.commands.outputs import Call


@click.command()
@click.argument("job", metavar="[JOB]", default="llama3-70b-fsdp-512")
@click.option("--port", type=click.IntRange(1, 65535), default=8490, show_default=True,
              help="Of the page, which only this machine can open.")  # fmt: skip
@click.option("--no-browser", is_flag=True, help="Open none.")
@common_options(details=False)
def explore(call: Call, job: str, port: int, no_browser: bool) -> None:
    """Change a job in the browser, and see what prism answers.

    JOB is a job file or the name of a shipped job: model, GPUs, layout, precision, variability and
    failures can be changed, and one setting pinned beside another. The page is served to this
    machine alone, needs no network, and shows the job file and the command that give the same
    answer. Ctrl-C ends it. Needs NiceGUI: pip install 'nicegui>=3.6'.
    """
    from prism.jobs.job import load_job
    from prism.present.explore.page import HOST, serve

    if call.as_json:
        raise click.UsageError("--json: a page is no object; prism estimate --json gives one")
    base = load_job(job)
    call.say(f"prism: {base.name} at http://{HOST}:{port}; Ctrl-C ends it")
    serve(base, port, call.seed or 0, call.threads, not no_browser)
