"""Computes other ranks' steps again (`recovery.replay_every_steps`): a device that computes wrongly and says
nothing is told by its neighbours.

In a step of every so many each rank also takes the first micro-batch of the rank before it in data
parallelism, with the same parameters, and the loss and the local gradients of the two are compared: their
bits, before any reduction. Nothing of the training changes by it; it costs a micro-batch's time and the
memory of one more set of gradients. Where two differ all ranks take one more micro-batch, that of two places
before, to find out who is broken (`replay_verdict`), and nothing is updated.

A gradient's digest is the sum of its bits, each element's times an odd number of its place, modulo 2^64: it
does not depend on the order of the sum, and one flipped bit always changes it. What follows is not known
here.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.peers import Peers
from conf.schema import Config
from orchestra.errors import ConfigError, RollBackError
from orchestra.parallel.apply import Parallelized
from orchestra.parallel.marks import marked
from orchestra.parallel.mesh import Mesh
from orchestra.run.events import EventWriter
from orchestra.run.rollback import BROKEN_DEVICE, BadSteps
from orchestra.sizes.step_shares import Part
from orchestra.sizes.topology import Layout

# Who computed wrongly, from what several ranks made of the same micro-batch. Pure: it computes no step.
#
# Each rank's micro-batch is computed by itself and by the rank that comes next to it in data parallelism,
# which holds the same part of the model. Where the two differ a third rank, the one after that, computes it
# too: of three the one that differs from the others is broken. With two ranks there is no third one, and with
# three different results no majority: then nobody is named.


# Of the ranks of data parallelism: who computes a rank's micro-batch again, and who settles it.
SECOND, THIRD = 1, 2
_DATA_PARALLEL = ("replicate", "shard")


@dataclass(frozen=True)
class Outcome:
    """What a micro-batch came to: the digest of its loss and gradients, and for comparison with a tolerance
    the loss and the gradients' L2 norm.
    """

    digest: str
    loss: float
    norm: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Outcome:
        """Return the outcome that a word of JSON holds."""
        return cls(str(record["digest"]), float(record["loss"]), float(record["norm"]))


def agree(one: Outcome, other: Outcome, tolerance: float | None) -> bool:
    """Whether two ranks made the same of a micro-batch: bit for bit, or within a relative tolerance."""
    if tolerance is None:
        return one.digest == other.digest
    return _is_near(one.loss, other.loss, tolerance) and _is_near(one.norm, other.norm, tolerance)


def _is_near(one: float, other: float, tolerance: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        # Equal infinities say as little as two NaNs.
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= tolerance * max(abs(one), abs(other))


@dataclass(frozen=True)
class Difference:
    """A micro-batch of `rank` that came out differently when rank `by` computed it. `broken` is the one that
    a third rank speaks against; None: nobody could tell.
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
    own: Sequence[Outcome], second: Sequence[Outcome], layout: Layout, tolerance: float | None
) -> list[Difference]:
    """Return what the second computations brought to light.

    `own` by rank; `second` by the rank that computed, which is the one next to whose micro-batch it was.
    """
    found = []
    for rank, outcome in enumerate(own):
        by = partner(layout, rank, SECOND)
        if by is not None and not agree(outcome, second[by], tolerance):
            found.append(Difference(rank, by))
    return found


def settled(
    found: Sequence[Difference],
    own: Sequence[Outcome],
    second: Sequence[Outcome],
    third: Sequence[Outcome],
    layout: Layout,
    tolerance: float | None,
) -> list[Difference]:
    """Return the differences with what the third computations say, by the rank that computed."""
    return [Difference(it.rank, it.by, _broken(it, own, second, third, layout, tolerance)) for it in found]


def _broken(
    it: Difference,
    own: Sequence[Outcome],
    second: Sequence[Outcome],
    third: Sequence[Outcome],
    layout: Layout,
    tolerance: float | None,
) -> int | None:
    judge = partner(layout, it.rank, THIRD)
    if judge is None:
        return None
    is_like_own = agree(third[judge], own[it.rank], tolerance)
    is_like_second = agree(third[judge], second[it.by], tolerance)
    if is_like_own == is_like_second:
        return None
    return it.by if is_like_own else it.rank


# Elements that are looked at together: on a CPU as many as its caches hold, on a GPU enough to keep it busy.
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
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


def digest(tensor: Tensor, number: int) -> Tensor:
    """Return the digest of a tensor's bits as an int64 scalar on its device; `number` says which it is of."""
    bits = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    size = min(bits.numel(), _CHUNK[tensor.device.type])
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


class _Tally:
    """Adds up what one computation of a micro-batch comes to, on the device."""

    def __init__(self, device: torch.device) -> None:
        self._digest = torch.zeros((), dtype=torch.int64, device=device)
        self._squares = torch.zeros((), dtype=torch.float64, device=device)
        self.loss = torch.zeros((), device=device)

    @torch.no_grad()
    def add(self, gradient: Tensor, number: int) -> None:
        self._digest += digest(gradient, number + 1)
        self._squares += torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()

    def outcome(self) -> Outcome:
        """Return it. Waits for the device."""
        total = int(self._digest + digest(self.loss, 0))
        return Outcome(f"{total % (1 << 64):016x}", float(self.loss), float(self._squares.sqrt()))


@dataclass
class _Step:
    """A step that is being replayed on this rank."""

    number: int
    tokens: Tensor
    share: float | Tensor
    own: _Tally
    second: _Tally


class Replay:
    """One rank's part. All methods but `is_due` are *collective*, in the same steps.

    `events` is rank 0's; None on the others. Raises ConfigError where the ranks' devices are not alike and
    nothing says how far their results may differ.
    """

    def __init__(
        self,
        config: Config,
        parallelized: Parallelized,
        mesh: Mesh,
        peers: Peers,
        events: EventWriter | None,
        begin: int,
    ) -> None:
        self._every_steps = config.recovery.replay_every_steps
        self._tolerance = config.recovery.replay_tolerance
        self._model = parallelized.model
        self._parameters = [item.parameter for item in parallelized.trained]
        self._mesh = mesh
        self._peers = peers
        self._events = events
        # The last step of which nothing speaks against what was computed up to it.
        self._trusted = begin
        self._step: _Step | None = None
        if self._every_steps is not None:
            devices = peers.exchange("replay/devices", _device(mesh.device))
            _refuse_unlike(config, mesh, devices)

    def is_due(self, step: int) -> bool:
        """Whether `step` is to be computed twice."""
        return self._every_steps is not None and step % self._every_steps == 0

    def begin(self, step: int, tokens_BS: Tensor, share: float | Tensor) -> None:
        """Compute the first micro-batch of the rank before this one; `tokens_BS` is this rank's own.

        Before the step's own forward pass, with whose factor of the loss.
        """
        second = self._computed(tokens_BS, share, SECOND)
        self._step = _Step(step, tokens_BS, share, _Tally(self._mesh.device), second)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take down the gradients of this rank's own first micro-batch as its backward pass finishes them."""
        assert self._step is not None
        own = self._step.own

        def taker(number: int) -> Any:
            return lambda gradient: own.add(gradient, number)

        hooks = [it.register_hook(taker(number)) for number, it in enumerate(self._parameters)]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def saw(self, loss: Tensor) -> None:
        """Take down the loss of this rank's own first micro-batch, not yet summed over anything."""
        assert self._step is not None
        self._step.own.loss = loss.detach().clone()

    def compare(self) -> None:
        """Compare what the ranks have computed, before anything is updated. Waits for the device.

        Raises ReplayError, on all ranks, where they differ.
        """
        step, self._step = self._step, None
        assert step is not None
        layout, tolerance = self._mesh.layout, self._tolerance
        own, second, hosts = self._heard(step, "second", step.own.outcome(), step.second.outcome())
        found = differences(own, second, layout, tolerance)
        if not found:
            self._trusted = step.number
            return
        if self._has_third():
            outcome = self._computed(step.tokens, step.share, THIRD).outcome()
            _, third, _ = self._heard(step, "third", step.own.outcome(), outcome)
            found = settled(found, own, second, third, layout, tolerance)
        self._tell(step.number, found, hosts)
        words = _words(step.number, found, hosts)
        raise ReplayError(BadSteps(self._trusted + 1, step.number, BROKEN_DEVICE, words, leaves_out=False))

    def _has_third(self) -> bool:
        return self._mesh.layout.dp > THIRD

    def _computed(self, tokens_BS: Tensor, share: float | Tensor, shift: int) -> _Tally:
        """Compute the micro-batch of the rank `shift` places before this one."""
        tokens = self._received(tokens_BS, shift).to(self._mesh.device)
        tally = _Tally(self._mesh.device)
        loss = self._model(tokens[:, :-1], tokens[:, 1:], share)
        tally.loss = loss.detach().clone()
        # Not by `backward`: nobody who waits for this step's gradients may take these.
        for number, gradient in enumerate(torch.autograd.grad(loss, self._parameters)):
            tally.add(gradient, number)
        return tally

    def _received(self, tokens_BS: Tensor, shift: int) -> Tensor:
        """Send this rank's tokens `shift` places on, and return those that come from as many before."""
        mesh = self._mesh
        members = mesh.layout.neighbours(mesh.rank, ("replicate", "shard"))
        place = members.index(mesh.rank)
        to, source = members[(place + shift) % len(members)], members[(place - shift) % len(members)]
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

    def _heard(
        self, step: _Step, which: str, own: Outcome, other: Outcome
    ) -> tuple[list[Outcome], list[Outcome], list[str]]:
        """Return what all ranks have computed, for themselves and for others, and their hosts, by rank."""
        word = {"own": asdict(own), "other": asdict(other), "host": socket.gethostname()}
        with marked(Part.communication):
            words = self._peers.exchange(f"replay/{step.number}/{which}", word)
        owns = [Outcome.of(it["own"]) for it in words]
        others = [Outcome.of(it["other"]) for it in words]
        return owns, others, [str(it["host"]) for it in words]

    def _tell(self, step: int, found: Sequence[Difference], hosts: Sequence[str]) -> None:
        for it in found if self._events is not None else ():
            named = it.rank if it.broken is None else it.broken
            assert self._events is not None
            # A full disk takes the record; the roll-back needs one too, and fails there.
            with contextlib.suppress(OSError):
                self._events.write(
                    "replay_differs",
                    step=step,
                    rank=named,
                    host=hosts[named],
                    is_settled=it.broken is not None,
                    of_rank=it.rank,
                    by_rank=it.by,
                    hosts=[hosts[it.rank], hosts[it.by]],
                )


def _device(device: torch.device) -> str:
    """Return what computes: ranks where this differs may differ in the last bits."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        rows = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        rows = []
    name = next((row.partition(":")[2].strip() for row in rows if row.startswith("model name")), "cpu")
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _refuse_unlike(config: Config, mesh: Mesh, devices: Sequence[str]) -> None:
    recovery = config.recovery
    asked = f"recovery.replay_every_steps={recovery.replay_every_steps}"
    if mesh.layout.dp < SECOND + 1:
        raise ConfigError(f"{asked}: the run has one data-parallel rank, and nobody else to compute its step")
    if recovery.replay_tolerance is not None:
        return
    if len(set(devices)) > 1:
        raise ConfigError(
            f"{asked} compares bit for bit, and the ranks compute on {'; '.join(sorted(set(devices)))}; use "
            "like devices, or give recovery.replay_tolerance, e.g. 0.01"
        )
    if mesh.device.type == "cuda" and not config.train.deterministic:
        raise ConfigError(
            f"{asked} compares bit for bit, and GPUs may compute differently each time; use "
            "train.deterministic=true, or give recovery.replay_tolerance, e.g. 0.01"
        )


def _words(step: int, found: Sequence[Difference], hosts: Sequence[str]) -> str:
    broken = sorted({it.broken for it in found if it.broken is not None})
    if broken:
        named = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in broken)
        return f"step {step}: {named} computed a micro-batch differently from two other ranks"
    it = found[0]
    return (
        f"step {step}: rank {it.rank} on {hosts[it.rank]} and rank {it.by} on {hosts[it.by]} computed the "
        "same micro-batch differently; one of these two is broken, and no third rank could tell which"
    )
