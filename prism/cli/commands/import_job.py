"""``prism import``: a job from another tool's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from prism.cli.commands.options import NO_EFFECT, common_options, set_option
from prism.cli.commands.outputs import Call
from prism.cli.commands.terminal import say

if TYPE_CHECKING:
    from prism.present.answer import Answer


@click.command("import")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("-o", "--output", metavar="JOB.yaml", type=click.Path(),
              help="The job file.  [default: it is printed]")  # fmt: skip
@click.option("--from", "format_", metavar="FORMAT",
              help="megatron, nemo, bridge, torchtitan, nanotron, deepspeed, huggingface or "
              "trainer.  [default: found by content]")  # fmt: skip
@click.option("--gpus", type=click.IntRange(min=1), metavar="N",
              help="GPUs of the job.  [default: as the file says]")  # fmt: skip
@click.option("--device", metavar="NAME", help="The GPU.  [default: as the file says, else h100]")
@click.option("--job", metavar="JOB",
              help="Of a topology: the job whose hosts get their places in it.")  # fmt: skip
@click.option("--hosts", metavar="LIST",
              help="Of a topology: the job's hosts in rank order.  "
              "[default: the first of the topology]")  # fmt: skip
@click.option("--as-model", is_flag=True,
              help="FILE is a profile of training steps: make a job with its layers as a table of "
              "ops.")  # fmt: skip
@set_option
@common_options(details=False, draws=False, threads=NO_EFFECT)
def import_job(
    call: Call,
    files: tuple[str, ...],
    output: str | None,
    format_: str | None,
    gpus: int | None,
    device: str | None,
    job: str | None,
    hosts: str | None,
    as_model: bool,
    overrides: tuple[str, ...],
) -> None:
    """Make a job file of a launch script, a log or a configuration.

    FILE holds Megatron-LM or torchtitan arguments (a command, a script, or a log that lists them),
    a NeMo or Megatron Bridge recipe, torchtitan TOML or JSON, DeepSpeed JSON or a model's
    config.json, which may also stand beside one of the others; - is standard input. Each value of
    the job has the line it comes from; what was assumed and what was not understood are listed.

    With --job, FILE is a topology: Slurm's topology.conf or topology.yaml, or the JSON of kubectl
    get nodes with Topograph's labels. The job gets tiers, NVLink domains and its hosts' places.

    With --as-model, FILE is a trace of PyTorch's profiler, with record_shapes=True: kernels of a
    step become layers of ops, which can be moved to another device, batch or layout.
    """
    from prism.jobs.importing.imported import import_job as read_job
    from prism.present.imports import import_answer, imported_yaml

    if output is not None and not output.endswith((".yaml", ".yml")):
        raise click.UsageError(f"-o {output}: expected a name such as my-job.yaml")
    if as_model:
        if format_ or gpus or job or hosts or overrides:
            raise click.UsageError(
                "--as-model: the job is of the GPU that was profiled; give FILE, -o and --device "
                "alone, and --set when the job is used"
            )
        if len(files) > 1:
            raise click.UsageError("--as-model: expected one profile")
        _write(call, *_table(files[0], device), output)
        return
    if job is not None:
        if format_ or gpus or device or overrides:
            raise click.UsageError("--job: a topology has neither GPUs nor --set; drop them")
        if len(files) > 1:
            raise click.UsageError("--job: expected one topology")
        _write(call, *_place(files[0], job, hosts, output), output)
        return
    if hosts is not None:
        raise click.UsageError("--hosts: belongs to a topology; add --job JOB")
    found = read_job(files, format_, gpus, device, overrides)
    _write(call, imported_yaml(found), import_answer(found), output)


def _table(file: str, device: str | None) -> tuple[str, Answer]:
    """Make a table of ops of a profile."""
    from prism.models.optables.table import op_table
    from prism.present.imports import table_answer, table_yaml

    found = op_table(file, device)
    return table_yaml(found), table_answer(found)


def _place(file: str, job: str, hosts: str | None, output: str | None) -> tuple[str, Answer]:
    """Give the hosts of a job their places in a topology; names go beside the output."""
    import os

    from prism.cluster.nodes.hosts import read_host_list
    from prism.jobs.importing.topology import place_job, read_topology
    from prism.jobs.job import load_job
    from prism.present.imports import topology_answer, topology_yaml

    base, topology = load_job(job), read_topology(file)
    n = -(-base.world_size // base.cluster.gpus_per_node)
    names = list(topology.units)[:n] if hosts is None else read_host_list(hosts, n)
    placed = place_job(base, topology, names, file if hosts is None else hosts)
    base.replace({"cluster": placed.keys})  # refused here rather than when it is used
    told = "the first of the topology" if hosts is None else f"as in {hosts}"
    if output is not None:
        folder = os.path.dirname(output) or "."
        names_file = f"{os.path.splitext(output)[0]}-hosts.txt"
        listed = (name or f"no-host-{k}" for k, name in enumerate(placed.names))
        _write_beside(names_file, "".join(f"{name}\n" for name in listed), output, hosts)
        told += f"; {names_file} lists them by position, as --hosts takes them"
        job = os.path.relpath(job, folder) if os.path.exists(job) else job
    return topology_yaml(job, placed), topology_answer(base, placed, topology, file, told)


def _write_beside(file: str, text: str, output: str, read: str | None) -> None:
    """Write a file that nobody named, over none but one of the same output before.

    Raises PrismError where something else is there, or what was just `read`.
    """
    import os

    from prism.common.errors import PrismError
    from prism.common.files import atomic_write

    if os.path.lexists(file) and (file == read or not os.path.lexists(output)):
        with open(file, "rb") as there:
            if there.read(len(text.encode()) + 1) != text.encode():
                raise PrismError(f"{file}: is there and holds something else; give another -o JOB")
    with atomic_write(file) as path:
        path.write_text(text, encoding="utf-8")


def _write(call: Call, text: str, answer: Answer, output: str | None) -> None:
    from prism.common.files import atomic_write

    if output is not None:
        with atomic_write(output) as path:
            path.write_text(text, encoding="utf-8")
    if call.as_json or output is not None:
        call.print(answer)
    else:
        for warning in answer.warnings:
            say(f"prism: warning: {warning}")
        click.echo(text, nl=False)
        call.say(" ".join(finding.text for finding in answer.findings))
    if output is not None:
        call.say(f"wrote {output}; next: prism estimate {output}")
