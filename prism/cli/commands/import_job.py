"""``prism import``: a job from another tool's configuration."""

from __future__ import annotations

import click

from prism.cli.commands.options import NO_EFFECT, common_options, set_option
from prism.cli.commands.terminal import print_answer, say


@click.command("import")
@click.argument("file", metavar="FILE")
@click.option("-o", "--output", metavar="JOB.yaml", type=click.Path(),
              help="The job file.  [default: it is printed]")  # fmt: skip
@click.option("--from", "format_", metavar="FORMAT",
              help="megatron, nemo, bridge, torchtitan, deepspeed or huggingface.  "
              "[default: found by content]")  # fmt: skip
@click.option("--gpus", type=click.IntRange(min=1), metavar="N",
              help="GPUs of the job.  [default: as the file says]")  # fmt: skip
@click.option("--device", metavar="NAME", help="The GPU.  [default: as the file says, else h100]")
@set_option
@common_options(draws=False, threads=NO_EFFECT)
def import_job(
    file: str,
    output: str | None,
    format_: str | None,
    gpus: int | None,
    device: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    quiet: bool,
    seed: int | None,
    threads: int | None,
) -> None:
    """Make a job file of a launch script, a log or a configuration.

    FILE holds Megatron-LM arguments (a command, a script, or the start of the log, which lists
    them), a NeMo or Megatron Bridge recipe, torchtitan TOML, DeepSpeed JSON or a model's
    config.json; - is standard input. Each value of the job has the line it comes from; what was
    assumed and what was not understood are listed.
    """
    from prism.common.files import atomic_write
    from prism.jobs.importing.imported import import_job as read_job
    from prism.present.imports import import_answer, imported_yaml

    if output is not None and not output.endswith((".yaml", ".yml")):
        raise click.UsageError(f"-o {output}: expected a name such as my-job.yaml")
    found = read_job(file, format_, gpus, device, overrides)
    text, answer = imported_yaml(found), import_answer(found)
    if output is not None:
        with atomic_write(output) as path:
            path.write_text(text, encoding="utf-8")
    if as_json or output is not None:
        print_answer(answer, as_json, details=True)
    else:
        for warning in answer.warnings:
            say(f"prism: warning: {warning}")
        click.echo(text, nl=False)
        if not quiet:
            say(" ".join(finding.text for finding in answer.findings))
    if output is not None and not quiet:
        say(f"wrote {output}; next: prism estimate {output}")
