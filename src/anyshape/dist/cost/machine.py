"""Machine tables of the cost model: what a chip computes and moves in a second, and what joins chips and nodes.

    a100x8:800Gb      nodes of 8 A100; each node sends and receives 800 gigabits a second, all its chips together
    h100              nodes of as many chips as is usual, with the usual network

Peaks are of the makers' data sheets (dense, without sparsity). What part of a peak is reached is in `Efficiency`: for
H100 it is fitted to published training runs (docs/strategy.md names the rows and gives the errors).
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from anyshape.base.errors import ConfigError

GB = 1e9


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What part of its peaks a chip reaches.

    products, low: of the peak of products in 16 (or 32) bits, and in 8, for large ones. half: rows (and columns) of
    which a product reaches half of that. attention: of the 16-bit peak, fused attention. ring: the same for blocks of
    keys that other ranks have (smaller pieces, merged afterwards). memory: of the bytes a second. eager: how many times
    the traffic of fused pointwise operations eager PyTorch has. cast: bytes read and written for an element of a
    product's operand that is cast to 8 bits. busy: how much slower a computation is while a collective runs beside it.
    fabric, network: what collectives reach of the bytes a second inside a node and between nodes.
    """

    products: float = 0.72
    low: float = 0.6
    half: float = 96.0
    attention: float = 0.45
    ring: float = 0.3
    memory: float = 0.8
    eager: float = 2.5
    cast: float = 3.0
    busy: float = 0.03
    fabric: float = 0.75
    network: float = 0.8


@dataclass(frozen=True, slots=True)
class Chip:
    """One device. peaks: operations a second of products by dtype. memory: bytes. bandwidth: bytes a second of its
    memory. launch: seconds, the least that a kernel takes. fabric: bytes a second in one direction to the other chips
    of its node. per_node: chips of a usual node. network: bytes a second of a usual node, one direction."""

    name: str
    peaks: tuple[tuple[str, float], ...]
    memory: float
    bandwidth: float
    launch: float
    fabric: float
    per_node: int
    network: float
    efficiency: Efficiency = field(default_factory=Efficiency)
    alpha: float = 4e-6  # seconds that a message takes to begin inside a node
    alpha_network: float = 9e-6  # the same between nodes

    def peak(self, dtype: str) -> float:
        """Operations a second of products of a dtype; of one that is not in the table, those of f32."""
        found = dict(self.peaks)
        return found.get(dtype, found["f32"])


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """Nodes of `per_node` chips. network: bytes a second of a node, one direction."""

    chip: Chip
    per_node: int
    network: float

    def __str__(self) -> str:
        return f"{self.chip.name}x{self.per_node}:{self.network * 8 / GB:.0f}Gb"


def _chip(name: str, bf16: float, f32: float, low: float, memory: float, bandwidth: float, fabric: float,
          network: float, efficiency: Efficiency) -> Chip:
    peaks = (("bf16", bf16), ("f16", bf16), ("f32", f32), ("f64", f32 / 2), ("fp8", low))
    return Chip(name, peaks, memory, bandwidth, 4e-6, fabric, 8, network, efficiency)


# fitted to seven of torchtitan's rows (docs/benchmarks-strategies.md says which)
H100 = Efficiency(products=0.545, low=0.478, half=93.0, attention=0.237, ring=0.174, eager=2.395, cast=2.0, fabric=0.9)
CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in (
    _chip("v100", 125e12, 15.7e12, 125e12, 32 * GB, 900e9, 150e9, 12.5e9,
          Efficiency(products=0.62, attention=0.3, ring=0.25)),
    _chip("a100", 312e12, 156e12, 312e12, 80 * GB, 2039e9, 300e9, 200e9, Efficiency(products=0.74, attention=0.5)),
    _chip("h100", 989e12, 495e12, 1979e12, 80 * GB, 3350e9, 450e9, 400e9, H100),
    # Meta's Grand Teton: 96 GB of HBM2e, a limit of 500 W of 700
    _chip("h100hbm2e", 989e12, 495e12, 1979e12, 96 * GB, 2400e9, 450e9, 400e9, H100),
    _chip("h200", 989e12, 495e12, 1979e12, 141 * GB, 4800e9, 450e9, 400e9, H100),
    Chip("cpu", (("bf16", 1e11), ("f16", 5e10), ("f32", 1e11), ("f64", 5e10)), 16 * GB, 2e10, 2e-6, 4e9, 1, 2e9,
         Efficiency(products=0.8, attention=0.5, ring=0.5, half=16.0), 1e-4, 1e-4),
)}


def machine_of(text: str, chips: Mapping[str, Chip] = CHIPS) -> Machine:
    """A machine from its text form CHIP[xPER_NODE][:NETWORKGb]; the network is a node's, in gigabits a second.

    Raises:
        ConfigError: the text is no machine, or the chip is not in the table.
    """
    found = re.fullmatch(r"\s*(\w+?)(?:x(\d+))?(?::\s*([\d.]+)\s*Gb)?\s*", text)
    if found is None:
        raise ConfigError(f"{text!r} is no machine", why="its text form is CHIP[xCHIPS A NODE][:GIGABITS A SECOND Gb]",
                          do='write, for example, "a100x8:800Gb"')
    name, count, gigabits = found.groups()
    if name not in chips:
        raise ConfigError(f"there is no chip {name}", where=f"machine={text!r}",
                          why=f"the table has {', '.join(sorted(chips))}", do="take one of these")
    chip = chips[name]
    per_node = int(count) if count else chip.per_node
    network = float(gigabits) / 8 * GB if gigabits else chip.network * per_node / chip.per_node
    if per_node < 1 or network <= 0:
        raise ConfigError(f"{text!r} is no machine", why="a node has at least one chip, and a network",
                          do='write, for example, "a100x8:800Gb"')
    return Machine(chip, per_node, network)


def fitted(machine: Machine, **changes: float) -> Machine:
    """A machine of other efficiencies."""
    return replace(machine, chip=replace(machine.chip, efficiency=replace(machine.chip.efficiency, **changes)))
