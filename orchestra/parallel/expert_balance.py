"""What a model's mixtures of experts need beside the passes: memory for their buffers, the scale of their
losses, and after each step the sum of their counters over all ranks, which moves the biases and tells how
evenly the experts are loaded.

Layers are numbered over the whole model, so that the ranks of a pipeline sum up to all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn

from conf.schema import Config, ExpertPlacement, ModelConfig, MoeBalance
from orchestra.model.mixture.balance import STATISTICS, Balance, updated_bias
from orchestra.model.mixture.mixture import Mixture
from orchestra.model.transformer import Transformer
from orchestra.parallel.experts.expert_shares import ExpertShares
from orchestra.parallel.found_once import once
from orchestra.parallel.marks import marked
from orchestra.parallel.mesh import Mesh
from orchestra.sizes.step_shares import Part

_BIAS = "layers.{}.mlp.gate.e_score_correction_bias"
# What the counters of a layer end with, after its experts.
_ALSO = ("dropped", *STATISTICS)


def mixtures_of(model: Transformer) -> dict[int, Mixture]:
    """Return the mixtures that are here by the numbers of their layers in the model."""
    found = {}
    for number, layer in model.numbered_layers():
        mixture = getattr(layer, "mlp", None)
        if isinstance(mixture, Mixture):
            found[number] = mixture
    return found


def mixture_layers(model: ModelConfig) -> range:
    """Return the numbers of the layers that are mixtures, wherever they are."""
    return range(model.first_k_dense_replace, model.num_hidden_layers) if model.num_experts else range(0)


def set_up_mixtures(model: Transformer, config: Config, mesh: Mesh) -> ExpertBalance | None:
    """Give the mixtures' buffers their memory and sum what their losses need over ranks; None for a model
    without. *Any rank*.
    """
    mixtures = mixtures_of(model)
    layers = mixture_layers(config.model)
    if not layers:
        return None
    for mixture in mixtures.values():
        _place_buffers(mixture, mesh.device)
        if mesh.data_group is not None and mixture.balance.is_of_batch:
            mixture.balance.totals = functools.partial(_summed, mesh.data_group)
        if mesh.cp_group is not None:
            mixture.balance.sequence_totals = functools.partial(_summed, mesh.cp_group)
    is_followed = config.parallelism.expert_placement is ExpertPlacement.auto
    return ExpertBalance(mixtures, config.model, mesh, is_followed=is_followed)


def _place_buffers(module: nn.Module, device: torch.device) -> None:
    """Put zeros in the place of buffers on the meta device."""
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)


def _summed(group: dist.ProcessGroup, counts: Tensor) -> Tensor:
    """Return the sum over the ranks of a group. *Collective*."""

    def total() -> Tensor:
        # torch's functional collectives take any string, and call the type of some of them a name.
        return functional.wait_tensor(functional.all_reduce(counts, "sum", group))  # type: ignore[no-any-return, no-untyped-call]

    # What is compiled knows by itself what it repeats.
    return total() if torch.compiler.is_compiling() else once(total)


@dataclass(frozen=True)
class LayerLoad:
    """How evenly the experts of one layer were loaded in a step: the tokens of each, and of what all tokens
    have the mean entropy of their scores (nats) and the mean squared log-sum-exp of their logits.
    """

    tokens_per_expert: list[int]
    dropped: int
    entropy: float
    router_z: float

    @property
    def largest_over_mean(self) -> float:
        """The tokens of the busiest expert over those of the mean one: 1 where all are alike."""
        total = sum(self.tokens_per_expert)
        return max(self.tokens_per_expert) * len(self.tokens_per_expert) / total if total else 1.0


class ExpertBalance:
    """The counters and biases of all mixtures of a model over the steps of a training. *Collective* over the
    ranks whose losses add up.

    `shares` say which ranks have the experts of each layer; empty where each has all. `is_followed`: the
    tokens of several steps are counted too.
    """

    def __init__(
        self, mixtures: Mapping[int, Mixture], model: ModelConfig, mesh: Mesh, *, is_followed: bool = False
    ) -> None:
        self._mixtures = mixtures
        self._layers = mixture_layers(model)
        self._rate = model.moe_bias_update_rate if model.moe_balance is MoeBalance.bias else 0.0
        self._mesh = mesh
        self._num_experts = model.num_experts
        # The last step's counters of all layers, as fp64, which holds whole numbers up to 2^53.
        self._last: Tensor | None = None
        ep = mesh.layout.ep
        self.shares = {number: ExpertShares(model.num_experts, ep) for number in self._layers if ep > 1}
        self._since: Tensor | None = None
        if is_followed and ep > 1:
            size = len(self._layers), model.num_experts
            self._since = torch.zeros(size, dtype=torch.float64, device=mesh.device)
        has_bias = model.moe_balance is MoeBalance.bias
        # The state that a checkpoint has: of the layers that are here, and the shapes of all of them.
        self.biases: dict[str, Tensor] = {}
        for number, mixture in mixtures.items():
            if mixture.gate.e_score_correction_bias is not None:
                self.biases[_BIAS.format(number)] = mixture.gate.e_score_correction_bias
        self.shapes = {_BIAS.format(number): (model.num_experts,) for number in self._layers if has_bias}

    def begin_step(self, share: float | Tensor) -> None:
        """Scale the mixtures' losses by the share of a token in the global batch."""
        for mixture in self._mixtures.values():
            loss_share = mixture.balance.loss_share
            if isinstance(share, Tensor):
                loss_share.copy_(share)
            else:
                loss_share.fill_(share)

    @torch.no_grad()
    def end_step(self, is_left_out: Tensor) -> None:
        """Sum the counters of a step, move the biases unless its update was left out, and count anew."""
        counters = [self._counters(number) for number in self._layers]
        summed = torch.stack(counters)
        if self._mesh.loss_group is not None:
            self._mesh.traffic.add_all_reduce(summed.nbytes, dist.get_world_size(self._mesh.loss_group))
            with marked(Part.communication):
                dist.all_reduce(summed, group=self._mesh.loss_group)
        self._last = summed
        if self._since is not None:
            self._since += summed[:, : self._num_experts]
        for number, mixture in self._mixtures.items():
            bias = mixture.gate.e_score_correction_bias
            if bias is not None and self._rate:
                counts = summed[number - self._layers.start, : self._num_experts]
                bias.copy_(torch.where(is_left_out, bias, updated_bias(bias, counts, self._rate)))
            mixture.balance.reset()

    def _counters(self, number: int) -> Tensor:
        """Return what a layer has counted, zeros of one that is elsewhere."""
        mixture = self._mixtures.get(number)
        if mixture is None:
            size = self._num_experts + len(_ALSO)
            return torch.zeros(size, dtype=torch.float64, device=self._mesh.device)
        balance: Balance = mixture.balance
        counts = torch.cat([balance.tokens_per_expert, balance.dropped[None]])
        return torch.cat([counts.double(), balance.statistics])

    def loads(self) -> dict[int, LayerLoad]:
        """Return how the experts of each layer were loaded in the last step. Waits for the device."""
        if self._last is None:
            return {}
        loads = {}
        for number, row in zip(self._layers, self._last.tolist(), strict=True):
            also = dict(zip(_ALSO, row[self._num_experts :], strict=True))
            tokens = also["tokens"] or 1.0
            counts = [int(count) for count in row[: self._num_experts]]
            loads[number] = LayerLoad(
                counts, int(also["dropped"]), also["entropy"] / tokens, also["router_z"] / tokens
            )
        return loads

    def tokens_since(self) -> dict[int, list[int]]:
        """Return the tokens of each expert by layer, of all steps since they were counted anew. Waits for the
        device.
        """
        assert self._since is not None, "nobody has asked to follow them"
        rows = self._since.tolist()
        return {number: list(map(int, row)) for number, row in zip(self._layers, rows, strict=True)}

    def count_anew(self, tokens: Mapping[int, list[int]]) -> None:
        """Let `tokens_since` begin with these tokens, and with none where there are none."""
        assert self._since is not None, "nobody has asked to follow them"
        self._since.zero_()
        for number, of_experts in tokens.items():
            self._since[number - self._layers.start] = torch.tensor(of_experts, dtype=self._since.dtype)

    def columns(self) -> dict[str, float | list[int]]:
        """Return what a row of metrics.jsonl says of the last step. Waits for the device."""
        loads = self.loads()
        if not loads:
            return {}
        columns: dict[str, float | list[int]] = {
            "moe/load": max(load.largest_over_mean for load in loads.values()),
            "moe/load_mean": sum(load.largest_over_mean for load in loads.values()) / len(loads),
            "moe/entropy": sum(load.entropy for load in loads.values()) / len(loads),
            "moe/router_z": sum(load.router_z for load in loads.values()) / len(loads),
            "moe/dropped_tokens": sum(load.dropped for load in loads.values()),
        }
        if self.shares:
            columns["moe/rank_load"] = max(
                self.shares[number].largest_over_mean(load.tokens_per_expert)
                for number, load in loads.items()
            )
        for number, load in loads.items():
            columns[f"moe/layer_{number}/load"] = load.largest_over_mean
            columns[f"moe/layer_{number}/entropy"] = load.entropy
            columns[f"moe/layer_{number}/tokens_per_expert"] = load.tokens_per_expert
        return columns
