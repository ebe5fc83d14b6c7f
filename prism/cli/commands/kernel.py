"""``prism kernel``: what one kernel or collective takes on a device."""

from __future__ import annotations

from typing import Any

import click

from prism.cli.commands.options import NO_EFFECT, Command, common_options
from prism.cli.commands.outputs import Call


class _Bytes(click.ParamType):  # type: ignore[type-arg]
    """A message's size, such as ``64MiB`` or a number of bytes."""

    name = "bytes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number of bytes."""
        from prism.common.errors import PrismError
        from prism.measuring.collectives import parse_size

        try:
            return float(value)
        except ValueError:
            pass
        try:
            return float(parse_size(str(value)))
        except PrismError:
            self.fail(f"{value!r} is no size such as 4KiB, 1MB or 65536", param, ctx)


SIZES = {
    "m": "gemm, grouped_gemm: rows; grouped_gemm: tokens of each expert.",
    "n": "gemm, grouped_gemm: columns of the weight.",
    "k": "gemm, grouped_gemm: the summed dimension.",
    "experts": "grouped_gemm.",
    "batch": "attention: sequences.",
    "heads": "attention, recurrent layers.",
    "kv-heads": "attention.  [default: heads]",
    "seq": "attention; recurrent layers: a sequence of the tokens.  [default: tokens]",
    "head-dim": "attention, recurrent layers: width of a head.",
    "v-head-dim": "attention: width of a head's values.  [default: head-dim]",
    "window": "attention: keys that a query sees.  [default: all]",
    "rows": "rms_norm, layer_norm.",
    "columns": "rms_norm, layer_norm.",
    "tokens": "gated_delta, kda, mamba2.",
    "state": "mamba2: width of a head's state.",
    "groups": "mamba2: groups of heads.  [default: 8]",
}
HOSTS = {
    "ranks": (int, "collective: GPUs that take part.  [default: all of the nodes]"),
    "nodes": (int, "collective: hosts, of 4 GPUs on GB200 and GB300, else 8.  [default: as few as "
                   "hold the ranks]"),
    "nvlink-domain-gpus": (int, "collective: GPUs joined by NVLink.  [default: as in a job]"),
    "network-gbit": (float, "collective: network of a GPU, Gbit/s.  [default: the device's]"),
}  # fmt: skip
WORDS = {
    "dtype": "Number format: bf16, fp8, fp8_block, mxfp8, nvfp4.  [default: bf16]",
    "backend": "attention: cudnn, fa2, fa3, fa4, efficient, math; norms: eager, compiled, te, "
               "unfused (rms_norm).  [default: the first that was measured]",
    "mask": "attention: causal or full.  [default: causal]",
    "op": "collective: all_reduce, all_gather, reduce_scatter, alltoall, sendrecv.",
    "transport": "collective: infiniband or roce.  [default: infiniband]",
}  # fmt: skip


def _kernel_options(command: Command) -> Command:
    """Add the sizes of all kinds, and what else is said of a kernel."""
    options = [
        *(click.option(f"--{n}", type=float, metavar="N", help=x) for n, x in SIZES.items()),
        click.option("--bytes", type=_Bytes(), help="memory: read and written; collective: message "
                     "as nccl-tests counts it."),
        *(click.option(f"--{n}", type=t, metavar="N", help=x) for n, (t, x) in HOSTS.items()),
        *(click.option(f"--{n}", metavar="NAME", help=x) for n, x in WORDS.items()),
        click.option("--backward", is_flag=True, default=None, help="The backward alone."),
        click.option("--deterministic", is_flag=True, default=None, help="attention: of the "
                     "backward."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("_", "-")})
@click.argument("kind")
@click.option("--device", metavar="NAME", help="GPU, as a job names it.  [default: the library's]")
@click.option("--library", metavar="NAME", help="Distributions and tables: a shipped set, or a .nc "
              "of `prism measure`.  [default: DEVICE-healthy]")  # fmt: skip
@_kernel_options
@common_options("Result, summary and plot.", draws=False, threads=NO_EFFECT)
def kernel(call: Call, kind: str, **asked: Any) -> None:
    """Say what one kernel or collective takes.

    KIND is gemm, grouped_gemm, attention, rms_norm, layer_norm, memory, collective, gated_delta,
    kda or mamba2; each has sizes of its own.
    """
    from prism.analyses.kernel import kernel_result

    call.conclude(kernel_result(kind, **asked))
