"""The typed schema of a configuration: one frozen dataclass per group, enums whose names equal their values.

Standard library only. Units stand in the names (`_s` seconds, `_bytes`, `_gib`); batch sizes are in sequences
unless they say tokens. The values here are the defaults; `conf/<group>/*.yaml` are presets on top of them.
Rules that span fields live in `orchestra.config.rules.all_rules`, and reading a frozen run in
`orchestra.run.config_file`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from conf.model_schema import Family as Family
from conf.model_schema import ModelConfig as ModelConfig
from conf.model_schema import MoeAuxScope as MoeAuxScope
from conf.model_schema import MoeBalance as MoeBalance
from conf.model_schema import RopeScaling as RopeScaling
from conf.model_schema import ScoringFunc as ScoringFunc
from conf.optim_schema import MupConfig as MupConfig
from conf.optim_schema import OptimConfig as OptimConfig
from conf.optim_schema import Parametrization as Parametrization
from conf.optim_schema import RampRate as RampRate
from conf.optim_schema import Schedule as Schedule
from conf.optim_schema import StateDType as StateDType


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


class NumaBinding(Enum):
    """Which cores a rank may run on, in the words of torchrun's --numa-binding. `node`: those of the NUMA
    node of its GPU. `exclusive`: its own part of them. `auto`: exclusive in a job that has its cores for
    itself, else node. `none`: all. Cores that Slurm or a container does not give are never taken.
    """

    auto = "auto"
    none = "none"
    node = "node"
    exclusive = "exclusive"


class NodeOrder(Enum):
    """By what a job's nodes are put in the order of their ranks."""

    topology = "topology"
    scheduler = "scheduler"


@dataclass(frozen=True)
class NetworkConfig:
    """The bus bandwidth that collectives reach (bytes per second, per direction and device, while all devices
    of a node send; about 85 % of an adapter's rate) and latency; null: unknown.
    """

    interface: str | None = None
    intra_node_bytes_per_s: float | None = None
    inter_node_bytes_per_s: float | None = None
    intra_node_latency_s: float | None = None
    inter_node_latency_s: float | None = None


@dataclass(frozen=True)
class ContainerConfig:
    """Image the ranks run in: Pyxis (`image`, `mounts`) or a prefix such as `apptainer exec image.sif`.

    Folders of the run, its data and its checkpoints that `mounts` leaves out are mounted too.
    """

    image: str | None = None
    mounts: list[str] = field(default_factory=list)
    prefix: str | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """The machines: who starts them, how many, what they are and what the scheduler is told."""

    name: str = "local"
    launcher: LauncherName = LauncherName.local
    # `4..8` on the command line: a job begins with 4 to 8, and grows (min_nodes=4, nodes=8).
    nodes: int = 1
    # Fewest nodes that a job begins with; null: all of them.
    min_nodes: int | None = None
    # Ranks per node, on CPU too. `auto`: all GPUs of the node, or 2 CPU ranks.
    gpus_per_node: int | str = "auto"
    device: Device = Device.auto
    # Lets several ranks use one GPU: rank r of this machine has GPU r mod their number. To try a layout on a
    # workstation, not to be fast; on CPU it changes nothing, and a job on Slurm has a GPU for each rank.
    share_devices: bool = False
    # Threads per rank on CPU; null: cores ÷ ranks.
    threads_per_rank: int | None = None
    # Keeps each rank, and so its memory, beside its GPU; `orchestra doctor` shows the map.
    numa_binding: NumaBinding = NumaBinding.auto
    spare_nodes: int = 0
    # Which node has which ranks: `topology` puts groups that talk much under one switch, as far as Slurm says
    # where the nodes are; `scheduler` takes Slurm's own order. No number depends on it.
    node_order: NodeOrder = NodeOrder.topology
    # Most leaf switches that a job's nodes may lie under (--switches), and how long it waits for so few, as
    # long as the site lets it (null) or such as 2h; a site without a switch tree takes no notice.
    max_switches: int | None = None
    max_switches_wait: str | None = None
    # Nodes that lie in one block each, where the site has blocks (--segment); it divides all of the job's.
    segment: int | None = None
    requeue: Requeue = Requeue.requeue
    # Exit code of a job that stopped on request with a checkpoint, 75 or 0: Slurm calls 75 FAILED, and some
    # sites mail then. The run's own records say "stopped" and 75 in either case.
    stop_exit_code: int = 75
    # Row of orchestra/sizes/hardware.py that names the device, or a profile FILE.json that `orchestra plan
    # --calibrate` wrote (for planning); `auto`: asked of the device itself.
    hardware: str = "auto"
    # Dense peak of one device for the run's dtype in TFLOP/s; null: from the table, on CPU measured.
    peak_tflops: float | None = None
    # Hours between the failures of one device that end an attempt, on average; null: as Llama 3 had it on
    # H100 (50,700; arXiv:2407.21783). For checkpoint.every_steps=auto and `orchestra plan --goodput`.
    mtbf_device_hours: float | None = None
    # What an hour of one GPU costs, and in which currency, as it is to be shown; null: no cost is shown.
    price_per_gpu_hour: float | None = None
    currency: str | None = None
    network: NetworkConfig = field(default_factory=NetworkConfig)
    # What a node's own disk reads and writes, for planning parallelism.offload=optimizer_disk; null: 2.5e9, a
    # single NVMe drive.
    disk_bytes_per_s: float | None = None
    # Lines of the batch script before anything of ours. One that fails ends the job, but with setup_may_fail.
    setup: list[str] = field(default_factory=list)
    setup_may_fail: bool = False
    container: ContainerConfig = field(default_factory=ContainerConfig)
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    # Slurm's own forms, minutes, H:MM:SS or D-HH:MM:SS, or a duration such as 4h or 1d12h.
    time_limit: str | None = None
    constraint: str | None = None
    # Kinds of nodes that would do, each with what is different on it: [{constraint: h100}, {constraint: a100,
    # nodes: 2, train.micro_batch_size: 2}] (keys of `cluster` by themselves, others in full). A run is
    # submitted as a job for each; whichever starts first trains, and the others are withdrawn.
    alternatives: list[dict[str, Any]] = field(default_factory=list)
    # Jobs of one sweep on Slurm that run at the same time; null: as many as the site allows.
    array_throttle: int | None = None
    # Members of a sweep on this machine (`orchestra run -m`) that train at the same time; each gets its
    # share of the cores, and GPUs of its own.
    members_at_once: int = 1
    # Members of a sweep on Slurm (`orchestra submit -m`) that share a node, each with its share of the cores
    # and GPUs of its own, or its share of one; whoever is done makes room for the next. `auto`: as many as
    # fit into the GPUs' memory by the planner's count.
    members_per_node: int | str = 1
    exclude: list[str] = field(default_factory=list)
    # Any other sbatch option by its long name: {reservation: maintenance}.
    slurm_extra: dict[str, Any] = field(default_factory=dict)
    # Any other srun option by its long name: {cpu-bind: none, mpi: none, no-container-mount-home: true}.
    srun_extra: dict[str, Any] = field(default_factory=dict)


class Fault(Enum):
    """What a rehearsed failure does: `orchestra/run/planned_faults.py` has the table."""

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
    # A run on fewer than cluster.nodes asks for the others in a job that waits beside its own, and goes on
    # with them once they came, no sooner than so long after the last such change; null: it stays as it is.
    resize_every_s: float | None = 600.0
    # A rank that shows no progress for so long counts as hung, until its own history says a shorter limit.
    heartbeat_timeout_s: float = 60.0
    # The same before an attempt's first step: imports, connections, compilation.
    setup_timeout_s: float = 900.0
    # A node whose agent is silent for so long counts as lost; three seconds where its host is silent too.
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
    # Rehearsals: [{at_step: 30, rank: 1, fault: hang}]; orchestra/run/planned_faults.py says what an entry
    # may hold.
    inject: list[dict[str, Any]] = field(default_factory=list)


class Offload(Enum):
    """What lies in host memory instead of the GPU's. `optimizer`: masters and moments, which are updated
    there. `all`: also the ranges of parameters that a rank owns, with ZeRO-3. `optimizer_disk`: masters and
    moments on a disk, on CPU too; the host updates them unit by unit, with two units in memory.
    """

    none = "none"
    optimizer = "optimizer"
    all = "all"
    optimizer_disk = "optimizer_disk"


# The functional form: Python's class syntax has no member of the name 1f1b.
PipelineSchedule = Enum(  # type: ignore[misc]  # mypy wants a literal
    "PipelineSchedule", [(it, it) for it in ("afab", "1f1b", "interleaved", "zero_bubble", "zbv")]
)
PipelineSchedule.__doc__ = """`afab`: all forward passes, then all backward passes. `1f1b`: one forward, one
backward. `interleaved`: 1f1b with several stages on each rank. `zero_bubble`: 1f1b whose gradients of weights
fill the bubble. `zbv`: the same with two stages on each rank, placed as a V.
"""


class ContextMethod(Enum):
    """How attention sees whole sequences whose places are cut over ranks."""

    all_gather = "all_gather"
    ulysses = "ulysses"


class ExpertPlacement(Enum):
    """Which of the ranks that share out experts has which ones. `fixed`: neighbours, in their order. `auto`:
    at a checkpoint experts move to where the busiest rank has over 5 % fewer tokens, by those since the
    checkpoint before; losses and checkpoints stay the same.
    """

    fixed = "fixed"
    auto = "auto"


@dataclass(frozen=True)
class ParallelismConfig:
    """Degrees of the mesh axes. World size = dp × tp × pp × cp; ep lies inside dp."""

    # `auto`: whatever the world size leaves over.
    dp: int | str = "auto"
    zero: int = 0
    # Ranks over which ZeRO shards; null: all of dp × cp. Smaller than that: hybrid sharding. With ep it is a
    # multiple of ep × cp.
    shard_degree: int | None = None
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    # The order of a pipeline's forward and backward passes.
    schedule: PipelineSchedule = PipelineSchedule["1f1b"]
    # Stages on each rank of the pipeline: 2 or more for interleaved; zbv has 2 and takes 1 for that.
    virtual_stages: int = 1
    # Layers of each stage in order, pp × virtual_stages numbers; null: cut so that all take equally long.
    stages: list[int] | None = None
    # Ranks that each have a part of every sequence; 2·cp must divide train.seq_len.
    cp: int = 1
    # all_gather: keys and values come from all ranks, for any number of heads. ulysses: ranks exchange places
    # for heads; tp × cp must divide model.num_attention_heads and model.num_key_value_heads.
    cp_method: ContextMethod = ContextMethod.all_gather
    ep: int = 1
    expert_placement: ExpertPlacement = ExpertPlacement.fixed
    # Bytes of gradient in one all-reduce, in MiB (overlapped with the backward pass).
    bucket_mib: float = 25.0
    offload: Offload = Offload.none
    # A folder on each node's own disk for optimizer_disk; variables in it, such as $SLURM_JOB_ID, are the
    # node's.
    offload_dir: str | None = None


class PrecisionName(Enum):
    """What parameters, gradients and products are kept and computed in."""

    fp32 = "fp32"
    bf16 = "bf16"
    bf16_fp32_grad = "bf16_fp32_grad"
    fp16 = "fp16"
    fp8 = "fp8"


class DType(Enum):
    """Data types by their usual short names."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class Scaling(Enum):
    """What one scale of fp8 numbers is for: a whole tensor, or each row along the sum of a product."""

    tensor = "tensor"
    row = "row"


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss that keeps fp16 gradients in range, and how it moves (precision=fp16 only)."""

    # The first factor, a power of two. A step whose gradients overflow is left out and halves it.
    initial: int = 65536
    # Steps in a row without overflow after which it doubles.
    growth_steps: int = 2000


@dataclass(frozen=True)
class PrecisionConfig:
    """Names a policy of `orchestra.precision`; the fields below it override single choices."""

    name: PrecisionName = PrecisionName.fp32
    # Data type in which gradients are summed over ranks; null: as the policy says.
    reduce_dtype: DType | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    # For precision=fp8 only. Products of experts have a scale for each row either way.
    fp8_scaling: Scaling = Scaling.tensor
    # Blocks at each end of the model whose products stay in bf16, with precision=fp8.
    fp8_bf16_blocks: int = 0
    # Activations and gradients of the blocks are scaled by their largest numbers of the last steps, so that
    # none is looked for before rounding (TransformerEngine's delayed scaling). With fp8_scaling=tensor.
    fp8_delayed_scaling: bool = False
    # The products with the output matrix in fp8 too: logits, and the gradients of both factors.
    fp8_output: bool = False


class Source(StrEnum):
    """`stdlib`: the running interpreter's own *.py as bytes, less some that are held out. `tokens`: files of
    `orchestra data pack`.
    """

    stdlib = "stdlib"
    tokens = "tokens"


@dataclass(frozen=True)
class BlendPart:
    """One token file of a blend and its share of the samples (shares need not sum to 1)."""

    path: str
    weight: float = 1.0
    # Of its column train/NAME/loss; null: the end of its path.
    name: str | None = None


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from. The order of samples is a function of (train.seed, step) alone."""

    # Or a plug-in, package.module:name, called as name(seq_len=seq_len, **source_options), which returns what
    # has num_samples, vocab_size, identity and sample(index).
    source: Source | str = Source.stdlib
    source_options: dict[str, Any] = field(default_factory=dict)
    # What a plug-in says that it reads, which a run keeps; null: it is asked when the run is checked.
    source_identity: str | None = None
    # Prefix or .bin file written by `orchestra data pack`, or any fsspec URL of one. Only for source=tokens.
    path: str | None = None
    # Several files with weights instead of one path.
    blend: list[BlendPart] = field(default_factory=list)
    # Node-local folder for copies of remote files; null: under the user's cache folder.
    cache_dir: str | None = None
    # Batches that the loader's thread prepares ahead of the step.
    prefetch_batches: int = 4
    # Attention stays inside of documents where a sample holds several: a token sees no other document's.
    document_masks: bool = False
    # Write each step's sample ids to <run>/samples/.
    ledger: bool = False


@dataclass(frozen=True)
class EvalConfig:
    """The loss on held-out data while a run trains: columns eval/NAME/loss of metrics.jsonl."""

    # After every so many steps, and after the last one; null: never.
    every_steps: int | None = None
    # Global batches of each source, the same ones every time; null: each of its samples once.
    steps: int | None = 10
    # What is evaluated: {wiki: {path: PREFIX}, code: {blend: [{path: PREFIX, weight: 2}]}}, or one source
    # alone, which is then called held_out. null or {}: with data.source=stdlib, its files that no run trains
    # on.
    data: dict[str, Any] | None = field(default_factory=dict)
    # Before a run's first step too: columns eval/NAME/loss_at_start of the row of step 1, written then.
    at_start: bool = False


class Recompute(Enum):
    """Which activations are computed again in the backward pass instead of being kept."""

    none = "none"
    selective = "selective"
    full = "full"


class OnNonfinite(Enum):
    """What a step with a non-finite loss or gradient does. `skip`: no update, counted; exit 93 after
    train.max_nonfinite_steps in a row. `roll_back`: the same, but after so many the run goes on as
    recovery.roll_back says. `stop`: exit 93.
    """

    skip = "skip"
    roll_back = "roll_back"
    stop = "stop"


@dataclass(frozen=True)
class ProfileConfig:
    """torch profiler trace (and, on a GPU, a memory snapshot) of a few steps, written to <run>/profile/."""

    enabled: bool = False
    # First and last step that are traced, both included.
    steps: list[int] = field(default_factory=lambda: [5, 7])
    ranks: list[int] = field(default_factory=lambda: [0])


@dataclass(frozen=True)
class BatchStage:
    """One batch of a ramp: of steps that begin after `tokens` tokens of the run, or more."""

    tokens: int
    global_batch_tokens: int


@dataclass(frozen=True)
class TrainConfig:
    """Length, batch, and how a step is computed. GBS = MBS × GA × DP; the accumulation GA is derived."""

    steps: int = 100
    # Tokens to train on: as many steps as that takes, the last one begun counted. Give steps or tokens.
    tokens: int | None = None
    seq_len: int = 256
    # Sequences in one optimizer step over all ranks; null (without global_batch_tokens): 16, rounded up to a
    # multiple of MBS × DP.
    global_batch_size: int | None = None
    # The same in tokens (a multiple of seq_len); takes the place of global_batch_size.
    global_batch_tokens: int | None = None
    # A global batch that grows while the run trains, [{tokens: 0, global_batch_tokens: 1048576}, …], by more
    # accumulation; takes the place of the two above, which are then its last one.
    batch_ramp: list[BatchStage] = field(default_factory=list)
    # Sequences in one forward and backward pass of a rank; null: the largest divisor of its share up to 8.
    # `auto`: the largest that fits into memory, found by the ranks whenever an attempt begins.
    micro_batch_size: int | str | None = None
    recompute: Recompute = Recompute.none
    # Recompute the layers 0, k, 2·k, … only.
    recompute_every: int = 1
    # GiB that the layers' activations of a micro-batch may take on a rank; the cheapest choice of what to
    # recompute in which layers is made for it (train.recompute must then be none). null: as said above.
    recompute_budget_gib: float | None = None
    # Compile the blocks (torch.compile): true, false, or `auto`: where ranks train on GPUs and their nodes
    # have what compiling needs.
    compile: bool | str = "auto"
    log_every: int = 1
    # Measure the gradient's noise in every so many steps, from gradients that are there anyway; null: never.
    # The report then says what batch would still pay.
    noise_scale_every: int | None = None
    seed: int = 0
    # Bit-identical repeats: deterministic kernels, fixed reduction order.
    deterministic: bool = False
    on_nonfinite: OnNonfinite = OnNonfinite.skip
    # Skipped steps in a row after which even on_nonfinite=skip stops with exit 93, and roll_back rolls back.
    max_nonfinite_steps: int = 10
    # Rows of logits that exist at once in the loss; null: chosen from the vocabulary.
    loss_chunk_tokens: int | None = None
    # Another loss in the place of cross-entropy: package.module:name, called as name(logits, targets,
    # **loss_options), which returns the loss of each token; null: cross-entropy.
    loss: str | None = None
    loss_options: dict[str, Any] = field(default_factory=dict)
    # What looks at each row of metrics on rank 0 and may add to it: package.module:name, called as
    # name(**options) once; the options of each stand in callbacks_options by its name.
    callbacks: list[str] = field(default_factory=list)
    callbacks_options: dict[str, Any] = field(default_factory=dict)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    # TensorBoard's files too, in <run>/tensorboard/; needs the package tensorboard.
    tensorboard: bool = False


class WhenBusy(Enum):
    """What a due save does while the one before is still being written."""

    skip = "skip"
    wait = "wait"


class Restore(Enum):
    """Who reads a checkpoint: each byte one rank, broadcast; rank 0 alone; or every rank its own."""

    broadcast = "broadcast"
    rank0 = "rank0"
    direct = "direct"


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and restoring. The last step is saved too; `every_steps=null` saves nothing at all."""

    # `auto`: as often as loses least between saves and failures (orchestra/sizes/save_interval.py). The ranks
    # decide whenever an attempt begins, by measured times once there are some.
    every_steps: int | str | None = 1000
    # Seconds between saves by rank 0's clock (checkpoint.every_s=1h); takes the place of every_steps.
    every_s: float | None = None
    # What stays: the newest so many, one every so many steps, and the best so many by their loss.
    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0
    # Write while training goes on; false: each save ends before the next step begins.
    async_save: bool = True
    when_busy: WhenBusy = WhenBusy.skip
    restore: Restore = Restore.broadcast
    # A folder or any fsspec URL, this run's alone; null: <run>/checkpoints.
    dir: str | None = None
    # Longest wait of a save or a restore for other ranks or for the storage.
    timeout_s: float = 600.0
    # How long the last save of an attempt is tried again, its state kept in memory: of ranks that were asked
    # to stop, no longer than recovery.stop_timeout_s allows.
    last_save_patience_s: float = 600.0
    # Where the last save goes when that patience is over: a folder that all nodes see, on another storage, or
    # any fsspec URL. Runs may share one, each writes to <fallback_dir>/<run>-<id>; null: nowhere else.
    fallback_dir: str | None = None
    # How long the begin of an attempt waits for a storage that does not answer, before it fails.
    restore_patience_s: float = 300.0


class WandbMode(Enum):
    """Where Weights & Biases records go: a folder of the run, their server, or nowhere."""

    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases. A process of its own reads metrics.jsonl: it can neither stop nor slow training."""

    # WANDB_MODE and WANDB_DISABLED in the environment change nothing.
    mode: WandbMode = WandbMode.offline
    project: str = "orchestra"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    # What the run is about, and what it is in its group (train, eval).
    notes: str | None = None
    job_type: str | None = None
    # How long the end of a run waits for the last upload.
    finish_timeout_s: float = 30.0


@dataclass(frozen=True)
class RunConfig:
    """Identity. `name=null`: composed from the model's name, the date and a short signature."""

    name: str | None = None
    dir: str = "runs"
    # Unix group whose members may write the run's files, and so stop it, resume it and change its code; null:
    # nobody but its user may, whatever the umask is.
    group: str | None = None
    # Column of metrics.jsonl that `submit --wait` and the sweepers which choose values go by: its last row's.
    # One of eval (eval/wiki/loss) is also what status and checkpoint.keep_best compare, in the place of the
    # training's loss.
    metric: str = "loss"


@dataclass(frozen=True)
class Config:
    """A whole run. Everything that changes its result is in here."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    run: RunConfig = field(default_factory=RunConfig)
