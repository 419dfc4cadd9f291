"""Computes other ranks' steps again (`recovery.replay_every_steps`), to find a device that computes wrongly
and reports no error.

In a step of every so many each rank also takes the first micro-batch of the rank before it in data
parallelism, with the same parameters, and the loss and the local gradients of the two are compared: their
bits, before any reduction. Nothing of the training changes by it; it costs a micro-batch's time and memory
(`orchestra.sizes.memory`): each gradient exists besides until it has been looked at. Where two differ all
ranks take one more micro-batch, that of two places before, to find out which rank is broken, and nothing is
updated.

Each rank's micro-batch is computed by itself and by the rank that comes next to it in data parallelism, which
holds the same part of the model. Where the two differ a third rank, the one after that, computes it too: of
three the one that differs from the others is broken. With two ranks there is no third one, and with three
different results no majority: then no rank is named.

What multiplies a rank's loss on purpose (`recovery.inject`) does so where others compute it again too: no
device is broken.

A gradient's digest is the sum of its bits, each element's times an odd number of its place, modulo 2^64: it
does not depend on the order of the sum, and one flipped bit always changes it.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.peers import Peers
from conf.schema import RecoveryConfig
from orchestra.errors import ConfigError, RollBackError
from orchestra.model.mixture.balance import uncounted
from orchestra.parallel.apply import Parallelized
from orchestra.parallel.marks import marked
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.zero.reducer import Watcher
from orchestra.run.events import EventWriter
from orchestra.run.rollback import BROKEN_DEVICE, BadSteps
from orchestra.sizes.memory.replay_memory import REPLAYED_CPU, REPLAYED_GPU
from orchestra.sizes.step_shares import Part
from orchestra.sizes.topology import Layout
from orchestra.train.hooks import StepHook
from orchestra.train.metrics import cpu_name

# How many places further in data parallelism the rank is that computes a rank's micro-batch again, and the
# one that settles a difference.
SECOND, THIRD = 1, 2
_DATA_PARALLEL = ("dp",)


@dataclass(frozen=True)
class ComputedMicroBatch:
    """What a rank computed of a micro-batch: the digest of its loss and gradients, and for comparison with a
    tolerance the loss and the gradients' L2 norm.
    """

    digest: str
    loss: float
    norm: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> ComputedMicroBatch:
        """Return the one that JSON from another rank holds."""
        return cls(str(record["digest"]), float(record["loss"]), float(record["norm"]))


def agree(one: ComputedMicroBatch, other: ComputedMicroBatch, tolerance: float | None) -> bool:
    """Whether two ranks computed the same of a micro-batch: bit for bit, or within a relative tolerance."""
    if tolerance is None:
        return one.digest == other.digest
    return _is_near(one.loss, other.loss, tolerance) and _is_near(one.norm, other.norm, tolerance)


def _is_near(one: float, other: float, tolerance: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        # Two infinities can be compared as little as two NaNs.
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


@dataclass(frozen=True)
class DifferingMicroBatch:
    """A micro-batch of `rank` that came out differently when rank `by` computed it. `broken` is the one of
    the two that a third rank differs from; None: no third rank could tell.
    """

    rank: int
    by: int
    broken: int | None = None


def partner(layout: Layout, rank: int, shift: int) -> int | None:
    """Return the rank so many places further in data parallelism; None where that is no third one."""
    members = layout.neighbours(rank, _DATA_PARALLEL)
    if shift >= len(members):
        return None
    return members[(members.index(rank) + shift) % len(members)]


def differences(
    own: Sequence[ComputedMicroBatch],
    second: Sequence[ComputedMicroBatch],
    third: Sequence[ComputedMicroBatch] | None,
    layout: Layout,
    tolerance: float | None,
) -> list[DifferingMicroBatch]:
    """Return the micro-batches whose first and second computation differ, with the broken rank where a third
    computation tells it.

    `own` by rank; `second` and `third` by the rank that computed, which is one and two places further in data
    parallelism than the rank whose micro-batch it was. `third` is None before that was asked for.
    """
    differing = []
    for rank in range(len(own)):
        by = partner(layout, rank, SECOND)
        if by is None or agree(own[rank], second[by], tolerance):
            continue
        broken = None
        third_rank = partner(layout, rank, THIRD)
        if third is not None and third_rank is not None:
            is_like_own = agree(third[third_rank], own[rank], tolerance)
            if is_like_own != agree(third[third_rank], second[by], tolerance):
                broken = by if is_like_own else rank
        differing.append(DifferingMicroBatch(rank, by, broken))
    return differing


# Elements that are looked at together.
_CHUNK = {"cpu": REPLAYED_CPU, "cuda": REPLAYED_GPU}
# Odd: splitmix64's increment (Steele, Lea and Flood, OOPSLA 2014), as a signed number.
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Direct messages of tokens must not be taken for those of the gradients.
_TAG = 21


class ReplayError(RollBackError):
    """Raised on all ranks where a step that was computed twice came out differently."""

    def __init__(self, bad: BadSteps) -> None:
        super().__init__(bad.words)
        self.bad = bad


def digest(tensor: Tensor, number: int, chunk: int | None = None) -> Tensor:
    """Return the digest of a tensor's bits as an int64 scalar on its device; `number` says which it is of.

    `chunk`: elements that are looked at together, which changes nothing of it; None: what suits the device.
    """
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    size = min(bits.numel(), chunk or _CHUNK[tensor.device.type])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    factors = (torch.arange(size, device=tensor.device) * 2 + 1) * _FACTOR
    for begin in range(0, bits.numel(), max(1, size)):
        part = bits[begin : begin + size].to(torch.int64)
        # What the places before this chunk add to each factor; it may exceed 64 bits.
        before = _signed(2 * begin * _FACTOR)
        total += (part * (factors[: part.numel()] + before)).sum()
    return total * (2 * number + 1)


def _signed(value: int) -> int:
    """Return a number modulo 2^64 as torch's int64 holds it."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


class _GradientSums:
    """Adds up the digests and squares of one micro-batch's gradients, on the device."""

    def __init__(self, device: torch.device, chunk: int | None = None) -> None:
        self._chunk = chunk or _CHUNK[device.type]
        self._digest = torch.zeros((), dtype=torch.int64, device=device)
        self._squares = torch.zeros((), dtype=torch.float64, device=device)
        self.loss = torch.zeros((), device=device)

    @torch.no_grad()
    def add(self, gradient: Tensor, number: int) -> None:
        self._digest += digest(gradient, number + 1, self._chunk)
        # On a CPU the norm of a 16-bit tensor is taken of a copy in fp32.
        for part in torch.split(gradient.reshape(-1), self._chunk):
            self._squares += torch.linalg.vector_norm(part, dtype=torch.float32).double().square()

    def computed(self) -> ComputedMicroBatch:
        """Return the digest, the loss and the norm. Waits for the device."""
        total = int(self._digest + digest(self.loss, 0))
        return ComputedMicroBatch(f"{total % (1 << 64):016x}", float(self.loss), float(self._squares.sqrt()))


@dataclass
class _ReplayedStep:
    """A step that is being computed twice: this rank's own first micro-batch, and the other rank's."""

    number: int
    tokens: Tensor
    share: float | Tensor
    own: _GradientSums
    second: _GradientSums


def _loss_apart(
    parallelized: Parallelized, tokens_BS: Tensor, share: float | Tensor, watcher: Watcher
) -> Tensor:
    """Compute a micro-batch that is none of the training's; return its loss. Nothing else of it is kept."""
    with parallelized.stage.gradients.apart(watcher), uncounted():
        loss = parallelized.model(tokens_BS[:, :-1], tokens_BS[:, 1:], share)
        kept: Tensor = loss.detach().clone()
        loss.backward()
    return kept


def rehearse(parallelized: Parallelized, tokens_BS: Tensor, *, as_gpu: bool = False) -> None:
    """Take the memory that computing a micro-batch [B, S + 1] again takes, without comparing anything;
    `as_gpu`: as much as on a GPU. *Any rank*.
    """
    chunk = REPLAYED_GPU if as_gpu else _CHUNK[tokens_BS.device.type]
    sums = _GradientSums(tokens_BS.device, chunk)
    # One chunk takes as much as all.
    _loss_apart(parallelized, tokens_BS, 1.0, lambda _, it: sums.add(it.reshape(-1)[:chunk], 0))


class Replay(StepHook):
    """Computes a neighbour's micro-batch again, on one rank. *Collective*, in the same steps.

    `is_deterministic` is `train.deterministic`. `events` is rank 0's; None on the others. `begin` is the step
    that the attempt began after. `factor_of`: what the loss of a rank is multiplied by in a step. Raises
    ConfigError where devices differ and no tolerance is given.
    """

    def __init__(
        self,
        config: RecoveryConfig,
        is_deterministic: bool,
        parallelized: Parallelized,
        mesh: Mesh,
        peers: Peers,
        events: EventWriter | None,
        begin: int,
        factor_of: Callable[[int, int], float] = lambda rank, step: 1.0,  # noqa: ARG005
    ) -> None:
        self._factor_of = factor_of
        self._every_steps = config.replay_every_steps
        self._tolerance = config.replay_tolerance
        self._parallelized = parallelized
        self._gradients = parallelized.stage.gradients
        self._numbers = {item.name: number for number, item in enumerate(parallelized.trained)}
        self._mesh = mesh
        self._peers = peers
        self._events = events
        # The last step whose two computations agreed.
        self._last_agreed = begin
        self._step: _ReplayedStep | None = None
        self._watching = contextlib.ExitStack()
        if self._every_steps is not None:
            devices = peers.exchange("replay/devices", _device(mesh.device))
            _refuse_unlike(config, is_deterministic, mesh, devices)

    def before_forward(self, step: int, tokens_ABS: Tensor, share: float | Tensor) -> None:
        """Compute the first micro-batch of the rank before this one, in a step that is due."""
        if self._every_steps is None or step % self._every_steps:
            return
        own = _GradientSums(self._mesh.device)
        second = self._computed(step, tokens_ABS[0], share, SECOND)
        self._step = _ReplayedStep(step, tokens_ABS[0], share, own, second)
        # From here: the loss gives its gradients in the forward pass.
        self._watching.enter_context(self._gradients.watched(self._adder(own)))

    def around_backward(
        self,
        step: int,  # noqa: ARG002
        micro_batch: int,
        loss: Tensor,
    ) -> AbstractContextManager[object]:
        """Keep the loss of this rank's own first micro-batch, and end the adding up of its gradients."""
        if self._step is None or micro_batch:
            return nullcontext()
        self._step.own.loss = loss.detach().clone()
        return self._watching

    def _adder(self, sums: _GradientSums) -> Watcher:
        return lambda name, gradient: sums.add(gradient, self._numbers[name])

    def after_backward(self, step: int) -> None:
        """Compare what the ranks have computed, before anything is updated. Waits for the device.

        Raises ReplayError, on all ranks, where they differ.
        """
        replayed, self._step = self._step, None
        if replayed is None:
            return
        layout, tolerance = self._mesh.layout, self._tolerance
        own, second, hosts = self._exchanged(replayed, "second", replayed.second.computed())
        differing = differences(own, second, None, layout, tolerance)
        if not differing:
            self._last_agreed = step
            return
        if layout.dp > THIRD:
            computed = self._computed(step, replayed.tokens, replayed.share, THIRD).computed()
            _, third, _ = self._exchanged(replayed, "third", computed)
            differing = differences(own, second, third, layout, tolerance)
        self._record(step, differing, hosts)
        words = _words(step, differing, hosts)
        raise ReplayError(BadSteps(self._last_agreed + 1, step, BROKEN_DEVICE, words, leaves_out=False))

    def _computed(self, step: int, tokens_BS: Tensor, share: float | Tensor, shift: int) -> _GradientSums:
        """Compute the micro-batch of the rank `shift` places before this one."""
        tokens = self._received(tokens_BS, shift).to(self._mesh.device)
        _, source = self._neighbours(shift)
        if (factor := self._factor_of(source, step)) != 1.0:
            share = share * factor
        sums = _GradientSums(self._mesh.device)
        sums.loss = _loss_apart(self._parallelized, tokens, share, self._adder(sums))
        return sums

    def _neighbours(self, shift: int) -> tuple[int, int]:
        """Return the ranks so many places after and before this one in data parallelism."""
        members = self._mesh.layout.neighbours(self._mesh.rank, _DATA_PARALLEL)
        place = members.index(self._mesh.rank)
        return members[(place + shift) % len(members)], members[(place - shift) % len(members)]

    def _received(self, tokens_BS: Tensor, shift: int) -> Tensor:
        """Send this rank's tokens `shift` places on, and return those that come from as many before."""
        mesh, (to, source) = self._mesh, self._neighbours(shift)
        mine = tokens_BS.to(mesh.device).contiguous()
        theirs = torch.empty_like(mine)
        with marked(Part.communication):
            messages = [
                dist.P2POp(dist.isend, mine, to, mesh.dp_group, _TAG),
                dist.P2POp(dist.irecv, theirs, source, mesh.dp_group, _TAG),
            ]
            for work in dist.batch_isend_irecv(messages):
                work.wait()
        return theirs

    def _exchanged(
        self, step: _ReplayedStep, which: str, other: ComputedMicroBatch
    ) -> tuple[list[ComputedMicroBatch], list[ComputedMicroBatch], list[str]]:
        """Return what all ranks have computed, for themselves and for others, and their hosts, by rank."""
        own = step.own.computed()
        record = {"own": asdict(own), "other": asdict(other), "host": socket.gethostname()}
        with marked(Part.communication):
            records = self._peers.exchange(f"replay/{step.number}/{which}", record)
        owns = [ComputedMicroBatch.of(each["own"]) for each in records]
        others = [ComputedMicroBatch.of(each["other"]) for each in records]
        return owns, others, [str(each["host"]) for each in records]

    def _record(self, step: int, differing: Sequence[DifferingMicroBatch], hosts: Sequence[str]) -> None:
        """Record the differences. *Rank 0 only*; the other ranks have no events."""
        if self._events is None:
            return
        for difference in differing:
            named = difference.rank if difference.broken is None else difference.broken
            # A full disk takes the record; the roll-back needs one too, and fails there.
            with contextlib.suppress(OSError):
                self._events.write(
                    "replay_differs",
                    step=step,
                    rank=named,
                    host=hosts[named],
                    is_settled=difference.broken is not None,
                    of_rank=difference.rank,
                    by_rank=difference.by,
                    hosts=[hosts[difference.rank], hosts[difference.by]],
                )


def _device(device: torch.device) -> str:
    """Return what computes: ranks where this differs may differ in the last bits."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def _refuse_unlike(
    recovery: RecoveryConfig, is_deterministic: bool, mesh: Mesh, devices: Sequence[str]
) -> None:
    asked = f"recovery.replay_every_steps={recovery.replay_every_steps}"
    if mesh.layout.dp < SECOND + 1:
        raise ConfigError(
            f"{asked}: the run has one data-parallel rank, and no other one that could compute its step; use "
            "parallelism.dp=2 or more, or recovery.replay_every_steps=null"
        )
    if recovery.replay_tolerance is not None:
        return
    if len(set(devices)) > 1:
        raise ConfigError(
            f"{asked} compares bit for bit, and the ranks compute on {'; '.join(sorted(set(devices)))}; use "
            "like devices, or give recovery.replay_tolerance, e.g. 0.01"
        )
    if mesh.device.type == "cuda" and not is_deterministic:
        raise ConfigError(
            f"{asked} compares bit for bit, and GPUs may compute differently each time; use "
            "train.deterministic=true, or give recovery.replay_tolerance, e.g. 0.01"
        )


def _words(step: int, differing: Sequence[DifferingMicroBatch], hosts: Sequence[str]) -> str:
    broken = sorted({difference.broken for difference in differing if difference.broken is not None})
    if broken:
        named = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in broken)
        return f"step {step}: {named} computed a micro-batch differently from two other ranks"
    rank, by = differing[0].rank, differing[0].by
    return (
        f"step {step}: rank {rank} on {hosts[rank]} and rank {by} on {hosts[by]} computed the "
        "same micro-batch differently; one of these two is broken, and no third rank could tell which"
    )
