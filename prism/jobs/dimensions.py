"""The ways in which a job is divided, one record each, in the order in which layouts are written.

A new one is a record here and its key in `jobspec.blocks`; one that splits no tokens also what it
must divide (`jobspec.modelcheck`) and, in `prism.workload`, a GPU's share (`ops`, `layers`) and
what it communicates (`expand`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Dimension(NamedTuple):
    """A way to divide a job; `names` are what other frameworks call its size."""

    title: str
    splits: Literal["weights", "tokens", "layers", "chunks", "batch", "experts"]
    names: str


DIMENSIONS = {
    "tp": Dimension(
        "Tensor parallel", "weights",
        "tensor_model_parallel_size tensor_parallel_degree tensor_parallel_size tensor_parallel "
        "tp_size tp_degree autotp_size model_parallel_size",
    ),
    "cp": Dimension(
        "Context parallel", "tokens",
        "context_parallel_size context_parallel_degree context_parallel cp_size cp_degree",
    ),
    "pp": Dimension(
        "Pipeline stages", "layers",
        "pipeline_model_parallel_size pipeline_parallel_degree pipeline_parallel_size "
        "pipeline_parallel pipe_parallel_size pp_size pp_degree pipeline_stages num_stages",
    ),
    "vpp": Dimension(
        "Model chunks per stage", "chunks",
        "virtual_pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank "
        "virtual_pipeline_parallel_size vpp_size num_layers_per_virtual_pipeline_stage "
        "pipeline_parallel_layers_per_stage",
    ),
    "dp": Dimension(
        "Data parallel", "batch",
        "data_parallel_size data_parallel_degree dp_size dp_degree data_parallel_replicate_degree "
        "num_replicas world_size np",
    ),
    "ep": Dimension(
        "Expert parallel", "experts",
        "moe_expert_parallel_size expert_model_parallel_size expert_parallel_degree "
        "expert_parallel_size expert_parallel ep_size",
    ),
}  # fmt: skip


def _that_split(*what: str) -> tuple[str, ...]:
    return tuple(name for name, dimension in DIMENSIONS.items() if dimension.splits in what)


TOKENS = _that_split("tokens")
"""Whose ranks hold the same parameters, for other tokens of the same sequences."""
STAGE = _that_split("weights", "tokens")  # whose product are the GPUs of one stage of a replica
REPLICA = _that_split("weights", "tokens", "layers")
GPUS = _that_split("weights", "tokens", "layers", "batch")
"""Whose product are the GPUs of a replica, and of the job."""
COMMUNICATING = (*STAGE, "ep", "pp", "dp")  # whose ranks exchange messages, the closest first
