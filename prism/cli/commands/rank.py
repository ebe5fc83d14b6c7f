"""``prism rank``: what makes the time vary."""

from __future__ import annotations

import click

from prism.cli.commands.options import PLOTS, common_options, set_option
from prism.cli.commands.outputs import Call


@click.command()
@click.argument("job", metavar="JOB_OR_MODEL")
@click.option("--target", type=click.Choice(["step_time", "time_to_train"]), default="step_time",
              show_default=True, help="Time whose variance is ranked.")  # fmt: skip
@click.option("--speed-up", type=click.FloatRange(0, 100, min_open=True, max_open=True),
              metavar="PERCENT",
              help="What each kernel class would bring if it took so much less time.")  # fmt: skip
@set_option
@common_options(PLOTS, placed=True)
def rank(
    call: Call,
    job: str,
    target: str,
    speed_up: float | None,
    overrides: tuple[str, ...],
) -> None:
    """Rank kernels and effects by how much they make the time vary.

    It says what each contributes to the variance and to the tail, and what fixing it would bring.
    JOB_OR_MODEL is a job file, the name of a shipped job, or a model of `prism fit`.
    """
    from prism.analyses.rank import rank as rank_causes
    from prism.jobs.job import load_job

    share = None if speed_up is None else 0.01 * speed_up
    loaded = load_job(job, overrides)
    call.conclude(call.run("ranking", rank_causes, loaded, target, speed_up=share))
