"""What carries activations and their gradients between the stages of a pipeline.

Shapes are known from the configuration: nobody asks the other end. Messages of the two kinds of passes, and
of the two directions between two ranks, never wait for each other: on NCCL each has a communicator of its
own, with gloo a tag. Over each of them a schedule sends in the order in which the other end receives.

All ranks of a pipeline make equally many communicators at the same time, since torch names groups by their
number and NCCL splits them off the world's together; a rank that has no part in a round has one for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from orchestra.parallel.marks import marked
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.shared_devices import NCCL
from orchestra.sizes.pipeline_schedule import PipelineShape
from orchestra.sizes.step_shares import Part

# Of torch's messages on one group: those of forward passes and those of backward passes.
_TAGS = {True: 11, False: 12}
_FAKE = "fake"


@dataclass(frozen=True)
class _Channel:
    """Messages of one kind of pass in one direction: the group that carries them, and the other rank."""

    group: dist.ProcessGroup
    peer: int
    tag: int


@dataclass(frozen=True)
class Arriving:
    """A tensor that is being received."""

    tensor: Tensor
    work: dist.Work | None
    device: torch.device

    def wait(self) -> Tensor:
        """Return it when what is computed next may read it."""
        if self.work is not None:
            with marked(Part.communication):
                self.work.wait()
        if self.tensor.is_cuda:
            self.tensor.record_stream(torch.cuda.current_stream(self.device))
        return self.tensor.to(self.device)


class Links:
    """This rank's channels to the ranks before and after it in the pipeline, by their coordinates on it.

    Making them is *collective* over the pipeline. `is_onward` says of a message that a forward pass made it.
    """

    def __init__(self, mesh: Mesh, shape: PipelineShape) -> None:
        self._traffic, self._device = mesh.traffic, mesh.device
        self._channels: dict[tuple[int, int, bool], _Channel] = {}
        here = mesh.coordinates.pp
        assert mesh.pp_group is not None
        self._here, self._is_real = here, dist.get_backend(mesh.pp_group) != _FAKE
        # gloo sends from host memory alone.
        self._in_host_memory = mesh.backend != NCCL
        self._sent: deque[Future[None] | tuple[dist.Work, Tensor]] = deque()
        # gloo does not say when a message was sent, unless somebody waits for it.
        waits = self._is_real and mesh.backend != NCCL
        self._waiting = ThreadPoolExecutor(1, "sent") if waits else None
        self._receiving = torch.cuda.Stream(mesh.device) if mesh.device.type == "cuda" else None  # type: ignore[no-untyped-call]
        has_own = self._is_real and mesh.backend == NCCL
        for used in rounds(_used(shape)):
            mine = next((channel for channel in used if here in channel[:2]), None)
            if mine is None:
                if has_own:
                    dist.new_group([mesh.rank], use_local_synchronization=True)
                continue
            source, target, is_onward = mine
            ends = [mesh.rank_on("pp", coordinate) for coordinate in (source, target)]
            group = mesh.pp_group
            if has_own:
                group = dist.new_group(sorted(ends), use_local_synchronization=True)
            peer = ends[0] if here == target else ends[1]
            channel = _Channel(group, peer, _TAGS[is_onward])
            self._channels[mine] = channel
            if has_own:
                self._connect(channel, is_source=here == source)

    def _connect(self, channel: _Channel, *, is_source: bool) -> None:
        """Send one number: the first message connects the two ends, and each host waits for the other one,
        which in the midst of a schedule may wait for this one.
        """
        number = torch.zeros(1, device=self._device)
        if is_source:
            dist.send(number, channel.peer, group=channel.group)
        else:
            dist.recv(number, channel.peer, group=channel.group)

    def send(self, tensor: Tensor, target: int, *, is_onward: bool) -> None:
        """Send a tensor; nobody waits, and it must not be changed."""
        channel = self._channels[self._here, target, is_onward]
        self._traffic.add_message(tensor.nbytes)
        self._forget_sent()
        if not self._is_real:
            return
        tensor = tensor.detach().contiguous()
        if self._in_host_memory:
            tensor = tensor.cpu()
        with marked(Part.communication):
            work = dist.isend(tensor, channel.peer, group=channel.group, tag=channel.tag)
        assert work is not None
        if self._waiting is None:
            self._sent.append((work, tensor))
        else:
            self._sent.append(self._waiting.submit(_hold, work, tensor))

    def now(self) -> torch.cuda.Event | None:
        """Return this moment in the stream that computes; None where nothing is received beside it."""
        if self._receiving is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextmanager
    def since(self, moment: torch.cuda.Event) -> Iterator[None]:
        """Let what is asked for here be received from that moment on, beside what was launched after it.

        It is asked for when that has been launched: a receive that waits for what this rank is still to do
        must not be on the device while the host may wait for all of the device.
        """
        assert self._receiving is not None
        self._receiving.wait_event(moment)
        with torch.cuda.stream(self._receiving):
            yield

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int, *, is_onward: bool) -> Arriving:
        """Start to receive a tensor."""
        channel = self._channels[source, self._here, is_onward]
        place = "cpu" if self._in_host_memory else self._device
        tensor = torch.empty(tuple(shape), dtype=dtype, device=place)
        if not self._is_real:
            return Arriving(tensor.zero_(), None, self._device)
        work = dist.irecv(tensor, channel.peer, group=channel.group, tag=channel.tag)
        return Arriving(tensor, work, self._device)

    def finish(self) -> None:
        """Wait until all that was sent has left. Raises what went wrong on the way."""
        with marked(Part.communication):
            while self._sent:
                sent = self._sent.popleft()
                if isinstance(sent, Future):
                    sent.result()
                else:
                    sent[0].wait()

    def close(self) -> None:
        """End the thread. Waits for nothing."""
        if self._waiting is not None:
            self._waiting.shutdown(wait=False)

    def _forget_sent(self) -> None:
        """Let go of what has left."""
        while self._sent:
            sent = self._sent[0]
            if not (sent.done() if isinstance(sent, Future) else sent[0].is_completed()):
                return
            if isinstance(sent, Future):
                sent.result()
            self._sent.popleft()


def _hold(work: dist.Work, tensor: Tensor) -> None:
    """Keep a tensor until it has been sent."""
    work.wait()
    del tensor


def _used(shape: PipelineShape) -> list[tuple[int, int, bool]]:
    """Return the channels of a pipeline, by source, target and whether they carry forward passes."""
    channels = set()
    for stage in range(shape.num_stages - 1):
        before, after = shape.rank_of(stage), shape.rank_of(stage + 1)
        if before != after:
            channels |= {(before, after, True), (after, before, False)}
    return sorted(channels)


def rounds(channels: Sequence[tuple[int, int, bool]]) -> list[list[tuple[int, int, bool]]]:
    """Share channels out into rounds, in each of which no rank has more than one."""
    shared: list[list[tuple[int, int, bool]]] = []
    for channel in channels:
        fitting = [used for used in shared if not {end for each in used for end in each[:2]} & {*channel[:2]}]
        if fitting:
            fitting[0].append(channel)
        else:
            shared.append([channel])
    return shared
