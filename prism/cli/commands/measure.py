"""``prism measure``: distributions of the machine at hand, one subcommand for each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from prism.cli.commands.options import Command, Duration, common_options, output_option
from prism.cli.commands.outputs import Call, check_model_path, check_picture_path
from prism.common.errors import PrismError
from prism.common.resultfiles import GONE

DTYPES = click.Choice(["float64", "float32", "bfloat16", "float16"])
DEVICE = click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="[default: the GPU where there is one]"
)
LIMIT = click.option(
    "--limit",
    "limit_s",
    type=Duration(),
    help="Stop after this long and keep what was measured: 60s, ...",
)
THREADS = "Threads of each process on a CPU.  [default: 1]"
JOB = click.option("--job", metavar="JOB", help="What the ranks of this job run.")


@click.group()
def measure() -> None:
    """Measure distributions of kernels on this machine.

    They go into a library. Needs torch: pip install 'torch>=2.5'. Steps of a job are recorded with
    torch.profiler, for prism fit.
    """


def _library_options(command: Command) -> Command:
    """Add the options of what ends in a library."""
    for option in (
        click.option(
            "--plot", metavar="FILE.png", type=click.Path(), help="Draw the distributions."
        ),
        click.option(
            "--resume", is_flag=True, help="Go on with the calls kept in LIBRARY.samples.nc."
        ),
        click.option(
            "--base",
            metavar="LIBRARY",
            help="What is not measured.  [default: the file itself where it exists, else the "
            "device's healthy set, else h100-healthy]",
        ),
        LIMIT,
        click.option(
            "--warm-up",
            type=click.IntRange(min=0),
            default=200,
            show_default=True,
            help="Most calls before those that count; fewer where they get no faster.",
        ),
        click.option(
            "--repetitions",
            type=click.IntRange(min=1),
            default=2_000,
            show_default=True,
            help="Calls of each size that count.",
        ),
        DEVICE,
        click.option("--dtype", type=DTYPES, help="[default: bfloat16 on a GPU, float32 on a CPU]"),
        JOB,
        output_option("Library to write; one that exists keeps its other entries.", "LIBRARY.nc"),
    ):
        command = option(command)
    return command


def _backend_option(kind: str) -> Callable[[Command], Command]:
    """Add the backend of attention; other kinds have none."""
    if kind != "attention":
        return lambda command: command
    return click.option(
        "--backend",
        type=click.Choice(["cudnn", "fa2", "efficient", "math"]),
        help="Of scaled_dot_product_attention; its tables go by this name too.  [default: "
        "torch's choice]",
    )


def _add_kernels(kind: str, form: str, text: str) -> None:
    """Add the command of a kind of kernel, whose sizes are written in this form."""

    @measure.command(kind, help=text)
    @click.option("--shape", "shapes", metavar=form, multiple=True,
                  help="Repeatable.  [default: a few of each size]")  # fmt: skip
    @_library_options
    @click.option(
        "--sustained",
        is_flag=True,
        help="Each size back to back until its rate settles, at a GPU's power limit for one; then "
        "the calls that count.",
    )
    @click.option("--flush-l2", is_flag=True, help="Empty a GPU's L2 cache before each call.")
    @_backend_option(kind)
    @common_options(threads=THREADS)
    def run(call: Call, **options: Any) -> None:
        _measure(call, kind, **options)


_add_kernels("gemm", "MxNxK", "Matrix products: [M, K] by [K, N].")
_add_kernels(
    "attention",
    "BxHxSxD",
    "Causal attention, forward and backward: batch x heads x sequence x head size.",
)
_add_kernels("memory", "ROWSxWIDTH", "Memory-bound kernels: layer norm, sum, softmax, copy.")


@measure.command()
@click.option("--size", "sizes", metavar="BYTES", multiple=True,
              help="Message, as 4KiB or 1MB; repeatable.  [default: a few]")  # fmt: skip
@click.option(
    "--op",
    "ops",
    type=click.Choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "p2p"]),
    multiple=True,
    help="Repeatable.  [default: all]",
)
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True,
              help="Processes; under torchrun its own.")  # fmt: skip
@click.option("--tier", type=click.Choice(["nvlink", "network"]), default="nvlink",
              show_default=True,
              help="What joins the ranks: links inside a node, or the network.")  # fmt: skip
@_library_options
@common_options(threads=THREADS)
def collective(call: Call, **options: Any) -> None:
    """Time collectives and transfers between processes: NCCL on GPUs, else gloo."""
    _measure(call, "collective", **options)


def _measure(
    call: Call, kind: Any, *, output: str | None, plot: str | None, **options: Any
) -> None:
    from prism.measuring.command import measure as run
    from prism.measuring.command import samples_path
    from prism.present.answers.measure import measurement_answer

    if output is not None:
        check_model_path(output, ())
    if plot is not None:
        check_picture_path(plot)

    def tell(text: str) -> None:
        call.say(f"prism: warning: {text}")

    try:
        result = call.run(f"measuring {kind}", run, kind, output, tell=tell, **options)
    except KeyboardInterrupt:
        if output is not None and samples_path(output).is_file():
            call.say(
                f"prism: calls so far are kept in {samples_path(output)}; the same command with "
                "--resume goes on from there"
            )
        raise
    if result is None:
        return  # a launcher's other ranks
    shown = measurement_answer(result)
    kept = "the library is not kept; -o LIBRARY.nc writes it"
    call.say(kept if output is None else f"wrote {output}, {samples_path(output)}")
    if plot is not None:
        from prism.plots.base import save_figure

        save_figure(shown.pictures[0].draw(), plot)
    call.print(shown)


@measure.command(
    "step",
    hidden=True,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def _step() -> None:
    """Say what there is in place of a command of earlier versions."""
    raise PrismError(GONE["measured_step"])
