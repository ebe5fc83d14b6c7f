"""What a collective says of itself: its kind, message and group; and values of any JSON type.

NCCL's kernels carry arguments in newer profilers; else ``record_param_comms`` and the ``c10d::``
and ``nccl:`` ops around the launch tell kind and shapes. The kernel's name is the fallback: in some
versions all collectives run in one called SendRecv. Left out: split sizes of uneven all-to-alls.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from prism.common.arrays import Array
from prism.traces.kernelnames import collective_kind
from prism.traces.kineto.events import Args, Event, arguments, as_int

_ELEMENT_BYTES = {
    1: ("byte", "char", "bool", "unsigned char", "signed char", "uint8", "int8"),
    2: ("half", "bfloat16", "c10::half", "c10::bfloat16", "short", "short int"),
    4: ("float", "int", "int32"),
    8: ("double", "long", "long int", "int64", "c10::complex<float>"),
}
_BYTES_OF = {name: size for size, names in _ELEMENT_BYTES.items() for name in names}


def number(value: Any) -> float:
    """Float of a decoded value, not-a-number where it is none."""
    if type(value) is float:
        return value
    try:
        return math.nan if value is None else float(value)
    except (ValueError, OverflowError):
        return math.nan


def numbers(values: list[Any]) -> Array:
    """Floats of decoded values."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([number(value) for value in values])


def whole(value: Any, default: int = -1) -> int:
    """Whole number that fits a column, `default` where it is none."""
    if type(value) is int and -(1 << 62) < value < 1 << 62:
        return value
    found = as_int(value, -1, 1 << 62)
    return default if found is None else found


def raw_text(raw: msgspec.Raw) -> str:
    """JSON text of a value that was left undecoded, without the quotes of a string."""
    return bytes(raw).decode("utf-8", "replace").strip().strip('"')


def read_message(kernel: str, args: Args, around: tuple[Event, ...]) -> tuple[str, float, str]:
    """Read what a collective is from its kernel and the host ops around its launch."""
    infos = [args, *(arguments(event) for event in reversed(around))]
    texts = [str(info.collective) for info in infos if isinstance(info.collective, str)]
    texts += [str(e.name) for e in reversed(around)] + [kernel]
    kind = next((k for k in map(collective_kind, texts) if k and k != "transfer"), "")
    kind = kind or next((k for k in map(collective_kind, texts) if k), "transfer")
    n_bytes = next((b for b in map(_message_bytes, infos) if math.isfinite(b)), math.nan)
    ranks = next((t for t in (raw_text(info.group_ranks) for info in infos) if t), "")
    name = next((str(i.group_name) for i in infos if i.group_name is not None), "")
    return kind, n_bytes, ranks or name


def _message_bytes(args: Args) -> float:
    """Size of a collective's input [byte], not-a-number where the event does not tell."""
    element = _BYTES_OF.get(str(args.dtype).lower())
    if args.in_elements is not None and element:
        return number(args.in_elements) * element
    try:
        dims = msgspec.json.decode(bytes(args.input_dims))[0]
        element = _BYTES_OF.get(str(msgspec.json.decode(bytes(args.input_type))[0]).lower())
        return float(math.prod(float(d) for d in dims)) * element if dims and element else math.nan
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, OverflowError):
        return math.nan
