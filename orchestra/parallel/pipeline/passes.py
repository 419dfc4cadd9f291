"""Runs the passes of a pipeline's schedule on one rank: forward, backward, or backward in two halves.

What is received is asked for one pass ahead; what is sent is not waited for. Between a stage's forward and
its backward pass the rank keeps the stage's input and its graph; the output itself goes with the message.
The loss is taken when the last stage's backward pass begins, since it gives its gradients at once.

A backward pass in two halves first gives the gradient of the stage's input, which the rank before waits for;
products of weights' gradients are kept (`LaterGradients`) and fill a gap afterwards.

Shape letters: A accumulated micro-batches, B sequences of one micro-batch, S sequence length, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from conf.schema import Config
from orchestra.model.transformer import Transformer
from orchestra.parallel.marks import marked
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.pipeline.links import Arriving, Links
from orchestra.parallel.zero.stages import Stage
from orchestra.precision.policies import policy
from orchestra.sizes.pipeline_check import turns
from orchestra.sizes.pipeline_schedule import Pass, PipelineShape, StagePass, pipeline_shape, schedule
from orchestra.sizes.step_shares import Part
from orchestra.sizes.topology import batch_shape


@dataclass(frozen=True)
class _InFlight:
    """What a rank keeps of a micro-batch between a stage's passes."""

    given: Tensor | None
    made: Tensor | GradientEdge


@dataclass(frozen=True)
class PassHooks:
    """What the passes tell while they run.

    `enter` is called with each action and its turn in the schedule before it begins, `around_backward` with
    the micro-batch and its loss (0 on ranks without the last stage). `loss_factor` returns what the loss is
    multiplied by; on ranks without it, the gradient that comes back.
    """

    enter: Callable[[StagePass, int], None]
    around_backward: Callable[[int, Tensor], AbstractContextManager[object]]
    loss_factor: Callable[[], float] = lambda: 1.0


class Pipeline:
    """One rank's stages of a pipeline. All methods are *collective* over it."""

    def __init__(self, model: Transformer, stage: Stage, config: Config, mesh: Mesh) -> None:
        self._model, self._stage, self._device = model, stage, mesh.device
        self._kind = config.parallelism.schedule
        self.shape: PipelineShape = pipeline_shape(config.parallelism)
        self._here = mesh.coordinates.pp
        self._stages = self.shape.stages_of(self._here)
        self._links = Links(mesh, self.shape)
        batch = batch_shape(config.train, mesh.layout.dp)
        num_parts = config.parallelism.cp
        if config.parallelism.sequence_parallel:
            num_parts *= config.parallelism.tp
        self._message = (batch.micro_batch_size, batch.seq_len // num_parts, config.model.hidden_size)
        self._dtype = policy(config.precision).parameter
        self._actions: dict[int, list[tuple[StagePass, int]]] = {}
        self._kept: dict[tuple[int, int], _InFlight] = {}
        self._later: dict[tuple[int, int], list[Callable[[], None]]] = {}
        # What a stage made for another one of this rank, and what is being received, by stage, micro-batch
        # and whether it goes to a forward pass.
        self._handed: dict[tuple[int, int, bool], Tensor] = {}
        self._arriving: dict[tuple[int, int, bool], Arriving] = {}

    def actions(self, num_micro_batches: int) -> list[tuple[StagePass, int]]:
        """Return this rank's actions in a step of so many micro-batches, each with its turn."""
        if num_micro_batches not in self._actions:
            lists = schedule(self._kind, self.shape, num_micro_batches)
            own = zip(lists[self._here], turns(lists, self.shape)[self._here], strict=True)
            self._actions[num_micro_batches] = list(own)
        return self._actions[num_micro_batches]

    def run(self, tokens_ABS: Tensor, share: float | Tensor, hooks: PassHooks) -> Tensor:
        """Run the passes of a step over micro-batches [A, B, S + 1] (int64, any device); return the summed
        loss of them on the rank of the last stage, 0 on others.
        """
        actions = self.actions(len(tokens_ABS))
        taking = [action for action, _ in actions if action.kind in (Pass.backward, Pass.weight_gradient)]
        last_of = {action.stage: action.micro_batch for action in taking}
        first_of = {action.stage: action.micro_batch for action in reversed(taking)}
        total = torch.zeros((), device=self._device)
        self._stage.begin_step(len(tokens_ABS))
        for number, (action, turn) in enumerate(actions):
            hooks.enter(action, turn)
            self._ask_for(action)
            following, moment = (
                next((ahead for ahead, _ in actions[number + 1 : number + 2]), None),
                self._links.now(),
            )
            if moment is None:
                self._ask_for(following)
            place = action.stage, action.micro_batch
            if action.kind in (Pass.backward, Pass.weight_gradient):
                self._stage.begin_backward(
                    is_first=first_of[action.stage] == action.micro_batch,
                    is_last=last_of[action.stage] == action.micro_batch,
                    part=self._stages.index(action.stage),
                )
            if action.kind is Pass.forward:
                self._forward(place, tokens_ABS[action.micro_batch])
            elif action.kind is Pass.weight_gradient:
                with marked(Part.backward), torch.no_grad():
                    # Each lets go of what it waited with as soon as it is done.
                    takes = self._later.pop(place)[::-1]
                    while takes:
                        takes.pop()()
            else:
                is_split = action.kind is Pass.input_gradient
                tokens_BS = tokens_ABS[action.micro_batch]
                total += self._backward(place, tokens_BS, share, hooks, is_split=is_split)
            if moment is not None:
                with self._links.since(moment):
                    self._ask_for(following)
        left = (self._kept, self._later, self._handed, self._arriving)
        assert not any(left), "the schedule left something over"
        self._links.finish()
        return total

    @torch.no_grad()
    def evaluate(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        """Return the summed loss of a micro-batch on the rank of the last stage, 0 on others."""
        loss = torch.zeros((), device=self._device)
        for stage in self._stages:
            x_BSE = self._through((stage, 0), tokens_BS, tokens_BS.to(self._device))[1]
            if self._is_last(stage):
                loss = self._model.loss_of(x_BSE, targets_BS.to(self._device), 1.0)
            else:
                self._pass_on(x_BSE, (stage, 0), is_onward=True)
        return loss

    def close(self) -> None:
        """Send nothing any more. *Any rank*."""
        self._links.close()

    def _is_last(self, stage: int) -> bool:
        return stage == self.shape.num_stages - 1

    def _ask_for(self, action: StagePass | None) -> None:
        """Start to receive what an action, if there is one, needs from another rank."""
        if action is None or action.kind is Pass.weight_gradient:
            return
        is_onward = action.kind is Pass.forward
        neighbour = action.stage + (-1 if is_onward else 1)
        key = action.stage, action.micro_batch, is_onward
        if not 0 <= neighbour < self.shape.num_stages or key in self._arriving or key in self._handed:
            return
        source = self.shape.rank_of(neighbour)
        if source != self._here:
            arriving = self._links.receive(self._message, self._dtype, source, is_onward=is_onward)
            self._arriving[key] = arriving

    def _taken(self, place: tuple[int, int], *, is_onward: bool) -> Tensor:
        """Return what the stage before, or after, made for this one."""
        key = *place, is_onward
        handed = self._handed.pop(key, None)
        return self._arriving.pop(key).wait() if handed is None else handed

    def _pass_on(self, tensor: Tensor, place: tuple[int, int], *, is_onward: bool) -> None:
        """Give a tensor to the next stage, or the one before."""
        neighbour = place[0] + (1 if is_onward else -1)
        target = self.shape.rank_of(neighbour)
        if target == self._here:
            self._handed[neighbour, place[1], is_onward] = tensor.detach()
        else:
            self._links.send(tensor, target, is_onward=is_onward)

    def _through(
        self, place: tuple[int, int], tokens_BS: Tensor, on_device_BS: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Return a stage's input and output [B, S, E]; the first one has no input. `on_device_BS`: the same
        tokens there.
        """
        stage, number = place[0], self._stages.index(place[0])
        given: Tensor | None = None
        if stage > 0:
            self._ask_for(StagePass(Pass.forward, *place))
            given = self._taken(place, is_onward=True)
            given.requires_grad_(torch.is_grad_enabled())
        # Where the tokens come from, so that nobody waits for them to arrive.
        bounds = self._model.document_bounds(tokens_BS)
        self._stage.begin_forward(number)
        with marked(Part.forward):
            return given, self._model.through(self._model.parts[number], on_device_BS, given, bounds)

    def _forward(self, place: tuple[int, int], tokens_BS: Tensor) -> None:
        # Moved as a whole and cut there: of a part of pinned memory the host would make a copy.
        on_device_BS = tokens_BS.to(self._device, non_blocking=True)
        given, made = self._through(place, tokens_BS[:, :-1], on_device_BS[:, :-1])
        if self._is_last(place[0]):
            self._kept[place] = _InFlight(given, made)
            return
        self._kept[place] = _InFlight(given, get_gradient_edge(made))
        self._pass_on(made, place, is_onward=True)

    def _backward(
        self,
        place: tuple[int, int],
        tokens_BS: Tensor,
        share: float | Tensor,
        hooks: PassHooks,
        *,
        is_split: bool,
    ) -> Tensor:
        """Take a micro-batch back through a stage; return its loss, 0 where that is not the last one."""
        kept, later = self._kept.pop(place), self._stage.gradients.later
        # Once for each rank: what its last stage passes back to another of its own is multiplied already.
        factor = hooks.loss_factor() if place[0] == max(self._stages) else 1.0
        loss = torch.zeros((), device=self._device)
        gradient: Tensor | None = None
        later.is_open = is_split
        if isinstance(kept.made, Tensor):
            with marked(Part.forward):
                tokens_BS = tokens_BS.to(self._device, non_blocking=True)
                made = self._model.loss_of(kept.made, tokens_BS[:, 1:], share * factor)
            root: Tensor | GradientEdge = made
            loss = made.detach()
        else:
            root, gradient = kept.made, self._taken(place, is_onward=False)
            gradient = gradient if factor == 1.0 else gradient * factor
        passing = self._stage.gradients.passing()
        with marked(Part.backward), hooks.around_backward(place[1], loss), passing:
            torch.autograd.backward(root, gradient)
        later.is_open = False
        if is_split:
            self._later[place] = later.kept()
        if kept.given is not None:
            assert kept.given.grad is not None
            self._pass_on(kept.given.grad, place, is_onward=False)
        return loss
