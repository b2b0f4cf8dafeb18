r"""Devices: what the data sheet says, what of it is reached, and the power drawn.

Where each number comes from (D data sheet, M measured by this project, A assumption):

- ``a100-80`` (A100 SXM 80 GB), ``h100`` (H100 SXM 80 GB), ``h200`` (H200 SXM): peaks without sparsity, bandwidth,
  memory and power limit D. Efficiencies (0.6 of the peak in the layers, 0.3 in attention, 0.8 of the bandwidth) and
  2 ms of host work per iteration A, in the usual range of serving engines, the same for all three.
- ``cpu2`` (2 cores of an AMD EPYC, bfloat16, this project's engine with its C++ kernels): the six numbers of ``_CPU2``
  M, overlap 0, in attention 1. They are a fit (:mod:`sim.device_fit`), so the bandwidth is what layers and attention
  reach, not the memory's; but the overhead, which the fit cannot tell from reading the weights, is what the engine's
  Python takes with its pass left out. To repeat it: ``entropic bench steps --out DIR``, then ``entropic calibrate
  DIR/*.jsonl --out cost.json --device cpu.json``, which prints them.
- ``cpu`` (any CPU, sized by ``cores`` and ``bandwidth``): the rates M of ``cpu2`` per core, the bandwidth at most
  200 GB/s (A), the same overhead; set ``bandwidth`` to what your machine reaches, or fit a device file as above.

Power is A throughout, but for the limits: an active but idle accelerator draws ``idle_w``; arithmetic at the reached
peak adds ``compute_w`` (dense matrix products run into the power limit); memory at the reached bandwidth adds
``memory_w``, half of that (decoding draws clearly less than prefill: Patel et al., "Splitwise", 2024, report the
same direction). For a CPU they are a share of the socket, 5 W per core, and the overhead is work (``overhead_w``).
The energy of the host beside an accelerator, of cooling and of the network is not counted.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entropic_ctl import fields
from entropic_ctl.errors import BadInputError

__all__ = ["DEVICES", "DeviceSpec", "cpu", "device_spec", "resized"]


@dataclass(frozen=True)
class DeviceSpec:
    """A device and what of its data sheet is reached (see the module for each number's source).

    A peak of 0 says that the device has no such arithmetic, or that nobody knows its speed. A power limit of 0 says
    that energy is not modelled.
    """

    name: str
    peak_flops: float = fields.number(1e12, 0.0, 1e18, "arithmetic peak in 16 bits, FLOP/s", open_lo=True)
    bandwidth: float = fields.number(1e11, 0.0, 1e15, "memory bandwidth, bytes/s", open_lo=True)
    memory_bytes: float = fields.number(8e9, 0.0, 1e15, "memory, bytes", open_lo=True)
    matmul_efficiency: float = fields.number(1.0, 0.0, 1.0, "share of the peak in the layers", open_lo=True)
    attention_efficiency: float = fields.number(1.0, 0.0, 1.0, "share of the peak in attention", open_lo=True)
    bandwidth_efficiency: float = fields.number(1.0, 0.0, 1.0, "share of the bandwidth", open_lo=True)
    overlap: float = fields.number(1.0, 0.0, 1.0, "o: 1 hides the smaller of arithmetic and traffic, 0 adds them")
    attention_overlap: float = fields.number(1.0, 0.0, 1.0, "the same in attention")
    overhead_s: float = fields.number(0.0, 0.0, 60.0, "seconds per iteration, whatever it does")
    pruning_step_s: float = fields.number(0.0, 0.0, 60.0, "more seconds per iteration that prunes, beyond the roofline")
    pruning_token_s: float = fields.number(0.0, 0.0, 1.0, "and per token that it scores, beyond the roofline")
    peak_flops_8: float = fields.number(0.0, 0.0, 1e18, "peak in 8 bits (fp8, else int8), FLOP/s")
    peak_flops_32: float = fields.number(0.0, 0.0, 1e18, "peak in 32 bits (TF32 not counted), FLOP/s")
    idle_w: float = fields.number(0.0, 0.0, 1e5, "watts whatever it does")
    compute_w: float = fields.number(0.0, 0.0, 1e5, "more watts while arithmetic runs at the reached peak")
    memory_w: float = fields.number(0.0, 0.0, 1e5, "more watts while memory runs at the reached bandwidth")
    overhead_w: float = fields.number(0.0, 0.0, 1e5, "more watts during overhead and the extra seconds of pruning")
    limit_w: float = fields.number(0.0, 0.0, 1e5, "power limit; 0: energy is not modelled")

    def __post_init__(self) -> None:
        fields.check(self)
        if self.limit_w and self.idle_w > self.limit_w:
            raise BadInputError(
                "more than the power limit", field="idle_w", value=self.idle_w, allowed=f"at most {self.limit_w:g}"
            )

    def peak(self, bits: int) -> float:
        """Return the arithmetic peak in 8, 16 or 32 bits, FLOP/s.

        Raises
        ------
        BadInputError
            If the device has none, or nobody knows it.
        """
        peaks = {8: self.peak_flops_8, 16: self.peak_flops, 32: self.peak_flops_32}
        if not peaks.get(bits):
            raise BadInputError(
                f"no {bits}-bit arithmetic is known for {self.name}",
                where="cost",
                field="cost.compute_bits",
                value=bits,
                allowed=", ".join(str(b) for b, flops in peaks.items() if flops),
                remedy="choose another width, or describe the device in a JSON file",
            )
        return peaks[bits]


_REACHED = {"matmul_efficiency": 0.6, "attention_efficiency": 0.3, "bandwidth_efficiency": 0.8, "overhead_s": 0.002}
_HOPPER = {"peak_flops": 989.4e12, "peak_flops_8": 1978.9e12, "peak_flops_32": 66.9e12, "idle_w": 100.0}
_HOPPER |= {"compute_w": 600.0, "memory_w": 300.0, "limit_w": 700.0}
_CPU2 = {
    "matmul_flops": 0.728e12,
    "attention_flops": 0.299e12,
    "bandwidth": 40.8e9,
    "overhead_s": 0.0005,
    "pruning_step_s": 0.0,
    "pruning_token_s": 1.69e-7,
}
_CPU_BANDWIDTH = 200e9


def cpu(cores: int, bandwidth: float = 0.0, name: str = "cpu") -> DeviceSpec:
    """Return a CPU; the overhead and pruning terms are those of ``cpu2``, the engine's own work on the host.

    Parameters
    ----------
    cores : int
    bandwidth : float
        Bytes/s; 0: that of ``cpu2`` per core, at most 200 GB/s.
    name : str
    """
    watts = float(cores)
    return DeviceSpec(
        name,
        peak_flops=_CPU2["matmul_flops"] * cores / 2,
        bandwidth=bandwidth or min(_CPU2["bandwidth"] * cores / 2, _CPU_BANDWIDTH),
        memory_bytes=4e9 * cores,
        attention_efficiency=_CPU2["attention_flops"] / _CPU2["matmul_flops"],
        overlap=0.0,
        overhead_s=_CPU2["overhead_s"],
        pruning_step_s=_CPU2["pruning_step_s"],
        pruning_token_s=_CPU2["pruning_token_s"],
        idle_w=1.5 * watts,
        compute_w=2.5 * watts,
        memory_w=1.0 * watts,
        overhead_w=2.5 * watts,
        limit_w=5.0 * watts,
    )


DEVICES = {
    "a100-80": DeviceSpec(
        "a100-80",
        312e12,
        2.039e12,
        80 * 2**30,
        peak_flops_8=624e12,
        peak_flops_32=19.5e12,
        idle_w=80.0,
        compute_w=320.0,
        memory_w=160.0,
        limit_w=400.0,
        **_REACHED,
    ),
    "h100": DeviceSpec("h100", bandwidth=3.35e12, memory_bytes=80 * 2**30, **_HOPPER, **_REACHED),
    "h200": DeviceSpec("h200", bandwidth=4.8e12, memory_bytes=141e9, **_HOPPER, **_REACHED),
    "cpu2": cpu(2, name="cpu2"),
    "cpu": cpu(1),
}
"""Devices by name; ``cpu`` stands for one core (:func:`cpu` sizes it)."""


def device_spec(name: str) -> DeviceSpec:
    """Return the device called ``name``, or the one a JSON file describes (an object of DeviceSpec fields).

    Raises
    ------
    BadInputError
        If it is neither, or the file has an unknown key or a value out of range.
    """
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    if not path.is_file():
        raise BadInputError(
            "no such device",
            where="cost",
            field="cost.device",
            value=name,
            allowed=f"{', '.join(DEVICES)}, or the path of a JSON file",
        )
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise BadInputError("not a readable JSON file", where=name, remedy="an object of DeviceSpec fields") from None
    if isinstance(values, dict):
        values = {"name": path.stem, **values}
        if not isinstance(values["name"], str):
            raise BadInputError("not a string", where=name, field="name", value=values["name"], allowed="a string")
        missing = [key for key in ("peak_flops", "bandwidth", "memory_bytes") if key not in values]
        if missing:
            raise BadInputError("a device needs it", where=name, field=missing[0], remedy="give its number")
    return fields.parse(DeviceSpec, values, where=name, table="")


def resized(device: DeviceSpec, cores: int = 0, **numbers: float) -> DeviceSpec:
    """Return ``device`` with other sizes; 0 keeps a value.

    Parameters
    ----------
    device : DeviceSpec
    cores : int
        Of the generic ``cpu``.
    **numbers : float
        ``bandwidth`` (bytes/s), ``matmul_efficiency``, ``attention_efficiency``, ``bandwidth_efficiency``.

    Raises
    ------
    BadInputError
        If ``cores`` is given for another device than ``cpu``.
    """
    if cores:
        if device.name != "cpu":
            raise BadInputError(
                f"{device.name} has a fixed number of cores",
                where="cost",
                field="cost.cores",
                value=cores,
                allowed="0, or device = 'cpu'",
            )
        device = cpu(cores)
    changes: dict[str, Any] = {name: value for name, value in numbers.items() if value}
    return dataclasses.replace(device, **changes)
