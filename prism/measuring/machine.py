"""The machine at hand: torch and its device, what it is, and its state while it is measured.

Names of processor and GPU, versions, then clocks, temperature, power and load wherever the system
tells them; what it does not tell is left out, never guessed. GPU readings come from nvidia-smi,
which any machine with NVIDIA's driver has. Torch is an extra and is handed on as a value without
type, so that all but what runs kernels can be imported, checked and tested without it.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from prism.common.errors import PrismError

INSTALL = "pip install 'torch>=2.5'"
DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Number formats by their torch names, and how many bytes one number takes [byte]."""

_SMI = {
    "sm_clock_hz": ("clocks.sm", 1e6),
    "memory_clock_hz": ("clocks.mem", 1e6),
    "temperature_c": ("temperature.gpu", 1.0),
    "power_w": ("power.draw", 1.0),
    "throttle": ("clocks_throttle_reasons.active", 0.0),
}
"""Reading: field of nvidia-smi and its unit in SI; 0 where it is no number."""


def load_torch() -> Any:
    """Return the torch module."""
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise PrismError(f"prism measure: torch is not installed; {INSTALL}") from None
    except (ImportError, OSError) as error:  # a wheel for another CUDA or glibc
        raise PrismError(
            f"prism measure: torch is installed but does not load ({error}); {INSTALL}"
        ) from None


def choose_device(name: str | None) -> str:
    """Return ``cpu`` or ``cuda``: what was asked for, else the GPU where there is one."""
    torch = load_torch()
    found = bool(torch.cuda.is_available())
    if name == "cuda" and not found:
        raise PrismError(
            "--device cuda: torch sees no GPU here; expected one, or a torch built for it; "
            "--device cpu measures the processor"
        )
    return name or ("cuda" if found else "cpu")


def describe_machine(device: str) -> dict[str, Any]:
    """Say what is measured on: device, processor, cores, system, versions."""
    torch = load_torch()
    about: dict[str, Any] = {
        "device": f"CPU {processor_name()}",
        "device_kind": device,
        "cpu": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    if device == "cuda":
        about |= {
            "device": str(torch.cuda.get_device_name()),
            "gpus": int(torch.cuda.device_count()),
            "cuda": str(torch.version.cuda),
            "driver": _smi("driver_version"),
        }
    return about


def processor_name() -> str:
    """Name of the processor, as the system gives it."""
    for line in _lines("/proc/cpuinfo"):
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def read_state(device: str) -> dict[str, Any]:
    """Clocks, temperature, power and load now; only what the system tells."""
    state: dict[str, Any] = {"time": time.time(), "load_average": os.getloadavg()[0]}
    clocks = [
        float(line.partition(":")[2]) * 1e6
        for line in _lines("/proc/cpuinfo")
        if line.startswith("cpu MHz")
    ]
    if clocks:
        state["cpu_clock_hz"] = sum(clocks) / len(clocks)
    zones = [_number(path) for path in Path("/sys/class/thermal").glob("thermal_zone*/temp")]
    known = [zone for zone in zones if zone is not None]
    if known:
        state["cpu_temperature_c"] = max(known) / 1000.0
    if device == "cuda":
        state |= _gpu_state()
    return state


def _gpu_state() -> dict[str, Any]:
    """Read the GPU that torch uses."""
    values = _smi(",".join(field for field, _ in _SMI.values())).split(", ")
    state: dict[str, Any] = {}
    for (name, (_, unit)), text in zip(_SMI.items(), values, strict=False):
        if unit == 0.0:
            state[name] = text
            continue
        try:
            state[name] = float(text) * unit
        except ValueError:
            continue  # "[N/A]": this GPU does not tell
    return state


def _smi(fields: str) -> str:
    """Ask nvidia-smi; empty where it is not there or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-i", _index()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _index() -> str:
    """Name the current GPU as nvidia-smi does, whatever CUDA_VISIBLE_DEVICES hides from torch."""
    current = int(load_torch().cuda.current_device())
    visible = [x for x in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if x]
    return visible[current] if current < len(visible) else str(current)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None
