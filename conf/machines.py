"""The part of the schema that is about machines and their failures; `conf.schema` has the rest and all names.

Standard library only, under the same rules as `conf.schema`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class LauncherName(Enum):
    """Who starts the nodes."""

    local = "local"
    slurm = "slurm"


class Device(Enum):
    """What the ranks compute on; `auto` takes CUDA where a node has it."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Requeue(Enum):
    """How a stopped Slurm job continues: the same job again, a follow-up job by dependency, or not at all."""

    requeue = "requeue"
    chain = "chain"
    never = "never"


@dataclass(frozen=True)
class NetworkConfig:
    """Bandwidth (bytes per second, per direction and device) and latency; null: unknown."""

    interface: str | None = None
    intra_node_bytes_per_s: float | None = None
    inter_node_bytes_per_s: float | None = None
    intra_node_latency_s: float | None = None
    inter_node_latency_s: float | None = None


@dataclass(frozen=True)
class ContainerConfig:
    """Image the ranks run in: Pyxis (`image`, `mounts`) or a prefix such as `apptainer exec image.sif`."""

    image: str | None = None
    mounts: list[str] = field(default_factory=list)
    prefix: str | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """The machines: who starts them, how many, what they are and what the scheduler is told."""

    name: str = "local"
    launcher: LauncherName = LauncherName.local
    nodes: int = 1
    # Ranks per node, on CPU too. `auto`: all GPUs of the node, or 2 CPU ranks.
    gpus_per_node: int | str = "auto"
    device: Device = Device.auto
    # Threads per rank on CPU; null: cores ÷ ranks.
    threads_per_rank: int | None = None
    spare_nodes: int = 0
    requeue: Requeue = Requeue.requeue
    # Row of orchestra/hardware.py that names the device; `auto`: asked of the device itself.
    hardware: str = "auto"
    # Dense peak of one device for the run's dtype in TFLOP/s; null: from the table, on CPU measured.
    peak_tflops: float | None = None
    network: NetworkConfig = field(default_factory=NetworkConfig)
    setup: list[str] = field(default_factory=list)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    # Slurm's own forms: minutes, H:MM:SS or D-HH:MM:SS.
    time_limit: str | None = None
    constraint: str | None = None
    # Jobs of one sweep that run at the same time; null: as many as the site allows.
    array_throttle: int | None = None
    exclude: list[str] = field(default_factory=list)
    # Any other sbatch option by its long name: {reservation: maintenance}.
    slurm_extra: dict[str, Any] = field(default_factory=dict)


class Fault(Enum):
    """What a rehearsed failure does. `sigkill`: the rank kills itself, as the kernel does without memory."""

    sigkill = "sigkill"


class FaultPhase(Enum):
    """When it strikes: as the step begins, or in the midst of saving that step or of restoring it."""

    step = "step"
    staging = "staging"
    mid_file = "mid_file"
    before_vote = "before_vote"
    before_manifest = "before_manifest"
    before_prune = "before_prune"
    restore = "restore"


@dataclass(frozen=True)
class RecoveryConfig:
    """How failures are noticed and how often a run is started again."""

    max_restarts: int = 3
    # Fewest nodes the run may shrink to; null: all of cluster.nodes.
    min_nodes: int | None = None
    heartbeat_timeout_s: float = 60.0
    collective_timeout_s: float = 600.0
    # How long ranks that were asked to stop may take to save, before they are killed.
    stop_timeout_s: float = 120.0
    memory_copy_every_steps: int | None = None
    # Rehearsals: [{at_step: 30, rank: 1}]; rank may be `all`; attempt (0), phase (step), fault (sigkill).
    inject: list[dict[str, Any]] = field(default_factory=list)
