"""What would make a model fit where no layout does: tried one by one, with the memory it then takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from conf.schema import Offload, PrecisionName
from orchestra import hardware
from orchestra.errors import ConfigError
from orchestra.plan.cases.devices import device
from orchestra.plan.cases.frameworks import OWN
from orchestra.plan.layouts.search import peak_that_fits
from orchestra.plan.layouts.space import Fixed, Space

# More than this many times the nodes helps nobody.
_MOST_TIMES = 64
_SHORTEST_SEQUENCE = 512


@dataclass(frozen=True)
class Remedy:
    """An override after which something fits, the bytes that a layout then takes, and what it changes."""

    override: str
    peak_bytes: float
    why: str


def remedies(space: Space) -> list[Remedy]:
    """Return what helps, each on its own: fewer values kept, precision, devices, nodes, sequence length."""
    found = (_first(space, steps) for steps in _trials(space))
    return [remedy for remedy in found if remedy is not None]


Trial = tuple[str, Space, str]


def _trials(space: Space) -> Iterator[Iterator[Trial]]:
    yield _freed(space)
    yield _narrower(space)
    yield _offloaded(space)
    yield _larger_devices(space)
    yield _more_nodes(space)
    yield _shorter(space)


def _first(space: Space, steps: Iterator[Trial]) -> Remedy | None:
    """Return the first of a row of trials, each one further, after which something fits."""
    for override, changed, why in steps:
        peak = peak_that_fits(replace(changed, wide=space.wide))
        if peak is not None:
            return Remedy(override, peak, why)
    return None


def _freed(space: Space) -> Iterator[Trial]:
    if space.fixed != Fixed():
        yield "the values that were kept", replace(space, fixed=Fixed()), "where the search chooses them"


def _narrower(space: Space) -> Iterator[Trial]:
    wide = (PrecisionName.fp32, PrecisionName.bf16_fp32_grad, PrecisionName.fp8)
    if space.base.precision in wide:
        name = PrecisionName.bf16
        try:
            changed = device(space.base.device.name, name)
        except ConfigError:
            return
        base = replace(space.base, precision=name, device=changed)
        yield f"precision={name.value}", replace(space, base=base), "fewer bytes a number"


def _offloaded(space: Space) -> Iterator[Trial]:
    """What orchestra's trainer can keep in host memory."""
    base, key = space.base, "parallelism.offload"
    if base.framework.name != OWN or not base.choices.is_gpu or base.choices.offload is not Offload.none:
        return
    for offload, fixed in ((Offload.optimizer, space.fixed), (Offload.all, replace(space.fixed, zero=3))):
        choices = replace(base.choices, offload=offload)
        changed = replace(space, base=replace(base, choices=choices), fixed=fixed)
        yield f"{key}={offload.value}", changed, "the optimizer's state in host memory"


def _larger_devices(space: Space) -> Iterator[Trial]:
    memory = space.base.device.memory_bytes
    if hardware.row(space.base.device.name) is hardware.UNKNOWN:
        # A CPU, or a device that a profile describes.
        return
    rows = [it for it in hardware.TABLE if it.memory_bytes is not None and it.memory_bytes > memory]
    for row in sorted(rows, key=lambda it: it.memory_bytes or 0):
        try:
            larger = device(row.name, space.base.precision)
        except ConfigError:
            continue
        override = f"cluster.hardware={row.name}"
        yield override, replace(space, base=replace(space.base, device=larger)), "more memory each"


def _more_nodes(space: Space) -> Iterator[Trial]:
    times = 2
    while times <= _MOST_TIMES:
        layout = space.base.layout
        base = replace(space.base, layout=replace(layout, dp=layout.dp * times))
        override = f"cluster.nodes={space.base.num_nodes * times}"
        yield override, replace(space, base=base), "shared out among more"
        times *= 2


def _shorter(space: Space) -> Iterator[Trial]:
    seq_len = space.base.seq_len
    while seq_len % 2 == 0 and seq_len // 2 >= _SHORTEST_SEQUENCE:
        seq_len //= 2
        yield f"train.seq_len={seq_len}", replace(space, base=replace(space.base, seq_len=seq_len)), "shorter"
