"""One record for each GPU a job can name: figures of data sheets, and what is known of it alone."""

from dataclasses import dataclass
from typing import Any

from prism.common.errors import PrismError

HOP_S = 3.4e-6  # of NVLink: a ring's step with the protocol Simple, NCCL 2.27, src/graph/tuning.cc


@dataclass(frozen=True)
class Device:
    """A GPU: dense figures of its maker's data sheet; joules are in `prism.cluster.power`."""

    name: str
    bf16_flop_per_s: float  # dense; of V100 float16
    memory_bytes_per_s: float
    memory_bytes: float
    nvlink_bytes_per_s: float  # one direction; data sheets give both
    network_bytes_per_s: float  # one direction
    nvlink_latency_s: float  # one hop of a small message
    power_w: float  # thermal design power
    fp8_flop_per_s: float = 0.0  # 0: no such arithmetic
    fp4_flop_per_s: float = 0.0
    has_library: bool = True  # NAME-healthy is shipped
    host_gpus: int = 8
    rack_gpus: int = 0  # joined by NVLink beyond a host; 0: none
    te_attention: str = "cudnn"  # Transformer Engine's: cuDNN from Hopper on, flash-attn's before
    flash_attention: str = "fa2"  # of frameworks that take PyTorch's
    one_order: bool = False  # fp8 products need operands with the summed dimension last, so that
    # an operand of two products is stored transposed beside (NVIDIA, Transformer Engine)
    casts_inside: bool = False  # its fp8 products were measured with quantizing both operands
    boost_mhz: float = 1965.0  # B200's where no data sheet says
    cap_mhz: float = 0.0  # of products at the TDP; 0: H100's share of the boost clock
    host_w: float = 350.0  # of its share of a host, beside the GPU, under load; H100's
    embodied_kg: float = 164.0  # CO2e of its making; H100's where nobody says
    like: str = ""  # whose chip it has, at another limit
    table_speed: float = 1.0  # of its products' tables over that one's

    def flop_per_s(self, precision: str) -> float:
        """Peak of a precision of `parallelism.precision`; 0 where the device has none."""
        formats = {"bf16": self.bf16_flop_per_s, "nvfp4": self.fp4_flop_per_s}
        if not self.fp4_flop_per_s:
            formats["mxfp8"] = 0.0  # scales by 32 numbers came with Blackwell's 4 bits
        return formats.get(precision, self.fp8_flop_per_s)


# Rates: NVIDIA data sheets of V100, A100, H100, H200; B200, B300, GB200 and GB300 as collected by
# G. Lockwood from NVIDIA's Blackwell architecture briefs; AMD's data sheet of MI300X. Networks:
# 400 Gbit/s per GPU (DGX H100, Llama 3, arXiv:2407.21783), 800 Gbit/s with B300 and GB300
# (ConnectX-8), 200 Gbit/s with A100, 4 x 100 Gbit/s for 8 GPUs in DGX-1 V100. NVL72: 18 trays of 4
# GPUs. Clocks: data sheets; 392 V100 under products (arXiv:2208.11035). Tables of products over
# B200's: 27 shapes of GB200. Hosts: 8.4 kW of a node of 8 H100 at 700 W (arXiv:2412.08602). Making:
# NVIDIA's product carbon footprints, HGX H100 1,312 kg; B200 by its .50 g per exaflop against .66
# and 2.3 times the rate; A100 150 kg (arXiv:2211.02001).
_NVL72: dict[str, Any] = {
    "host_gpus": 4,
    "rack_gpus": 72,
    "like": "b200",
    "table_speed": 1.056,
    "embodied_kg": 286.0,
}
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("v100", 125e12, 0.90e12, 32e9, 150e9, 6.25e9, HOP_S, 300.0, has_library=False,
               te_attention="efficient", flash_attention="efficient", boost_mhz=1530.0,
               cap_mhz=1365.0),
        Device("a100", 312e12, 2.04e12, 80e9, 300e9, 25e9, HOP_S, 400.0,
               te_attention="fa2", embodied_kg=150.0),
        Device("h100", 989e12, 3.35e12, 80e9, 450e9, 50e9, HOP_S, 700.0, 1979e12, one_order=True),
        Device("h200", 989e12, 4.80e12, 141e9, 450e9, 50e9, HOP_S, 700.0, 1979e12, one_order=True),
        Device("b200", 2250e12, 8.0e12, 180e9, 900e9, 50e9, HOP_S, 1000.0, 4500e12, 9e15,
               embodied_kg=286.0),
        Device("b300", 2250e12, 8.0e12, 270e9, 900e9, 100e9, HOP_S, 1100.0, 4500e12, 13.5e15,
               like="b200", embodied_kg=286.0),
        Device("gb200", 2500e12, 8.0e12, 186e9, 900e9, 50e9, HOP_S, 1200.0, 5000e12, 10e15,
               **_NVL72),
        Device("gb300", 2500e12, 8.0e12, 278e9, 900e9, 100e9, HOP_S, 1400.0, 5000e12, 15e15,
               **_NVL72),
        Device("mi300x", 1307e12, 5.3e12, 192e9, 448e9, 50e9, HOP_S, 750.0, 2615e12,
               te_attention="fa2", casts_inside=True, boost_mhz=2100.0),
    )
}  # fmt: skip
LIBRARIES = {name: f"{name}-healthy" for name, device in DEVICES.items() if device.has_library}
"""Shipped library by device; the others must name one (`prism.jobs.jobspec.check`)."""


def device_key(name: str) -> str:
    """Name by which a job gives a device, from its product name; empty for one it cannot name.

    Examples
    --------
    >>> device_key("NVIDIA H100 80GB HBM3"), device_key("CPU AMD EPYC")
    ('h100', '')
    """
    longest_first = sorted(DEVICES, key=len, reverse=True)  # gb200 is no b200
    return next((key for key in longest_first if key in name.lower()), "")


def find_device(name: str) -> Device:
    """Return a device by its name, or raise PrismError with the known ones."""
    device = DEVICES.get(name)
    if device is None:
        raise PrismError(f"cluster: unknown device {name!r}; expected one of {', '.join(DEVICES)}")
    return device
