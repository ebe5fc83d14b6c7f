"""Torch, which is an extra: found, or asked for with the line that installs it.

It is handed on as a value without type, so that everything but what runs kernels can be imported,
checked and tested where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import Any

from prism.common.errors import PrismError

INSTALL = "pip install 'torch>=2.5'"
DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Number formats by their torch names, and how many bytes one number takes [byte]."""


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
