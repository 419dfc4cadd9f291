"""The typed schema of a configuration: one frozen dataclass per group, enums whose names equal their values.

Standard library only. Units stand in the names (`_s` seconds, `_bytes`, `_gib`); batch sizes are in sequences
unless they say tokens. The values here are the defaults; `conf/<group>/*.yaml` are presets on top of them.
Rules that span fields live in `orchestra.config.rules`, and reading a frozen run in `orchestra.frozen`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from conf.machines import (
    ClusterConfig,
    ContainerConfig,
    Device,
    Fault,
    FaultPhase,
    LauncherName,
    LossSpikeConfig,
    NetworkConfig,
    OnSpike,
    RecoveryConfig,
    Requeue,
    RollBackConfig,
)
from conf.methods import (
    DType,
    LossScale,
    Offload,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    Scaling,
)

__all__ = [
    "BlendPart",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ContainerConfig",
    "DType",
    "DataConfig",
    "Device",
    "Family",
    "Fault",
    "FaultPhase",
    "LauncherName",
    "LossScale",
    "LossSpikeConfig",
    "ModelConfig",
    "NetworkConfig",
    "Offload",
    "OnNonfinite",
    "OnSpike",
    "OptimConfig",
    "ParallelismConfig",
    "PrecisionConfig",
    "PrecisionName",
    "ProfileConfig",
    "Recompute",
    "RecoveryConfig",
    "Requeue",
    "Restore",
    "RollBackConfig",
    "RopeScaling",
    "RunConfig",
    "Scaling",
    "Schedule",
    "Source",
    "StateDType",
    "TrainConfig",
    "WandbConfig",
    "WandbMode",
    "WhenBusy",
]


class Family(Enum):
    """`llama`: RMSNorm, rotary positions, SwiGLU, no biases. `gpt`: LayerNorm, learned positions, GELU."""

    llama = "llama"
    gpt = "gpt"


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary positions (Hugging Face's `rope_scaling`, `rope_type: llama3`)."""

    enabled: bool = False
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model, in Hugging Face's names. The defaults are the preset `debug`."""

    name: str = "debug"
    family: Family = Family.llama
    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    # Width of one head; null means hidden_size / num_attention_heads.
    head_dim: int | None = None
    # 256 bytes, the document separator (256), and padding to a multiple of 16.
    vocab_size: int = 272
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    # Experts in each layer's feed-forward, of which a token goes through some; 0: the layers are dense.
    num_experts: int = 0
    num_experts_per_tok: int = 2
    # Inner width of one expert, null: intermediate_size; and of one that every token goes through, 0: none.
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int = 0
    # Standard deviation of the initial weights; residual projections get it divided by sqrt(2 · layers).
    init_std: float = 0.02
    # Folder with a Hugging Face Llama checkpoint to start from; null: initial values from train.seed.
    init_from: str | None = None


class Source(Enum):
    """`stdlib`: the running interpreter's own *.py as bytes. `tokens`: files of `orchestra data pack`."""

    stdlib = "stdlib"
    tokens = "tokens"


@dataclass(frozen=True)
class BlendPart:
    """One token file of a blend and its share of the samples (shares need not sum to 1)."""

    path: str
    weight: float = 1.0


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from. The order of samples is a function of (train.seed, step) alone."""

    source: Source = Source.stdlib
    # Prefix or .bin file written by `orchestra data pack`, or any fsspec URL of one. Only for source=tokens.
    path: str | None = None
    # Several files with weights instead of one path.
    blend: list[BlendPart] = field(default_factory=list)
    # Node-local folder for copies of remote files; null: under the user's cache folder.
    cache_dir: str | None = None
    # Batches that the loader's thread prepares ahead of the step.
    prefetch_batches: int = 4
    # Write each step's sample ids to <run>/samples/.
    ledger: bool = False


class Schedule(Enum):
    """Shape of the learning rate after warm-up. `wsd`: constant, then a linear decay over the last fifth."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


class StateDType(Enum):
    """Data types of the optimizer's moments."""

    fp32 = "fp32"
    bf16 = "bf16"


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning-rate schedule."""

    lr: float = 3e-4
    # Learning rate at the last step; null: a tenth of lr.
    min_lr: float | None = None
    # null: 10 % of the steps, at most 2,000.
    warmup_steps: int | None = None
    schedule: Schedule = Schedule.cosine
    # Only matrices (two or more dims) decay; norms and biases do not.
    weight_decay: float = 0.1
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    # Largest global L2 norm of the gradient; null: no clipping.
    clip_norm: float | None = 1.0
    # Share of the steps in which schedule=wsd decays.
    wsd_decay_fraction: float = 0.2
    # Data type of both moments; bf16 is rounded stochastically. Masters are fp32 always.
    state_dtype: StateDType = StateDType.fp32


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
class TrainConfig:
    """Length, batch, and how a step is computed. GBS = MBS × GA × DP; the accumulation GA is derived."""

    steps: int = 100
    seq_len: int = 256
    # Sequences in one optimizer step over all ranks; null (without global_batch_tokens): 16, rounded up to a
    # multiple of MBS × DP.
    global_batch_size: int | None = None
    # The same in tokens (a multiple of seq_len); takes the place of global_batch_size.
    global_batch_tokens: int | None = None
    # Sequences in one forward and backward pass of a rank; null: the largest divisor of its share up to 8.
    # `auto`: the largest that fits into memory, found by the ranks whenever an attempt begins.
    micro_batch_size: int | str | None = None
    recompute: Recompute = Recompute.none
    # Recompute the layers 0, k, 2·k, … only.
    recompute_every: int = 1
    # GiB that the layers' activations of a micro-batch may take on a rank; the cheapest choice of what to
    # recompute in which layers is made for it (train.recompute must then be none). null: as said above.
    recompute_budget_gib: float | None = None
    compile: bool = False
    log_every: int = 1
    seed: int = 0
    # Bit-identical repeats: deterministic kernels, fixed reduction order.
    deterministic: bool = False
    on_nonfinite: OnNonfinite = OnNonfinite.skip
    # Skipped steps in a row after which even on_nonfinite=skip stops with exit 93, and roll_back rolls back.
    max_nonfinite_steps: int = 10
    # Rows of logits that exist at once in the loss; null: chosen from the vocabulary.
    loss_chunk_tokens: int | None = None
    profile: ProfileConfig = field(default_factory=ProfileConfig)


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

    # `auto`: as often as loses least between saves and failures (orchestra/save_interval.py). The ranks
    # decide whenever an attempt begins, by measured times once there are some.
    every_steps: int | str | None = 1000
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


class WandbMode(Enum):
    """Where Weights & Biases records go: a folder of the run, their server, or nowhere."""

    offline = "offline"
    online = "online"
    disabled = "disabled"


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases. A process of its own reads metrics.jsonl: it can neither stop nor slow training."""

    mode: WandbMode = WandbMode.offline
    project: str = "orchestra"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    # How long the end of a run waits for the last upload.
    finish_timeout_s: float = 30.0


@dataclass(frozen=True)
class RunConfig:
    """Identity. `name=null`: composed from the model's name, the date and a short signature."""

    name: str | None = None
    dir: str = "runs"
    # Column of metrics.jsonl that `submit --wait` and the sweepers which choose values go by: its last row's.
    metric: str = "loss"


@dataclass(frozen=True)
class Config:
    """A whole run. Everything that changes its result is in here."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    run: RunConfig = field(default_factory=RunConfig)
