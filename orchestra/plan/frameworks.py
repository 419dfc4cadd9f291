"""What differs between trainers on the same device: kernels, host work, memory kept, how it is reported.

The constants of `NANOTRON` are fitted on the Ultra-Scale Playbook's runs (`benchmarks/planner/playbook.py
--fit` does it again). Other trainers start from them, without nanotron's host work and stalls; one or two
constants are then set on what they publish (`benchmarks/data/published_speed.csv`), the rest is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from conf.schema import PrecisionName
from orchestra.errors import ConfigError


@dataclass(frozen=True)
class Stalls:
    """Runs that wait: what was seen on one cluster, of which only the last part is understood.

    In the playbook's runs about a third of the multi-node pipelines lose about half a second at each border
    between stages and micro-batch, whatever is sent. Three properties tell most of them apart; the rest looks
    random. The limits were chosen on all of these runs; those of many nodes have no known cause and may
    belong to that cluster in those weeks.
    Runs that come close to the device's memory wait too: the allocator frees what it holds and asks again.
    """

    hand_over_s: float
    # Tensor parallelism over at least so many ranks (four nodes): all of them wait.
    from_tp: int
    # From so many nodes on, with several sequences in a micro-batch and so many bytes of it that pass from
    # stage to stage (any number from 34 to 67 MB tells the same runs apart), or with ZeRO over so many ranks
    # (12 of 13 such runs wait, and 1 of 9 under ZeRO 0).
    from_nodes: int
    from_shards: int
    from_micro_batch_size: int
    from_bytes: float
    # Share of the device's memory from which the allocator has to free, and what that takes per layer.
    pressed_share: float
    pressed_layer_s: float


@dataclass(frozen=True)
class Passes:
    """Bytes that the kernels of orchestra's own trainer move on a GPU: for each logit in the loss, for each
    element of the output matrix and each chunk of tokens after the first, and for each parameter: what
    gradients are copied in each micro-batch, and what an update moves beside state, gradient and parameter.

    Compiled, logits are read twice and their gradient is written once, in 16 bits. Eager, in fp32: cast 6,
    maximum 4, subtraction 8, exponential 8, sum 4, division 8, cast 6. The product adds the matrix's gradient
    to a sum in fp32 itself, and gradients lie where they are kept.
    """

    compiled_loss: float = 6.0
    eager_loss: float = 44.0
    chunk: float = 8.0
    gradient: float = 0.0
    update: float = 0.0
    # Selective recomputation repeats the attention core.
    repeats_attention: bool = False
    # What the host updates, it updates beside the next forward pass.
    updates_late: bool = True
    # Weights are rounded to fp8 once a step and kept so.
    keeps_fp8_weights: bool = True


@dataclass(frozen=True)
class Framework:
    """A trainer on GPUs. Times in seconds, shares of 1."""

    name: str
    # Rate of its attention kernel beside FlashAttention-2's.
    attention_rate: float
    # Memory traffic per attention score, forward and backward, where scores pass through memory; 0: flash
    # attention.
    score_bytes: float
    # Memory traffic beside products and attention, forward and backward, in bytes per token and hidden unit.
    elementwise_bytes: float
    # Memory traffic of loss and softmax per logit.
    loss_bytes: float
    # Host time to issue one layer, forward and backward: the device waits where its own work is shorter.
    host_layer_s: float
    # The same of a dense layer that orchestra compiled, without and with full recomputation; None: as above.
    host_compiled_s: tuple[float, float] | None
    # Further host time per layer and tensor-parallel rank when a pipeline leaves the node (see compute.py).
    host_contention_s: float
    # The contention is so many times larger with whole gradients on each rank (ZeRO 0, dp > 1).
    unsharded_contention: float
    # Share of the gradients' reduction that the backward pass does not hide; of ZeRO-3's gathers likewise.
    exposed_reduction: float
    # The optimizer's passes over its state, as a multiple of reading it once; and what a step costs besides.
    optimizer_passes: float
    step_s: float
    stalls: Stalls | None
    # What `selective` recomputation keeps of a layer: everything but the attention core (1; which orchestra
    # keeps too), or a share of all operations.
    selective_share: float
    # Memory: bytes per logit, and of the previous micro-batch's logits that are still alive.
    logit_bytes: float
    stale_logit_bytes: float
    # Tokens whose logits exist at once; None: all of the micro-batch.
    loss_chunk_tokens: int | None
    # Gathered inputs of the two column-parallel products that stay alive, in bytes per token and hidden unit.
    gathered_bytes: float
    # The same while the host is slower than the device and freed blocks are used again at once.
    gathered_bytes_waiting: float
    # Whole activations (bytes per token and hidden unit) and layers' worth of temporaries at the peak.
    whole_bytes: float
    layer_temporaries: float
    # Bytes the allocator holds for nothing that is counted here, and more with tensor parallelism.
    fixed_bytes: float
    # Whether layers are cut by cost, with the output product as a block, or evenly.
    cuts_by_cost: bool
    # Parts of the model on each pipeline rank (interleaved 1F1B): a smaller bubble, more activations.
    pipeline_chunks: int
    # What a row of a table means that says neither: precision, and whether tensor parallelism comes with
    # sequence parallelism.
    usual_precision: PrecisionName
    usual_sequence_parallel: bool
    # Which rank's peak its benchmark reports: the first stage's, or the largest of all.
    reports_first_stage: bool
    source: str
    # Whether products add to fp32 gradients themselves and SiLU's output is computed again, and in fp8
    # weights and products' inputs are kept in 8 bits.
    fuses_kernels: bool = False
    # Of orchestra's own memory: what a step adds, as a multiple of its tensors.
    step_share: float = 1.0
    # Whether pipelines under ZeRO-3 keep what they gathered, and whole gradients, until the step ends.
    gathers_once: bool = False
    # Whether it takes the vendor's attention kernels where there are any.
    uses_vendor_attention: bool = False
    # Of mixtures of experts: host time for a layer besides, and the rate of the experts' products beside that
    # of dense ones.
    host_experts_s: float = 7.5e-3
    experts_rate: float = 0.45
    # What the busiest rank of expert parallelism takes beside the mean one: 1 for published numbers, whose
    # routing is forced to be even.
    uneven_routing: float = 1.0
    # Whether the host's time comes on top because the host is what computes (CPUs).
    computes_on_host: bool = False
    # Whether context parallelism gathers keys and values and gives each rank a head and a tail of a sequence,
    # or passes them round a ring.
    gathers_context: bool = False
    # Whether a product is as much slower as its tiles and waves are not full (`kernels.product_tiles`): not
    # where the constants were fitted to whole steps without it.
    counts_tiles: bool = True
    # What orchestra's own kernels move.
    passes: Passes = Passes()


# The trainer whose memory is counted in full (orchestra.sizes.memory) and not by the constants below.
OWN = "orchestra"

NANOTRON = Framework(
    name="nanotron",
    selective_share=1.0,
    attention_rate=1.0,
    score_bytes=0.0,
    elementwise_bytes=862.0,
    loss_bytes=32.0,
    host_layer_s=4.4e-3,
    host_compiled_s=None,
    host_contention_s=2.22e-3,
    unsharded_contention=1.37,
    exposed_reduction=0.81,
    optimizer_passes=1.56,
    step_s=39e-3,
    stalls=Stalls(
        0.56,
        from_tp=32,
        from_nodes=32,
        from_shards=32,
        from_micro_batch_size=2,
        from_bytes=48e6,
        pressed_share=0.925,
        pressed_layer_s=0.032,
    ),
    logit_bytes=8.1,
    stale_logit_bytes=4.5,
    loss_chunk_tokens=None,
    gathered_bytes=2.75,
    gathered_bytes_waiting=0.17,
    whole_bytes=3.7,
    layer_temporaries=4.0,
    fixed_bytes=0.12 * 2**30,
    cuts_by_cost=True,
    pipeline_chunks=1,
    usual_precision=PrecisionName.bf16_fp32_grad,
    usual_sequence_parallel=True,
    reports_first_stage=True,
    counts_tiles=False,
    source="fitted on the Ultra-Scale Playbook's H100 runs",
)

_EFFICIENT = replace(
    NANOTRON,
    counts_tiles=True,
    elementwise_bytes=850.0,
    loss_bytes=20.0,
    host_layer_s=1.0e-3,
    host_contention_s=0.0,
    exposed_reduction=0.25,
    optimizer_passes=1.5,
    step_s=5e-3,
    stalls=None,
    stale_logit_bytes=0.0,
    gathered_bytes=0.0,
    gathered_bytes_waiting=0.0,
    whole_bytes=4.0,
    layer_temporaries=1.0,
    fixed_bytes=1.0 * 2**30,
    cuts_by_cost=False,
    usual_precision=PrecisionName.bf16,
    reports_first_stage=False,
)

FRAMEWORKS = {
    framework.name: framework
    for framework in (
        NANOTRON,
        replace(
            _EFFICIENT,
            name=OWN,
            loss_chunk_tokens=1024,
            usual_sequence_parallel=False,
            uses_vendor_attention=True,
            gathers_context=True,
            # Twelve blocks of a GPT on one thread of a CPU, with next to nothing to compute (RESULTS.md,
            # 2026-11-27). On an H100's host it was 3.6 ms when this thread took 3.5.
            host_compiled_s=(2.4e-3, 2.9e-3),
            # Set so that a step took 8 to 20 % longer than with even routing (Megatron's ModelZoo). Experts'
            # products were taken for slower then: by what an H100 showed it is 4 to 5 % of Mixtral's.
            uneven_routing=1.25,
            source="nanotron's device constants, passes over memory counted, host and overlap assumed",
        ),
        replace(
            _EFFICIENT,
            name="megatron",
            uses_vendor_attention=True,
            pipeline_chunks=5,
            fuses_kernels=True,
            elementwise_bytes=500.0,
            source="set on published runs with H100 and B200 (Megatron Bridge, NeMo, DGX Cloud)",
        ),
        replace(
            _EFFICIENT,
            name="megatron-2022",
            # In 16 bits: 13 forward (product, softmax, dropout with its mask, sum), 19 backward.
            score_bytes=32.0,
            fuses_kernels=True,
            elementwise_bytes=700.0,
            source="Megatron's before flash attention; meets published runs on A100",
        ),
        replace(
            _EFFICIENT,
            name="megatron-deepspeed",
            score_bytes=32.0,
            fuses_kernels=True,
            # All that its layers lose beside their products: set on BLOOM's tuning runs. MT-NLG is then
            # planned 6 to 11 % too fast, and LUMI's runs 5 % too slow in the median.
            elementwise_bytes=2000.0,
            source="set on BLOOM's tuning runs (A100, DeepSpeed's pipelines, before flash attention)",
        ),
        replace(
            _EFFICIENT,
            name="torchtitan",
            # Its usual reshard_after_forward.
            gathers_once=True,
            elementwise_bytes=800.0,
            selective_share=0.42,
            logit_bytes=10.0,
            layer_temporaries=2.0,
            source="set on its published figures",
        ),
        replace(
            _EFFICIENT,
            name="llm-foundry",
            attention_rate=0.6,
            elementwise_bytes=500.0,
            logit_bytes=4.0,
            source="set on its published figures",
        ),
    )
}


# What a trainer without a profile is taken for in a table.
NEAREST = "torchtitan"
_OLDER_SEQ_LEN, _OLDER_DEVICES = 2048, ("a100", "mi250")

# What trains like it, as far as is known.
_ALIKE = dict.fromkeys(
    (
        *("fsdp", "pytorch", "fms-fsdp", "lit-gpt", "litgpt", "olmo", "olmo-core"),
        *("lingua", "maxtext", "levanter", "colossalai", "picotron", "deepspeed"),
    ),
    NEAREST,
)
# Names under which runs from before flash attention were published too.
_LASTING = ("megatron", "megatron-lm")

# Other names of the same code, or of what is built on it.
_ALSO = {
    **_ALIKE,
    **dict.fromkeys(("megatron-lm", "megatron-core", "megatron-bridge", "nemo"), "megatron"),
    "gpt-neox": "megatron-deepspeed",
    "primus-megatron": "megatron",
    **dict.fromkeys(("llmfoundry", "composer"), "llm-foundry"),
}


def framework(name: str) -> Framework:
    """Return a profile by one of its names. Raises ConfigError with the names that exist."""
    if not is_known(name):
        raise ConfigError(f"framework={name} is not known; use {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[_own_name(name)]


def is_known(name: str) -> bool:
    """Whether there is a profile of this name."""
    return _own_name(name) in FRAMEWORKS


def published(name: str, device_name: str, seq_len: int) -> Framework:
    """Return the profile for a published run: of an unknown trainer that of the usual sharded data
    parallelism, and of Megatron-LM's sequences of up to 2,048 tokens on devices of that time the older one
    (`megatron-core` means the current one).
    """
    if not is_known(name):
        return FRAMEWORKS[NEAREST]
    is_older = seq_len <= _OLDER_SEQ_LEN and device_name.startswith(_OLDER_DEVICES)
    return FRAMEWORKS["megatron-2022"] if is_older and _plain(name) in _LASTING else framework(name)


def is_taken_for_another(name: str) -> bool:
    """Whether a trainer has no profile of its own, but that of one like it."""
    return not is_known(name) or _plain(name) in _ALIKE


def _own_name(name: str) -> str:
    wanted = _plain(name)
    return _ALSO.get(wanted, wanted)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
