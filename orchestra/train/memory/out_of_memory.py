"""What takes the memory of a rank, by formulas, and what to say when it runs out: what took how much, and
which three changes of the configuration would help most.

It allocates next to nothing, so that it still works when nothing is left. It counts what training keeps and
what a micro-batch adds; libraries, kernels' workspaces and fragments of memory are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

from conf.schema import Config, Device, Offload, Recompute, StateDType
from orchestra.errors import EXIT_DO_NOT_RESTART, ConfigError, TrainingError
from orchestra.model.loss import chunk_tokens
from orchestra.precision.dtypes import policy
from orchestra.sizes.activations import kinds_of_layers, layer_activations, peak_bytes
from orchestra.sizes.flops import num_parameters
from orchestra.sizes.topology import Layout, batch_shape, divisors, layout
from orchestra.sizes.units import GIB

_NUM_KNOBS = 3
_LONGEST_CHUNK_ADVISED = 1024
# What torch's allocator for the CPU says, which has no exception type of its own.
_CPU_WORDS = ("can't allocate memory", "cannot allocate memory", "not enough memory", "std::bad_alloc")


class OutOfMemoryError(TrainingError):
    """Raised when a rank's memory did not suffice; starting again helps only where it had sufficed before."""

    def __init__(self, message: str, *, had_trained: bool) -> None:
        super().__init__(message)
        if not had_trained:
            self.exit_code = EXIT_DO_NOT_RESTART


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one rank, by what they are for; the fields' names are what users read."""

    parameters: int
    gradients: int
    optimizer_state: int
    gathered_parameters: int
    activations: int
    loss_and_logits: int
    communication_buffers: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state, as the formulas of ZeRO count."""
        return self.parameters + self.gradients + self.optimizer_state


def memory_use(config: Config, degrees: Layout, *, is_gpu: bool) -> MemoryUse:
    """Return what a rank needs in a step, by formulas. Raises ConfigError where the batch or a budget does
    not fit.

    Gaps of flat buffers and what tensor parallelism replicates (norms) are left out: less than 2 % but in
    tiny models.
    """
    zero, shard, model = config.parallelism.zero, degrees.shard, config.model
    precision = policy(config.precision)
    size = num_parameters(model) / degrees.tp
    layer = (
        num_parameters(replace(model, num_hidden_layers=model.num_hidden_layers + 1))
    ) / degrees.tp - size
    width, gradient_width = precision.parameter.itemsize, precision.gradient.itemsize
    state_width = 2 * (2 if config.optim.state_dtype is StateDType.bf16 else 4)
    if precision.master is not precision.parameter:
        state_width += precision.master.itemsize
    is_split = zero == 3 and shard > 1
    on_host = config.parallelism.offload if is_gpu else Offload.none
    if on_host is not Offload.none:
        state_width = 0
    width_kept = 0 if on_host is Offload.all and is_split else width
    ends = model.vocab_size * model.hidden_size / degrees.tp
    bucket = config.parallelism.bucket_mib * 2**20
    unit = max(layer, ends) * precision.reduce.itemsize if is_split else min(bucket, size * width)
    kinds = kinds_of_layers(config, degrees.dp, is_gpu=is_gpu)
    kept = layer_activations(config, degrees.dp, is_gpu=is_gpu)
    return MemoryUse(
        parameters=round(size * width_kept / (shard if zero == 3 else 1)),
        gradients=round(size * gradient_width / (shard if zero >= 2 else 1)),
        optimizer_state=round(size * state_width / (shard if zero >= 1 else 1)),
        gathered_parameters=round((2 * layer + ends) * width) if is_split else 0,
        activations=peak_bytes(kept, kinds),
        loss_and_logits=_loss_bytes(config, degrees, width, is_gpu=is_gpu),
        # A unit that fills, one that is summed, and the messages of others.
        communication_buffers=round((3 if zero >= 2 else 1) * unit) if shard > 1 else 0,
    )


def _loss_bytes(config: Config, degrees: Layout, width: int, *, is_gpu: bool) -> int:
    """One chunk of logits in fp32 (two under tensor parallelism) beside the products' own, the hidden states'
    gradient, and the output matrix' gradient in fp32 and in its own type.
    """
    model, batch = config.model, batch_shape(config.train, degrees.dp)
    words = math.ceil(model.vocab_size / degrees.tp)
    tokens = batch.micro_batch_size * batch.seq_len
    chunk = min(tokens, config.train.loss_chunk_tokens or chunk_tokens(tokens, words, is_gpu))
    logits = chunk * words * (4 if width == 4 else 4 + width) * (2 if degrees.tp > 1 else 1)
    matrix = words * model.hidden_size * (4 if width == 4 else 4 + width)
    return logits + matrix + tokens * model.hidden_size * width


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(known in words for known in _CPU_WORDS)


def out_of_memory(
    error: BaseException, config: Config, degrees: Layout, device: torch.device, *, step: int, begin: int
) -> OutOfMemoryError:
    """Return the error that explains `error`, which ended a rank in `step` of an attempt that began behind
    step `begin`. *Any rank*.
    """
    had_trained = step > begin + 1
    found = str(error).strip().splitlines()
    where = f"step {step}" if step > begin else "the build, before the first step"
    lines = [f"out of memory on {device} in {where}: {found[0] if found else type(error).__name__}"]
    try:
        use = memory_use(config, degrees, is_gpu=device.type == "cuda")
    except ConfigError as problem:
        return OutOfMemoryError("\n".join([*lines, str(problem)]), had_trained=had_trained)
    batch = batch_shape(config.train, degrees.dp)
    lines.append(
        f"a rank of this layout needs about {_gib(use.total)}, with micro-batches of "
        f"{batch.micro_batch_size} × {batch.seq_len} tokens:"
    )
    lines += [
        f"  {field.name.replace('_', ' '):<22} {_gib(getattr(use, field.name)):>12}" for field in fields(use)
    ]
    lines += list(_device_lines(device))
    lines.append("what would help most:")
    lines += [
        f"  {knob.text} (about {_gib(knob.saved_bytes)} less)"
        for knob in best_knobs(config, degrees, use, device)
    ]
    return OutOfMemoryError("\n".join(lines), had_trained=had_trained)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.1f} MiB"


def _device_lines(device: torch.device) -> Iterator[str]:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        most = torch.cuda.max_memory_allocated(device)
        yield f"  the device has {_gib(total)}, {_gib(free)} free; tensors took at most {_gib(most)}"


@dataclass(frozen=True)
class Knob:
    """A change of the configuration, in the words of an override, and what it would save on a rank."""

    text: str
    saved_bytes: int


def best_knobs(config: Config, degrees: Layout, use: MemoryUse, device: torch.device) -> list[Knob]:
    """Return the three changes that would save most, by the same formulas; each taken by itself."""
    knobs = []
    for text, changed in _changes(config, degrees):
        try:
            again = layout(changed.parallelism, degrees.world_size)
            saved = use.total - memory_use(changed, again, is_gpu=device.type == "cuda").total
        except ConfigError:
            continue
        if saved > 0:
            knobs.append(Knob(text, saved))
    return sorted(knobs, key=lambda knob: -knob.saved_bytes)[:_NUM_KNOBS]


def _changes(config: Config, degrees: Layout) -> Iterator[tuple[str, Config]]:
    """Yield overrides that can make a rank need less, and the configuration with each."""
    train, parallelism, model = config.train, config.parallelism, config.model
    micro = batch_shape(train, degrees.dp).micro_batch_size
    smaller = [size for size in divisors(micro) if size <= micro // 2]
    if smaller:
        size = smaller[-1]
        yield (
            f"train.micro_batch_size={size} (or auto; the global batch stays)",
            replace(config, train=replace(train, micro_batch_size=size)),
        )
    if train.recompute_budget_gib is None:
        for kind in {Recompute.none: ("selective", "full"), Recompute.selective: ("full",)}.get(
            train.recompute, ()
        ):
            changed = replace(train, recompute=Recompute[kind], recompute_every=1)
            yield f"train.recompute={kind}", replace(config, train=changed)
    for zero in range(parallelism.zero + 1, 4):
        if degrees.dp > 1:
            changed_axes = replace(parallelism, zero=zero)
            yield f"parallelism.zero={zero}", replace(config, parallelism=changed_axes)
    if parallelism.offload is Offload.none and config.cluster.device is not Device.cpu:
        changed_axes = replace(parallelism, offload=Offload.optimizer)
        yield "parallelism.offload=optimizer", replace(config, parallelism=changed_axes)
    tp = 2 * degrees.tp
    counts = (
        degrees.world_size // (degrees.pp * degrees.cp),
        model.num_attention_heads,
        model.intermediate_size,
    )
    if all(count % tp == 0 for count in counts):
        yield f"parallelism.tp={tp}", replace(config, parallelism=replace(parallelism, dp="auto", tp=tp))
    chunk = min(micro * train.seq_len, train.loss_chunk_tokens or _LONGEST_CHUNK_ADVISED) // 2
    if chunk >= 1:
        changed = replace(train, loss_chunk_tokens=chunk)
        yield f"train.loss_chunk_tokens={chunk}", replace(config, train=changed)
    if train.seq_len > 1:
        changed = replace(train, seq_len=train.seq_len // 2, global_batch_size=_same_tokens(config, degrees))
        yield (
            f"train.seq_len={train.seq_len // 2}",
            replace(config, train=replace(changed, global_batch_tokens=None)),
        )


def _same_tokens(config: Config, degrees: Layout) -> int:
    """Return the global batch of sequences of half the length."""
    return 2 * batch_shape(config.train, degrees.dp).global_batch_size
