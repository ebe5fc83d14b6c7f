"""The cluster and how the work is divided: GPUs, ranks, batches, what is sharded and overlapped."""

import re
from dataclasses import replace
from math import ceil
from pathlib import PurePath
from typing import Any, get_args

from prism.common.errors import PrismError
from prism.common.text import format_count
from prism.jobs.devices import DEVICES, LIBRARIES
from prism.jobs.dimensions import REPLICA
from prism.jobs.importing.draft import OFF, Draft
from prism.jobs.importing.families import MEGATRON
from prism.jobs.importing.model import n_layers, sequence_of
from prism.jobs.importing.settings import Setting
from prism.jobs.jobspec.blocks import ParallelismBlock
from prism.jobs.jobspec.othernames import KEYS, plain

_FSDP = ("fsdp", "fsdp_version", "use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
_SHARES = {"2": "stage 2 moves what stage 1 moves", "optim_grads": "it moves what optim moves"}


def read_device(d: Draft, device: str | None) -> None:
    """Find the device: as it was given, else in the settings or the file's name."""
    key = "cluster.device"
    _find_device(d, key, device)
    found = d.values.get(key)
    if found in DEVICES and found not in LIBRARIES:
        d.assume("variability.library", "none", f"no distributions are shipped for {found}")


def _find_device(d: Draft, key: str, device: str | None) -> None:
    if device is not None:
        d.values[key] = device
        return
    constraint = d.find("constraint", "partition", "gpu_type", "device_name")
    word = str(constraint.value).lower() if constraint else ""
    found = next((x for x in sorted(DEVICES, key=len, reverse=True) if x in word), None)
    if found is not None:
        d.give(key, found, constraint)
        return
    words = re.split(r"[^a-z0-9]+|(?<=\d)x(?=[a-z])", PurePath(d.source.name).name.lower())
    found = next((x for x in DEVICES if x in words), None)
    if found is not None:
        d.assume(key, found, "from the file's name; --device gives another")
    else:
        d.assume(key, "h100", "the file does not say; give it: --device a100")


def read_sizes(d: Draft, gpus: int | None) -> int:
    """Find the sizes of the dimensions, and the nodes; gives the GPUs."""
    for key in (*REPLICA, "ep"):
        found = d.of_key(f"parallelism.{key}")
        zero = found is not None and found.value == 0
        if zero and plain(found.path[-1]) == "pipeparallelsize":  # type: ignore[union-attr]
            continue  # GPT-NeoX without a pipeline
        inner = next((s for s in d.source.settings if s.path[-2:-1] == (key,)), None)
        if inner is not None or (found is not None and isinstance(found.value, bool)):
            d.refuse(inner or found, f"expected a whole number of {key}, at least 1")  # type: ignore[arg-type]
        if found is not None and found.value != 1 and f"parallelism.{key}" not in d.values:
            d.give(f"parallelism.{key}", found.value, found)
    d.use("data_parallel_size")
    each, wrong = 1, []
    for key in (*REPLICA, "ep"):
        size = d.values.get(f"parallelism.{key}", 1)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            place = d.source.place(d.given[f"parallelism.{key}"].line)
            text = f"expected a whole number, at least 1, got {size!r}; correct it"
            wrong.append(f"{place}: parallelism.{key}: {text}")
        elif key != "ep":
            each *= size
    if wrong:
        raise PrismError(*wrong)
    per_node = _per_node(d)
    total, places = _world(d, each, per_node)
    if gpus is not None:
        total, places = gpus, []
    layout = "*".join(f"{k} {d.values.get(f'parallelism.{k}', 1)}" for k in REPLICA)
    if total is None:
        raise PrismError(
            f"{d.source.name}: does not say on how many GPUs it runs; give them: --gpus N, a "
            f"multiple of {layout} = {each}"
        )
    if total % each or total < 1:
        sizes = (d.given.get(f"parallelism.{k}") for k in REPLICA[::-1])
        lines = [s.line for s in (*places, *sizes) if s is not None]
        at = d.source.place(lines[0]) if lines else d.source.name
        raise PrismError(
            f"{at}: {format_count(total, 'GPU')}, expected a multiple of {layout} = {each}; give "
            "them: --gpus N"
        )
    per_node = min(per_node, total)
    if "cluster.gpus_per_node" in d.values or per_node != 8:
        d.values["cluster.gpus_per_node"] = per_node
    d.values["cluster.nodes"] = ceil(total / per_node)
    if any(places):
        d.give("cluster.nodes", ceil(total / per_node), *places)
    if total // each > 1:
        d.values["parallelism.dp"] = total // each
        if any(places):
            d.give("parallelism.dp", total // each, *places)
    return total


def _per_node(d: Draft) -> int:
    found = d.find(*KEYS["cluster.gpus_per_node"], "gpus_per_node")
    device = d.values.get("cluster.device")
    if found is not None:
        count = re.search(r"(\d+)$", str(found.value))
        if count and int(count[1]) > 0:
            d.give("cluster.gpus_per_node", int(count[1]), found)
            return int(count[1])
    if device in DEVICES and DEVICES[device].rack_gpus:
        d.assume("cluster.gpus_per_node", 4, f"as {device} has")
        return 4
    return 8


def _world(d: Draft, each: int, per_node: int) -> tuple[int | None, list[Setting | None]]:
    """GPUs as the configuration has them, and the settings that say so."""
    world, nodes = (
        d.count("world_size", "np", "num_processes"),
        d.count(
            "nnodes", "num_nodes", "actor_num_nodes", "num_machines", "trainer.num_nodes", "nodes"
        ),
    )
    if world is not None:
        return world.value, [world]
    if nodes is not None:
        return nodes.value * per_node, [nodes]
    if d.source.format == "torchtitan":
        shard = d.count("data_parallel_shard_degree")
        copies = d.count("data_parallel_replicate_degree")
        if shard is not None and shard.value > 0:
            return each * shard.value * (copies.value if copies else 1), [shard, copies]
    if d.source.format == "nanotron" and (copies := d.count("parallelism.dp")) is not None:
        return each * copies.value, [copies]
    whole, size, steps = (d.count(x) for x in ("train_batch_size", "train_micro_batch_size_per_gpu",
                                               "gradient_accumulation_steps"))  # fmt: skip
    alone = d.count("nproc_per_node")
    if alone is not None and not d.has("nnodes"):  # torchrun's default is one node
        return per_node, [alone]
    if whole and size and steps and size.value * steps.value > 0:
        return whole.value // (size.value * steps.value) * each, [whole, size, steps]
    return None, []


def read_batch(d: Draft) -> None:
    """Find the sequences of a step and of a microbatch, from whatever determines them.

    Sequences of a step are replicas * microbatches * sequences of a microbatch; torchtitan counts
    those of a replica between two accumulations, which its pipeline divides again.
    """
    dp, length = d.values.get("parallelism.dp", 1), sequence_of(d)
    for key in ("global_batch", "microbatch_size"):
        d.of_key(f"parallelism.{key}")  # two that disagree are an error
    whole = _sequences(d, length, "num_tokens_per_train_step", "global_batch_size",
                       "train_batch_size", "gbs", "global_train_batch_size")  # fmt: skip
    size = _sequences(d, length, "num_tokens_per_microbatch_per_dp_rank", "micro_batch_size",
                      "train_micro_batch_size_per_gpu", "mbs", "per_device_train_batch_size",
                      "device_train_microbatch_size", "ppo_micro_batch_size_per_gpu")  # fmt: skip
    if whole is None:  # of slime: answers to prompts, over a number of steps
        answers = [d.size(name) for name in ("rollout_batch_size", "n_samples_per_prompt",
                                             "num_steps_per_rollout")]  # fmt: skip
        if answers[0] is not None and answers[2] is not None:
            n = answers[0].value * (answers[1].value if answers[1] else 1)
            whole = replace(answers[0], value=max(1, n // answers[2].value))
    local = _sequences(d, length, "", "local_batch_size", "training.batch_size")
    steps = d.size("gradient_accumulation_steps", "accumulate_grad_batches", "gas",
                    "batch_accumulation_per_replica", "num_microbatches")  # fmt: skip
    if d.source.format == "torchtitan":
        steps, local = None, local or size
        parts, each = d.size("pipeline_parallel_microbatch_size"), d.size("num_pp_microbatches")
        size = local
        if _pp(d) > 1 and local is not None:
            n = parts.value if parts else local.value // max(1, each.value if each else 1)
            size = replace(parts or local, value=max(1, n))
        if whole is None and local is not None:
            d.give("parallelism.global_batch", local.value * dp, local)
    elif local is not None and size is None:
        size = local
    if whole is not None and steps is not None and size is None:
        each_step = dp * steps.value
        if whole.value % each_step:
            raise PrismError(
                f"{d.source.place(whole.line)}: {whole.shown}: expected a multiple of "
                f"{format_count(dp, 'replica')} * {steps.shown} = {each_step}; correct one, or "
                "give another number of --gpus"
            )
        d.give("parallelism.microbatch_size", whole.value // each_step, whole, steps)
    elif size is not None:
        d.give("parallelism.microbatch_size", size.value, size)
    each = d.values.get("parallelism.microbatch_size", 1)
    if whole is not None:
        d.give("parallelism.global_batch", whole.value, whole)
        if size is not None and steps is not None and steps.value > 1:
            product = dp * steps.value * each
            if product != whole.value and "parallelism.global_batch" not in d.over:
                raise PrismError(
                    f"{d.source.place(whole.line)}: {whole.shown}: but {steps.shown} and "
                    f"{size.shown} make {product} of {format_count(dp, 'replica')}; correct one, "
                    "or give another number of --gpus"
                )
    elif steps is not None and steps.value > 0 and (size is not None or steps.value > 1):
        d.give("parallelism.global_batch", steps.value * each * dp, steps, size)
    if "parallelism.global_batch" not in d.values:
        n = 4 * _pp(d) if _pp(d) > 1 else 1
        why = f"not in the file: {n} microbatch{'es' * (n > 1)} of each replica; give it: --set "
        d.assume("parallelism.global_batch", n * each * dp, why + "parallelism.global_batch=N")
    d.leave(d.find("rampup_batch_size"), "smaller batches at the beginning; write run.batch_ramp")


def _sequences(d: Draft, length: Any, tokens: str, *names: str) -> Setting | None:
    """Give the number of sequences that names say, or of tokens over a sequence's."""
    found = d.size(*names)
    if found is not None and found.value > 0:
        return found
    counted = d.size(tokens) if tokens else None
    if counted is None or counted.value < 1 or type(length) is not int:
        return None
    return replace(counted, value=max(1, counted.value // length))


def _pp(d: Draft) -> int:
    return int(d.values.get("parallelism.pp", 1))


def read_pipeline(d: Draft) -> None:
    """Find chunks, schedule, transfers and which layers are where."""
    pp, layers = _pp(d), n_layers(d)
    if pp == 1:
        for key in ("vpp", "schedule", "p2p", "layer_split"):
            d.use_key(f"parallelism.{key}")
        return
    chunks = d.count("vpp", "vpp_size", "virtual_pipeline_model_parallel_size",
                     "virtual_pipeline_parallel_size",
                     "num_virtual_stages_per_pipeline_rank")  # fmt: skip
    per_chunk = d.count(
        "num_layers_per_virtual_pipeline_stage", "pipeline_parallel_layers_per_stage"
    )
    if chunks is not None and chunks.value != 1:
        d.give("parallelism.vpp", chunks.value, chunks)
    elif per_chunk is not None and per_chunk.value > 0 and layers:
        n = max(1, round(layers / pp / per_chunk.value))
        if n > 1:
            d.give("parallelism.vpp", n, per_chunk)
    schedule = d.of_key("parallelism.schedule")
    if schedule is not None:
        choices = get_args(ParallelismBlock.model_fields["schedule"].annotation)
        name = d.choice("schedule", schedule.value, choices) or "1f1b"
        d.give("parallelism.schedule", name, schedule)
        if name == "interleaved" and "parallelism.vpp" not in d.values:
            d.assume("parallelism.vpp", 2, "torchtitan's default with an interleaved schedule")
    _read_split(d, pp, layers)
    transfers = d.find("overlap_p2p_comm", "overlap_p2p_communication")
    if schedule is None and d.source.format in MEGATRON:
        if d.values.get("parallelism.vpp", 1) == 1:
            d.assume("parallelism.p2p", "blocking", "Megatron's transfers of 1F1B")
        elif transfers is not None and transfers.value in (False, 0):
            d.leave(transfers, "blocking transfers of the interleaved schedule")


def _read_split(d: Draft, pp: int, layers: int) -> None:
    layout = d.find("pipeline_model_parallel_layout")
    if layout is not None and isinstance(layout.value, str):
        split = layers_of_layout(layout.value)
        if len(split) % pp == 0:
            d.give("parallelism.layer_split", split, layout)
            if len(split) > pp:
                d.give("parallelism.vpp", len(split) // pp, layout)
        return
    first = d.count("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
    last = d.count("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
    ends = [s.value if s else None for s in (first, last)]
    vpp = d.values.get("parallelism.vpp", 1)
    if any(ends) and layers and vpp == 1:
        n = sum(end is None for end in ends) + pp - 2
        rest = (layers - sum(filter(None, ends))) // max(n, 1)
        split = [ends[0] or rest, *[rest] * (pp - 2), ends[1] or rest]
        d.give("parallelism.layer_split", split, first, last)


def layers_of_layout(text: str) -> list[int]:
    """Count the layers of each chunk in Megatron's ``Et|(tt|)*30mL``."""

    def repeated(match: re.Match[str]) -> str:
        return match[1] * min(int(match[2]), 1_000)

    text = re.sub(r"\(([^()]*)\)\*(\d+)", repeated, text.replace(" ", ""))
    text = re.sub(r"(\w)\*(\d+)", repeated, text)
    return [chunk.count("t") for chunk in text.split("|")]


def read_sharding(d: Draft) -> None:
    """Find how replicas share gradients and parameters, and what overlaps."""
    if d.values.get("parallelism.dp", 1) == 1:
        d.use_key("parallelism.data_parallel", "parallelism.overlap")
    key, dp = "parallelism.data_parallel", d.values.get("parallelism.dp", 1)
    choices = ("ddp", "zero1", "fsdp", "hsdp")
    if d.source.format == "torchtitan":
        _read_titan(d, key)
    elif dp > 1:
        full = next((s for name in _FSDP if d.is_set(name) and (s := d.find(name))), None)
        d.use("fsdp_sharding_strategy", "data_parallel_sharding_strategy")
        named = d.find("distributed_type", "dist_config.name", "train_backend")
        if full is None and named is not None and "fsdp" in str(named.value).lower():
            full = named
        strategy = d.find("data_parallel_sharding_strategy", "fsdp_sharding_strategy",
                          "sharding_strategy") if full else None  # fmt: skip
        stage = d.find("zero_optimization.stage", "zero_stage", "zero_optimization_stage")
        shards = d.find("use_distributed_optimizer", "optim.name", "optimizer", "strategy")
        if stage is not None and (type(stage.value) is not int or not 0 <= stage.value <= 3):
            d.refuse(stage, "expected stage 0, 1, 2 or 3 of ZeRO")
        chosen = strategy or full or stage or shards
        word = chosen.value if chosen else None
        if chosen is not None and chosen is full:
            word = "fsdp"
        if word is True or (chosen is shards and d.choice("data_parallel", word, choices) is None):
            word = "zero1" if word is True else None
        value = d.choice("data_parallel", word, choices) if word is not None else None
        if value is not None:
            d.give(key, value, chosen)
            if str(word) in _SHARES:
                d.assume(key, value, f"nearest to {word}: {_SHARES[str(word)]}", chosen)
        elif d.source.format == "bridge":
            d.assume(key, "zero1", "as Megatron Bridge's recipes have")
        elif d.source.format == "huggingface":
            why = "the file is of the model alone; --set parallelism.data_parallel=zero1"
            d.assume(key, "fsdp", why)
        elif d.find("actor_num_nodes") is not None:
            d.assume(key, "zero1", "slime sets Megatron's distributed optimizer")
        else:
            d.assume(key, "ddp", "no sharding is set")
    gather = d.find("overlap_param_gather", "overlap_param_sync")
    if d.source.format not in ("torchtitan", "huggingface") and dp > 1:
        found = d.find("overlap_grad_reduce", "overlap_grad_sync", "overlap_comm")
        if found is not None:
            d.give("parallelism.overlap", found.value not in (False, 0), found)
            if gather is not None and (gather.value in OFF) != (found.value in OFF):
                d.leave(gather, "overlap of parameters and gradients go together")
        elif gather is not None and gather.value not in OFF:
            d.leave(gather, "overlap of parameters and gradients go together")
        elif d.values.get(key) in ("ddp", "zero1") and d.source.format in ("megatron", "nemo"):
            d.assume("parallelism.overlap", False, "Megatron's default: no --overlap-grad-reduce")


def _read_titan(d: Draft, key: str) -> None:
    dp = d.values.get("parallelism.dp", 1)
    copies, shard = d.count("data_parallel_replicate_degree"), d.count("data_parallel_shard_degree")
    n = copies.value if copies and copies.value > 0 else 1
    if dp == 1:
        return
    if n > 1 and shard is not None and shard.value == 1:
        d.give(key, "ddp", copies, shard)
    elif n > 1:
        d.give(key, "hsdp", copies, shard)
        d.give("parallelism.shard_size", dp // n, copies, shard)
    elif shard is not None:
        d.give(key, "fsdp", shard)
    else:
        d.assume(key, "fsdp", "torchtitan's default")
    again = d.find("fsdp_reshard_after_forward")
    if again is not None and again.value in ("always", "never"):
        d.give("parallelism.reshard_after_forward", again.value == "always", again)
