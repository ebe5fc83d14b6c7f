"""The five blocks of a job file as frozen pydantic models: names, types, units, defaults.

What holds between keys is `prism.jobs.jobspec.check`. Units are in the names; defaults that depend
on another key are filled in before validation and described in words.
"""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, PrivateAttr, StrictBool

from prism.jobs.dimensions import DIMENSIONS, REPLICA, STAGE, TOKENS
from prism.jobs.frameworks import FRAMEWORKS
from prism.jobs.jobspec.effects import VariabilityBlock
from prism.jobs.jobspec.machines import ClusterBlock
from prism.jobs.jobspec.ownlayers import LayerBlock, Sized, size_layers
from prism.jobs.jobspec.ownops import Expression
from prism.jobs.jobspec.presets import PRESETS
from prism.jobs.jobspec.run import RunBlock
from prism.jobs.jobspec.values import (
    AtLeastOne,
    Block,
    Count,
    Number,
    Positive,
    Seconds,
    Size,
    Split,
    integral,
    key,
)
from prism.jobs.pipelineshape import TRAITS, VirtualStages

if TYPE_CHECKING:
    FrameworkName = str
else:
    FrameworkName = Literal[tuple(FRAMEWORKS)]
# Legal values that are not modelled yet, by key, with the nearest one that is.
UNMODELLED = {"data_parallel": {"zero2": "zero1"}}


class Durations(Block):
    """Op durations given outright, so that neither a model's sizes nor a device is needed."""

    forward_s: Seconds = Field(
        description="Forward of one microbatch on one stage (all its chunks) [s]; one number or "
        "one per stage."
    )
    backward_s: Seconds = Field(
        description="Backward of one microbatch on one stage (all its chunks) [s]; one number or "
        "one per stage."
    )
    weight_s: Seconds | None = key(
        "Part of backward_s that only gives weight gradients, which the schedules zb-* and "
        "dualpipe-v put off [half of backward_s; s]; one number or one per stage."
    )


class ModelBlock(Block):
    """What is trained: a named model, its sizes, layers of one's own, or explicit op durations."""

    name: str | None = key(
        f"A known model ({', '.join(PRESETS)}); each of its sizes can be overridden beside it."
    )
    n_layers: Size = key("Transformer layers [the named model's].", 0)
    hidden_size: Size = key("Width of the residual stream [the named model's].", 0)
    ffn_size: Size = key("Width of the feed-forward layer [the named model's].", 0)
    n_heads: Size = key("Attention heads [the named model's].", 0)
    n_kv_heads: Size = key("Key and value heads [n_heads].", 0)
    vocab_size: Size = key("Rows of the embedding [the named model's].", 0)
    seq_len: Size = key("Tokens in a sequence [the named model's].", 0)
    gated_mlp: StrictBool = key(
        "Three feed-forward matrices (SwiGLU) rather than two [the named model's, else true].", True
    )
    rope: StrictBool = key(
        "Positions rotate queries and keys (RoPE); false: learned positions, ALiBi or none [the "
        "named model's, else true].",
        True,
    )
    tied_embeddings: StrictBool = key(
        "Input and output embedding are one matrix [the named model's, else false].", False
    )
    head_size: Number = key("Width of a head's queries and keys [hidden_size / n_heads].", 0)
    v_head_size: Number = key("Width of a head's values [head_size].", 0)
    attention_gate: StrictBool = key(
        "Attention's result is multiplied by a gate of its width (attn_output_gate).", False
    )
    q_lora_rank: Number = key("Width of the queries' latent [0: none].", 0)
    kv_lora_rank: Number = key(
        "Multi-head latent attention: width of keys' and values' latent [0: none].", 0
    )
    rope_head_size: Number = key(
        "Multi-head latent attention: part of head_size that carries the position, in the keys "
        "shared by all heads.",
        0,
    )
    n_experts: Number = key("Routed experts of a layer [0: all layers dense].", 0)
    experts_per_token: Number = key("Routed experts that each token goes to.", 0)
    expert_ffn_size: Number = key("Width of one expert [ffn_size].", 0)
    expert_latent_size: Number = key(
        "Width in which routed experts compute and are sent to, between two projections of all "
        "tokens (moe_latent_size) [0: hidden_size].",
        0,
    )
    n_shared_experts: Number = key("Experts that every token goes to.", 0)
    shared_ffn_size: Number = key(
        "Width of the shared experts together [n_shared_experts * expert_ffn_size].", 0
    )
    n_dense_layers: Number = key("First layers without experts.", 0)
    moe_layer_interval: Count = key(
        "Layers after these come in groups of this many, of which the last one has experts.", 1
    )
    window: Number = key(
        "Tokens that a token's attention sees in layers with a sliding window [0: no such layers].",
        0,
    )
    full_attention_interval: Number = key(
        "With a window, layers come in groups of this many, of which the last one sees all tokens "
        "[0: all have the window].",
        0,
    )
    layer_pattern: str = key(
        "Hybrid models, a letter a layer: M Mamba-2, L linear attention by the gated delta rule, * "
        "attention, W attention with the window, H attention and Mamba-2 side by side, - "
        "feed-forward, E experts; or groups of two, such as LE LE LE *E, a group a layer. It "
        "repeats [none: attention and feed-forward part in every layer].",
        "",
    )
    mamba_heads: Number = key("Mamba-2: heads of a layer.", 0)
    mamba_head_size: Number = key("Mamba-2: width of a head.", 0)
    mamba_groups: Number = key("Mamba-2: groups of heads that share B and C.", 0)
    mamba_state_size: Number = key("Mamba-2: width of a head's state.", 0)
    linear_heads: Number = key("Linear attention: value heads of a layer.", 0)
    linear_key_heads: Number = key("Linear attention: heads of queries and keys.", 0)
    linear_head_size: Number = key("Linear attention: width of a head.", 0)
    durations: Durations | None = key("Explicit op durations instead of a model's sizes.")
    dims: dict[str, Expression] = Field(
        {},
        description="Sizes of layers by name: numbers, or expressions of each other and of batch "
        "(microbatch_size), seq (seq_len, else 1), hidden (hidden_size), n_experts and "
        "experts_per_token.",
    )
    layers: tuple[LayerBlock, ...] | None = key(
        "Layers as lists of ops, instead of a name and sizes. A size is a number or an expression "
        "of dims, of a whole microbatch: prism divides it by tp, cp and ep."
    )
    _sized: dict[float, Sized] = PrivateAttr(default_factory=dict)

    def sized(self, batch: float) -> Sized:
        """Compute the layers' sizes for some samples, and list what is wrong with them."""
        if batch not in self._sized:
            self._sized[batch] = size_layers(self, batch)
        return self._sized[batch]

    @property
    def depth(self) -> int:
        """Layers that a pipeline divides."""
        if self.layers is None:
            return self.n_layers
        return sum(layer.repeat for layer in self.sized(1.0)[0] if not layer.at)

    @property
    def layer_groups(self) -> list[str]:
        """Letters of each layer of the pattern, which repeats over all layers."""
        return self.layer_pattern.split() if " " in self.layer_pattern else [*self.layer_pattern]

    @classmethod
    def _fill(cls, given: dict[str, Any]) -> dict[str, Any]:
        name = given.get("name")
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
        if given.get("layers") is not None:
            given.setdefault("seq_len", 1)
        elif "n_heads" in given and "n_kv_heads" not in given and not preset:
            given["n_kv_heads"] = given["n_heads"]
        return {**preset, **given}


class ParallelismBlock(Block):
    """How the work is divided over GPUs and ordered in time."""

    tp: Count = key("Tensor-parallel size (tp_size).", 1)
    cp: Count = key("Context-parallel size (cp_size).", 1)
    pp: Count = key("Pipeline stages (pp_size).", 1)
    vpp: Count = key("Model chunks per stage (vpp_size) [2 with zb-v and dualpipe-v, else 1].", 1)
    dp: Count = key("Data-parallel replicas (dp_size).", 1)
    ep: Count = key(
        "Expert-parallel size (ep_size): neighbouring ranks of a stage that hold the experts "
        "between them, over cp and, with expert_tp: 1, tp before dp; divides dp * cp * tp / "
        "expert_tp and n_experts.",
        1,
    )
    expert_tp: Count | None = key(
        "Tensor-parallel size inside routed experts (expert_tensor_parallel_size): tp, or 1, where "
        "each tp rank holds whole experts and computes the copies of its own tokens [tp]."
    )
    expert_imbalance: AtLeastOne | None = key(
        "Tokens of the busiest expert-parallel rank over the mean [1.1, an assumption; 1 with ep = "
        "1]."
    )
    expert_node_limit: Count | None = key(
        "A token's experts lie on at most this many NVLink domains, and it crosses the network "
        "once for each [none: once for every expert]."
    )
    expert_dispatch: Literal["alltoall", "deepep", "hybridep"] = key(
        "How tokens get to their experts: NCCL's all-to-all of every copy, or kernels that send a "
        "token once to each rank, DeepEP's or HybridEP's.",
        "alltoall",
    )
    expert_capacity: Positive | None = key(
        "Tokens that an expert takes at most, over the mean; the others are dropped [none: it "
        "takes all, as dropless training does]."
    )
    expert_overlap: StrictBool = key(
        "All-to-alls run beside the compute of another microbatch, as in DualPipe, rather than "
        "exposed.",
        False,
    )
    cuda_graphs: StrictBool = key(
        "Kernels of layers with experts are launched as CUDA graphs (cuda_graph_impl): the host "
        "takes no time for them, and does not wait for counts of tokens.",
        False,
    )
    data_parallel: Literal["ddp", "zero1", "zero2", "fsdp", "hsdp", "none"] = key(
        "How replicas share gradients and parameters [ddp if dp > 1, else none]; zero2 is not "
        "modelled yet.",
        "none",
    )
    shard_size: Count | None = key(
        "hsdp: data-parallel ranks that hold one copy of the parameters between them [those of an "
        "NVLink domain]."
    )
    reshard_after_forward: StrictBool = key(
        "fsdp, hsdp: gather parameters again before backward [false if pp > 1, else true].", True
    )
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"] = key(
        "Pipeline schedule [1f1b if vpp = 1, else interleaved]; zb-h1, zb-v and dualpipe-v split "
        "the backward, the last two with vpp = 2 chunks of a stage in a V.",
        "1f1b",
    )
    p2p: Literal["blocking", "async"] = key(
        "Transfers between stages: blocking pairs as Megatron's 1F1B, or async.", "async"
    )
    microbatches: Count = Field(
        description="Microbatches per replica and step [what global_batch makes them; else 1 if pp "
        "= 1, else it must be given]."
    )
    global_batch: Count | None = key(
        "Sequences in a step over all replicas, instead of microbatches: these are global_batch / "
        "(dp * microbatch_size) [dp * microbatches * microbatch_size]."
    )
    microbatch_size: Count = key("Sequences in a microbatch.", 1)
    sequence_parallel: StrictBool = key("Megatron's sequence parallelism inside a tp group.", True)
    recompute: Literal["none", "selective", "full"] = key(
        "Activations recomputed in backward: none; selective, every other matrix product and what "
        "is neither product nor attention, as torchtitan's selective op; or full. Megatron's "
        "selective is none: attention recomputes its scores in any case.",
        "none",
    )
    overlap: StrictBool = key(
        "Gradient and parameter collectives overlap with compute where the framework lets them: "
        "fsdp and hsdp both; ddp and zero1 gradients, with megatron zero1's parameters too; with "
        "nanotron and megatron-2022 neither.",
        True,
    )
    prefetch: Number = key("fsdp: layer groups gathered ahead of compute.", 1)
    bucket_layers: Count = key(
        "ddp and zero1 without a pipeline: layers whose gradients are ready together, which go in "
        "messages of the framework's bucket.",
        4,
    )
    layer_split: Split = key(
        "Layers of each model chunk in virtual-stage order (chunk*pp + stage; in a V there and "
        "back), pp*vpp counts [auto: as even as they go, the smaller shares at the ends; with "
        "nanotron by cost, logits included].",
        "auto",
    )
    precision: Literal["bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"] = key(
        "Number format of the linear layers' matrix products: fp8 with one scale per tensor (H100 "
        "and later), fp8_block with one per block (as DeepSeek-V3), mxfp8 and nvfp4 with one per "
        "32 and 16 numbers (B200 and later). Attention, router and logits stay in bf16.",
        "bf16",
    )
    framework: FrameworkName = key(
        "What makes kernels of a layer's ops, which are fused and in what precision: "
        f"{', '.join(f'{f.name} ({f.about})' for f in FRAMEWORKS.values() if '-' not in f.name)}, "
        "or one as of the year named [compiled, as torchtitan, with fsdp and hsdp, else megatron].",
        "megatron",
    )
    attention: Literal["cudnn", "fa2", "fa3", "fa4", "efficient", "math"] | None = key(
        "Implementation of attention: cuDNN's, FlashAttention's 2 to 4, PyTorch's "
        "memory-efficient one, or plain products (math) [the framework's on the device: megatron "
        "cudnn from H100 on, else fa2; on v100 efficient with megatron]."
    )
    optimizer: Literal["adamw", "sgd", "muon"] = key(
        "Optimizer, whose states are read, written and kept: AdamW two for each parameter, SGD "
        "without momentum none, Muon one; it makes matrices' updates orthogonal by five "
        "Newton-Schulz steps.",
        "adamw",
    )
    optimizer_dtype: Literal["fp32", "bf16"] = key(
        "Number format of the optimizer's states: fp32 with a master copy of the weights, or bf16 "
        "without one.",
        "fp32",
    )
    gradient_dtype: Literal["fp32", "bf16"] = key(
        "Number format in which gradients are added up and reduced: fp32 as in Megatron-LM, "
        "torchtitan and Llama 3, bf16 as in NeMo's performance recipes.",
        "fp32",
    )
    fused_loss: StrictBool = key(
        "The cross entropy and its gradient are one kernel in bf16, rather than torch's own in "
        "float32 [true with megatron and compiled, else false].",
        True,
    )

    @classmethod
    def _fill(cls, given: dict[str, Any]) -> dict[str, Any]:

        def many(key: str) -> bool:
            return bool(integral(given.get(key, 1)) != 1)

        traits = TRAITS.get(str(given.get("schedule")))
        if traits is not None and traits.chunks is not None and many("pp"):
            given.setdefault("vpp", traits.chunks)
        given.setdefault("data_parallel", "ddp" if many("dp") else "none")
        given.setdefault("reshard_after_forward", not many("pp"))
        sharded = given["data_parallel"] in ("fsdp", "hsdp")
        given.setdefault("framework", "compiled" if sharded else "megatron")
        framework = FRAMEWORKS.get(str(given["framework"]))
        given.setdefault("fused_loss", framework is not None and framework.fused_loss)
        given.setdefault("schedule", "interleaved" if many("vpp") else "1f1b")
        if "global_batch" in given:
            sizes = [integral(given.get(k, 1)) for k in ("global_batch", "dp", "microbatch_size")]
            valid = all(type(n) is int and n > 0 for n in sizes)  # a bad one has its own error
            each = max(1, sizes[0] // (sizes[1] * sizes[2])) if valid else 1
            given.setdefault("microbatches", each)
        elif not many("pp"):
            given.setdefault("microbatches", 1)
        return given

    def virtual_stages(self, n_chunks: int | None = None) -> VirtualStages:
        """Where model chunks lie, vpp of them on a stage unless another number is given."""
        chunks = self.vpp if n_chunks is None else n_chunks
        return VirtualStages(self.pp, chunks, TRAITS[self.schedule].shape)

    @property
    def splits(self) -> bool:
        """Whether weight gradients are put off, as actions of their own."""
        return TRAITS[self.schedule].splits and self.pp > 1

    @property
    def loops(self) -> bool:
        """Whether the last stage sends to the first."""
        return self.vpp > 1 and TRAITS[self.schedule].shape == "looped"

    def gpus(self, dimensions: Sequence[str]) -> int:
        """Multiply the sizes of dimensions."""
        return prod(getattr(self, name) for name in dimensions)

    def product(self, dimensions: Sequence[str]) -> str:
        """Write what `gpus` multiplies, of sizes above 1, as ``cp * tp``."""
        return " * ".join(name for name in dimensions[::-1] if getattr(self, name) > 1)

    @property
    def token_shards(self) -> int:
        """GPUs that divide the tokens of a sequence, each with the same parameters."""
        return self.gpus(TOKENS)

    @property
    def stage_gpus(self) -> int:
        """GPUs of one stage of a replica."""
        return self.gpus(STAGE)

    @property
    def replica_gpus(self) -> int:
        """GPUs of a replica."""
        return self.gpus(REPLICA)

    @property
    def sizes(self) -> str:
        """Sizes above 1, as ``tp8 pp4``."""
        sizes = {name: getattr(self, name) for name in DIMENSIONS}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)

    @property
    def expert_shards(self) -> int:
        """GPUs of a tp group that share each routed expert."""
        return self.expert_tp or self.tp

    @property
    def expert_ranks(self) -> int:
        """Ranks of a stage among which experts are divided."""
        return self.dp * self.stage_gpus // self.expert_shards

    @property
    def ends_meet(self) -> bool:
        """Whether the embedding and the loss are on one stage."""
        return self.virtual_stages().ends_meet


class Blocks(NamedTuple):
    """The blocks of a job, each valid by itself."""

    model: ModelBlock
    parallelism: ParallelismBlock
    cluster: ClusterBlock
    variability: VariabilityBlock
    run: RunBlock


BLOCKS: dict[str, type[BaseModel]] = Blocks.__annotations__
