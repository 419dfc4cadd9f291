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
    # Row of orchestra/hardware.py that names the device, or a profile FILE.json that `orchestra plan
    # --calibrate` wrote (for planning); `auto`: asked of the device itself.
    hardware: str = "auto"
    # Dense peak of one device for the run's dtype in TFLOP/s; null: from the table, on CPU measured.
    peak_tflops: float | None = None
    # Hours between the failures of one device that end an attempt, on average; null: as Llama 3 had it on
    # H100 (50,700; arXiv:2407.21783). For checkpoint.every_steps=auto and `orchestra plan --goodput`.
    mtbf_device_hours: float | None = None
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
    """What a rehearsed failure does: `orchestra/faults.py` has the table."""

    sigkill = "sigkill"
    sigstop = "sigstop"
    exit = "exit"
    segfault = "segfault"
    exception = "exception"
    oom = "oom"
    hang = "hang"
    gil = "gil"
    nan = "nan"
    spike = "spike"
    flip = "flip"
    slow = "slow"
    agent_kill = "agent_kill"
    node_down = "node_down"


class FaultPhase(Enum):
    """When it strikes: before anything is restored, at a moment of the step, or in the midst of saving that
    step or of restoring it.
    """

    setup = "setup"
    step = "step"
    forward = "forward"
    reduce = "reduce"
    staging = "staging"
    mid_file = "mid_file"
    before_vote = "before_vote"
    before_manifest = "before_manifest"
    before_prune = "before_prune"
    restore = "restore"


class OnSpike(Enum):
    """What follows a loss far above the last ones. `warn`: an event. `skip`: an event and no update.
    `roll_back`: no update, and the run goes on as recovery.roll_back says. `stop`: no update, and exit 93.
    """

    none = "none"
    warn = "warn"
    skip = "skip"
    roll_back = "roll_back"
    stop = "stop"


@dataclass(frozen=True)
class LossSpikeConfig:
    """A spike is a loss more than `factor` spreads above the median of the last `window` steps."""

    action: OnSpike = OnSpike.warn
    factor: float = 10.0
    window: int = 64


@dataclass(frozen=True)
class RollBackConfig:
    """Where a run goes on that is rolled back, and what it leaves out: about 100 steps before the spike, and
    200 to 500 batches (PaLM, arXiv:2204.02311, section 5.1). Who wants that says so in
    recovery.loss_spike.action or train.on_nonfinite.
    """

    # From the newest checkpoint so many steps before the first bad one; if none is so old, from the oldest.
    steps_before: int = 100
    # From there on the data of so many steps is left out, and of all steps up to the bad one if these are
    # more.
    skip_steps: int = 200
    # Without progress (a checkpoint of a later step than ever) so often in a row; then exit 93.
    max_in_a_row: int = 3


@dataclass(frozen=True)
class RecoveryConfig:
    """How failures are noticed and how often a run is started again."""

    # Restarts in a row without progress (a newly committed checkpoint); each progress begins the count anew.
    max_restarts: int = 3
    # Fewest nodes the run may shrink to; null: all of cluster.nodes.
    min_nodes: int | None = None
    # A rank that shows no progress for so long counts as hung, until its own history says a shorter limit.
    heartbeat_timeout_s: float = 60.0
    # The same before an attempt's first step: imports, connections, compilation.
    setup_timeout_s: float = 900.0
    # A node whose agent is silent for so long counts as lost.
    agent_timeout_s: float = 10.0
    collective_timeout_s: float = 600.0
    # How long ranks that were asked to stop may take to save, before they are killed.
    stop_timeout_s: float = 120.0
    # Wait before the second restart without progress; it triples with each further one, up to ten minutes.
    backoff_s: float = 10.0
    # One process per node keeps torch imported, and the ranks are forked from it.
    warm_start: bool = True
    # Each node is looked at before an attempt, and left out when it is not fit.
    preflight: bool = True
    # How long a node that failed twice is left out of further jobs.
    exclude_hours: float = 24.0
    memory_copy_every_steps: int | None = None
    # One step of every so many is timed on each rank to find slow ones; null: none. A rank is slow that needs
    # `factor` times the others' median in so many timed steps in a row.
    straggler_every_steps: int | None = 10
    straggler_factor: float = 1.3
    straggler_windows: int = 5
    loss_spike: LossSpikeConfig = field(default_factory=LossSpikeConfig)
    roll_back: RollBackConfig = field(default_factory=RollBackConfig)
    # In one step of every so many each rank's first micro-batch is computed again by a data-parallel
    # neighbour, and what differs tells a broken device; null: never.
    replay_every_steps: int | None = None
    # Largest relative difference of losses and gradient norms; null: bit for bit, which takes like devices
    # and train.deterministic=true on GPUs.
    replay_tolerance: float | None = None
    # Rehearsals: [{at_step: 30, rank: 1, fault: hang}]; orchestra/faults.py says what an entry may hold.
    inject: list[dict[str, Any]] = field(default_factory=list)
