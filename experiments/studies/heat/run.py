"""Hot and cool GPUs of a node: what their place and an uneven split bring, beside published signs.

    python experiments/studies/heat/run.py

CharLLM-PPT (arXiv:2509.10371, figures second hand): 32 H200 in air-cooled nodes of eight, GPUs in
the exhaust up to 27 % hotter, their clocks down to 1.7 from 1.98 GHz. Layouts are those of its
repository (sitar-lab/CharLLM-PPT): 128 sequences a step, tp 4, full recomputation. Half nodes, a tp
group each, are nodes here; as mixed, every tp group has a hot GPU.
"""

import itertools
from typing import Any

import prism

JOB = {
    "parallelism": {"tp": 4, "pp": 4, "dp": 2, "data_parallel": "zero1", "global_batch": 128,
                    "microbatch_size": 4, "recompute": "full"},
    "cluster": {"nodes": 8, "gpus_per_node": 4, "nvlink_domain_gpus": 8, "device": "h200"},
    "variability": {"library": "none"},
}  # fmt: skip
LAYOUTS = {"llama3-70b": (4, 2, 20), "gpt3-175b": (8, 1, 12)}  # pp, dp, layers of a stage
COOL, HOT = [0, 2, 4, 6], [1, 3, 5, 7]
# of a GPU at 76 C, over one at 60 (cluster.gpu_temperatures)
SLOWDOWNS = {1.018: "16 K", 1.04: "between", (1.98 / 1.7) ** 0.95: "1.7 of 1.98 GHz"}
LINKS = {12.5: "100 Gbit/s a GPU", 12.5 / 8: "100 Gbit/s a node"}


def step(model: str, **blocks: dict[str, Any]) -> float:
    """Mean step of a job [s], with some keys changed."""
    job = {"model": {"name": model}} | {k: v | blocks.get(k, {}) for k, v in JOB.items()}
    found = prism.summary(prism.estimate(prism.load_job(job), replicates=64, seed=1))
    return float(found["step_time"]["mean"])


def placed(model: str, slow: float, link: float) -> tuple[float, float, float, float]:
    """Gains in speed over mixed tp groups: cool GPUs first, then with a layer moved, and apart.

    Last, of the move where cool GPUs have the last stages.
    """
    pp, dp, layers = LAYOUTS[model]
    layout = {"pp": pp, "dp": dp}
    links = {"links": {"network": {"bandwidth_gbytes_per_s": link}}}
    hot = links | {"node_slowdowns": dict.fromkeys(HOT, slow), "hosts": COOL + HOT}
    split = [layers + 1] * (pp // 2) + [layers - 1] * (pp // 2)
    every = links | {"node_slowdowns": dict.fromkeys(range(8), slow)}
    mixed = step(model, parallelism=layout, cluster=every)
    cool = step(model, parallelism=layout, cluster=hot)
    uneven = step(model, parallelism=layout | {"layer_split": split}, cluster=hot)
    last = hot | {"hosts": HOT + COOL}
    ends = step(model, parallelism=layout, cluster=last)
    moved = step(model, parallelism=layout | {"layer_split": split[::-1]}, cluster=last)
    return mixed / cool - 1.0, mixed / uneven - 1.0, cool / uneven - 1.0, ends / moved - 1.0


def main() -> None:
    """Print all tables."""
    print("| network | slowdown | model | cool first | and uneven | of the split | cool last |")
    print("|---|---|---|---|---|---|---|")
    for (link, text), (slow, why) in itertools.product(LINKS.items(), SLOWDOWNS.items()):
        for model in LAYOUTS:
            gains = " | ".join(f"{x:+.1%}" for x in placed(model, slow, link))
            print(f"| {text} | {slow:.3f} ({why}) | {model} | {gains} |")
    fsdp = {"tp": 8, "pp": 1, "dp": 4, "data_parallel": "fsdp", "framework": "megatron"}
    node = {"gpus_per_node": 8, "links": {"network": {"bandwidth_gbytes_per_s": 12.5 / 8}}}
    one, four = (
        step("gpt3-175b", parallelism=fsdp | {"microbatch_size": m}, cluster=node | {"nodes": 4})
        for m in (1, 4)
    )
    print(f"\nMicrobatches of 4 over 1, TP8-FSDP: {one / four:.2f} times as fast")
    deep = {"tp": 2, "pp": 16, "microbatch_size": 1}
    fewer, more = (
        step("gpt3-175b", parallelism=deep | {"dp": n // 4},
             cluster=node | {"nodes": n, "device": device})
        for n, device in ((4, "h200"), (8, "h100"))
    )  # fmt: skip
    print(f"32 H200 over 64 H100, TP2-PP16: {more / fewer:.2f} of the tokens/s, "
          f"{2.0 * more / fewer:.2f} of those of a GPU")  # fmt: skip
    for n, device in ((4, "h200"), (8, "h100")):
        for sharing, size in (("zero1", 1), ("ddp", 1), ("zero1", 4)):
            keys = {"dp": n // 4, "data_parallel": sharing, "microbatch_size": size}
            job = JOB | {
                "model": {"name": "gpt3-175b"},
                "parallelism": JOB["parallelism"] | deep | keys,
                "cluster": JOB["cluster"] | node | {"nodes": n, "device": device},
            }
            found = prism.memory(prism.load_job(job))
            print(f"{8 * n} {device}, {sharing}, microbatches of {size}: {found['gib']:.0f} GiB, "
                  f"P(fits) {found['p_fits']:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
