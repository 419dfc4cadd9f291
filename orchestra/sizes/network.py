"""What was measured of a cluster's network, and where that is kept: a file per cluster, of the user's own.

Standard library only. It measures nothing and asks nobody; values that a configuration gives are never
replaced.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import NetworkConfig

_SCHEMA = 1
_FIGURES = (
    "intra_node_bytes_per_s",
    "inter_node_bytes_per_s",
    "intra_node_latency_s",
    "inter_node_latency_s",
)


# The file in the folder of one start of the ranks that rank 0 leaves its result in.
RESULT_NAME = "measurement.json"
# Where a link's ranks stand: on one node; on two; on all.
INSIDE, BETWEEN, EVERYWHERE = "inside", "between", "all nodes"
# Messages whose time is latency and no bandwidth.
_SMALL_BYTES = 1 << 10


@dataclass(frozen=True)
class Sample:
    """Median seconds of one message size: an all-reduce, and the way from one rank to another."""

    size_bytes: int
    all_reduce_s: float
    # None among more than two ranks.
    send_s: float | None


@dataclass(frozen=True)
class Link:
    """What was measured among ranks in groups of `num_ranks`, which all talk at the same time."""

    kind: str
    # In words: 1 pair, 4 pairs …
    what: str
    num_ranks: int
    samples: tuple[Sample, ...]

    def bus_bytes_per_s(self, sample: Sample) -> float:
        """Return what each rank sends (and receives) in a ring: 2 (n − 1) ÷ n of the bytes (nccl-tests)."""
        share = 2 * (self.num_ranks - 1) / self.num_ranks
        return share * sample.size_bytes / sample.all_reduce_s

    @property
    def bytes_per_s(self) -> float:
        """The bus bandwidth of the largest message: gradients are large."""
        return self.bus_bytes_per_s(self.samples[-1])

    @property
    def latency_s(self) -> float | None:
        """The way of a small message, of two sizes the quicker one; None among more than two ranks."""
        small = [sample.send_s for sample in self.samples if sample.size_bytes <= _SMALL_BYTES]
        return min((seconds for seconds in small if seconds is not None), default=None)


@dataclass(frozen=True)
class Measurement:
    """All that one start of the ranks measured."""

    device: str
    device_name: str
    backend: str
    interface: str | None
    hosts: tuple[str, ...]
    ranks_per_node: int
    # Unix seconds.
    time: float
    links: tuple[Link, ...]

    def figures(self) -> Measured:
        """Return bandwidths with all devices busy, latencies of one pair alone."""
        inside = [link for link in self.links if link.kind == INSIDE]
        between = [link for link in self.links if link.kind == BETWEEN]
        return Measured(
            device=self.device,
            backend=self.backend,
            interface=self.interface,
            hosts=self.hosts,
            ranks_per_node=self.ranks_per_node,
            time=self.time,
            # The last of a kind is the one with most ranks.
            intra_node_bytes_per_s=inside[-1].bytes_per_s if inside else None,
            inter_node_bytes_per_s=between[-1].bytes_per_s if between else None,
            intra_node_latency_s=inside[0].latency_s if inside else None,
            inter_node_latency_s=between[0].latency_s if between else None,
        )


def from_record(record: Mapping[str, Any]) -> Measurement:
    """Return the measurement in a record. Raises TypeError, KeyError and ValueError for any other."""
    links = tuple(
        Link(**{**link, "samples": tuple(Sample(**sample) for sample in link["samples"])})
        for link in record["links"]
    )
    return Measurement(**{**record, "hosts": tuple(record["hosts"]), "links": links})


@dataclass(frozen=True)
class Measured:
    """The network as ranks on one kind of device see it. None: not measured.

    Bandwidth in bytes per second, per direction and device while all devices of a node send; latency in
    seconds, one way.
    """

    # `cpu` or `cuda`: what holds for the one says nothing about the other.
    device: str
    backend: str
    interface: str | None
    hosts: tuple[str, ...]
    ranks_per_node: int
    # Unix seconds.
    time: float
    intra_node_bytes_per_s: float | None = None
    inter_node_bytes_per_s: float | None = None
    intra_node_latency_s: float | None = None
    inter_node_latency_s: float | None = None


def measured_file(environment: Mapping[str, str], cluster: str) -> Path:
    """Return where the measurements of a cluster lie: in $XDG_DATA_HOME, else in ~/.local/share."""
    home = environment.get("XDG_DATA_HOME") or ""
    # The standard wants relative values ignored.
    data = Path(home) if home.startswith("/") else Path(environment.get("HOME") or "~", ".local", "share")
    name = re.sub(r"[^\w.-]", "_", cluster).lstrip(".") or "unnamed"
    return data.expanduser() / "orchestra" / "network" / f"{name}.json"


def read_measured(file: Path, device: str) -> Measured | None:
    """Return what was measured there with ranks on `device`; None where nothing was or it cannot be read."""
    try:
        return _measured(_read(file)["measured"][device])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_measured(file: Path, measured: Measured) -> None:
    """Put a measurement in the place of the earlier one with the same device; others stay. Raises OSError.

    What was not measured this time (nodes, where there was one only) stays as it was measured before.
    """
    try:
        records = dict(_read(file)["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        records = {}
    earlier = read_measured(file, measured.device)
    kept = {} if earlier is None else _missing(dataclasses.asdict(measured), dataclasses.asdict(earlier))
    records[measured.device] = dataclasses.asdict(dataclasses.replace(measured, **kept))
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(json.dumps({"schema": _SCHEMA, "measured": records}, indent=2) + "\n")
        draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def with_measured(network: NetworkConfig, measured: Measured | None) -> NetworkConfig:
    """Return `network` with measured figures in the place of its nulls."""
    if measured is None:
        return network
    return dataclasses.replace(network, **_missing(dataclasses.asdict(network), dataclasses.asdict(measured)))


def _missing(record: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that `other` has and `record` has not."""
    return {name: other[name] for name in _FIGURES if record[name] is None and other[name] is not None}


def _read(file: Path) -> dict[str, Any]:
    record = json.loads(file.read_text())
    if not isinstance(record, dict) or record.get("schema") != _SCHEMA:
        raise ValueError(f"{file}: not a network file of schema {_SCHEMA}")
    return record


def _measured(record: Mapping[str, Any]) -> Measured:
    figures = {name: _positive(record.get(name)) for name in _FIGURES}
    # Keys that a later version may add are passed over.
    return Measured(
        device=str(record["device"]),
        backend=str(record["backend"]),
        interface=None if record["interface"] is None else str(record["interface"]),
        hosts=tuple(str(host) for host in record["hosts"]),
        ranks_per_node=int(record["ranks_per_node"]),
        time=float(record["time"]),
        **figures,
    )


def _positive(value: object) -> float | None:
    """Return a usable figure; whatever else somebody wrote there is as good as nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value > 0 else None
