"""Carbon of Llama 3's pretraining: from the model card's own inputs, and from a job file.

    python experiments/validation/carbon/run.py

The card (meta-llama/llama3, MODEL_CARD.md) states GPU hours and tonnes of CO2e, 700 W for each
GPU, PUE inside; 424 g/kWh is what its figures imply. The job is the 70B model on 512 H100 with 15 T
tokens, whose power, hosts, switches and time are prism's.
"""

import prism
from prism.workload.carbon import Footprint

CARD = {"8B": (1.3e6, 390.0), "70B": (6.4e6, 1900.0)}  # GPU hours, t CO2e
WATTS, G_PER_KWH = 700.0, 424.0


def main() -> None:
    """Print both tables."""
    print("| model | GPU hours | card, t | from its inputs, t | off |\n|---|---|---|---|---|")
    for name, (hours, tonnes) in CARD.items():
        own = Footprint(0.0, 0.0, 1.0, G_PER_KWH).operational_kg(hours * 3600.0 * WATTS) / 1000.0
        print(f"| {name} | {hours:,.0f} | {tonnes:,.0f} | {own:,.0f} | {own / tonnes - 1.0:+.1%} |")
    run = {"tokens": 15e12, "grid_intensity": G_PER_KWH, "pue": 1.1}
    job = prism.load_job({"base": "llama3-70b-fsdp-512", "run": run})
    found = prism.summary(prism.estimate(job, replicates=2048, run_replicates=500, seed=1))
    hours = found["time_to_train"]["p50"] / 3600.0 * found["world_size"]
    energy, carbon = found["energy"], found["carbon"]
    print("\n| 70B | card | job |\n|---|---|---|")
    for what, card, own in (
        ("GPU hours", CARD["70B"][0], hours),
        ("W per GPU", WATTS, energy["gpu_power_w"]),
        ("W beside it", 0.0, energy["gpu_power_w"] * energy["beside_gpus_share"]
         / (1.0 - energy["beside_gpus_share"])),
        ("PUE", 1.0, carbon["pue"]),
        ("operational, t", CARD["70B"][1], carbon["operational_t"]["p50"]),
        ("made for it, t", 0.0, carbon["embodied_t"]),
    ):  # fmt: skip
        print(f"| {what} | {card:,.4g} | {own:,.4g} |")


if __name__ == "__main__":
    main()
