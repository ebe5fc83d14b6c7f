"""Energy and carbon of a result's runs, as JSON has them."""

from typing import TYPE_CHECKING, Any

import numpy as np

from prism.simulation.results import read_group

if TYPE_CHECKING:
    import xarray as xr

JOULES_PER_MWH = 3.6e9


def energy_figures(dataset: "xr.Dataset") -> dict[str, Any]:
    """Give `energy` and `carbon`, as far as the result has them."""
    if "gpu_energy" not in dataset:
        return {}
    gpus = np.asarray(dataset.gpu_energy, np.float64) / JOULES_PER_MWH
    energy = {
        "gpu_power_w": float(dataset.gpu_power), "gpu_mwh_mean": float(gpus.mean()),
        "gpu_mwh_p50": float(np.quantile(gpus, 0.5)), "gpu_mwh_p95": float(np.quantile(gpus, 0.95)),
    }  # fmt: skip
    if "host_energy" in dataset:
        beside = np.asarray(dataset.host_energy, np.float64) / JOULES_PER_MWH
        energy["machines_mwh_p50"] = float(np.quantile(gpus + beside, 0.5))
        energy["beside_gpus_share"] = float(beside.mean() / (gpus + beside).mean())
    if "carbon" not in dataset:
        return {"energy": energy}
    tonnes, grid = np.asarray(dataset.carbon, np.float64) / 1000.0, read_group(dataset, "grid")
    shares = {"p5": 0.05, "p50": 0.5, "p95": 0.95}
    return {"energy": energy, "carbon": {
        "operational_t": {name: float(np.quantile(tonnes, q)) for name, q in shares.items()},
        "embodied_t": float(np.quantile(dataset.carbon_embodied, 0.5)) / 1000.0,
        "intensity_g_per_kwh": grid["g_per_kwh"], "pue": grid["pue"],
    }}  # fmt: skip
