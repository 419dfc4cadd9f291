"""Brings the mixtures of a model to a mesh: shares out their experts over `parallelism.ep` ranks, and lets
what a router says of a whole sequence be of all of it.

The model keeps its parameters' names, and a checkpoint has the stacked experts of a layer as one tensor.

Shape letters: B sequences, N entries, S tokens of a sequence, K experts of a token, X experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import Config
from orchestra.model.mixture.balance import counts_of
from orchestra.model.mixture.mixture import Mixture, places_in_sequence
from orchestra.model.transformer import Transformer
from orchestra.parallel.context.sequence_parts import HeadAndTail
from orchestra.parallel.experts.exchanged_dispatch import ExchangedDispatch, ExchangeGroup
from orchestra.parallel.experts.expert_shares import ExpertShares
from orchestra.parallel.found_once import once
from orchestra.parallel.marks import Traffic, marked
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.places import TensorPlace, cut_place, is_of_experts
from orchestra.parallel.tensor.split import replace_parameter
from orchestra.parallel.uncompiled import leave_uncompiled
from orchestra.sizes.step_shares import Part


def share_experts(
    model: Transformer, places: Mapping[str, TensorPlace], config: Config, mesh: Mesh
) -> dict[str, TensorPlace]:
    """Leave a rank its own experts, on the meta device; return where each parameter's part lies. *Any rank*,
    after tensors are cut.
    """
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    for mixture in mixtures:
        _see_whole_sequences(mixture, config, mesh)
    if mesh.ep_group is None:
        return dict(places)
    shares = ExpertShares(config.model.num_experts, mesh.layout.ep)
    group = ExchangeGroup(mesh.ep_group, mesh.traffic)
    for mixture in mixtures:
        mixture.dispatch = ExchangedDispatch(group, shares)
    shared = dict(places)
    for name, place in places.items():
        if is_of_experts(name):
            shared[name] = cut_place(place, shares.cut(mesh.ep_index))
            replace_parameter(model, name, shared[name].padded)
        elif mesh.layout.shard == 1:
            # Each of the ranks that share the experts has all else, and one of them counts it.
            shared[name] = replace(place, is_counted=place.is_counted and mesh.ep_index == 0)
    return shared


def _see_whole_sequences(mixture: Mixture, config: Config, mesh: Mesh) -> None:
    """Let a mixture count its choices of whole sequences, of which other ranks have the rest."""
    if mesh.cp_group is not None:
        mixture.whole_length = config.train.seq_len
        mixture.places = PlacesOverRanks(mesh.cp_group, mesh.traffic)


@dataclass(frozen=True)
class PlacesOverRanks:
    """Takes the place of `places_in_sequence` where each rank has the head and the tail of its own of each
    sequence. *Collective*.
    """

    group: dist.ProcessGroup
    traffic: Traffic

    def __post_init__(self) -> None:
        leave_uncompiled(PlacesOverRanks)

    def __call__(self, experts_BN: Tensor, num_experts: int) -> Tensor:
        """Return how many choices of the same expert come before each one in its sequence."""
        part = HeadAndTail(self.group.size(), self.group.rank())
        num, half = len(experts_BN), experts_BN.shape[1] // 2
        pieces = [experts_BN[:, :half], experts_BN[:, half:]]
        own_BPX = torch.stack([counts_of(piece, num_experts) for piece in pieces], dim=1)

        def of_all_ranks() -> Tensor:
            # By pieces of the sequence.
            counts_BPX = own_BPX.new_zeros(num, 2 * part.degree, num_experts)
            counts_BPX[:, list(part.pieces)] = own_BPX
            self.traffic.add_all_reduce(counts_BPX.nbytes, part.degree)
            with marked(Part.communication):
                dist.all_reduce(counts_BPX, group=self.group)
            return counts_BPX

        counts_BPX = once(of_all_ranks)
        before_BPX = counts_BPX.cumsum(1) - counts_BPX
        found = [
            places_in_sequence(piece, num_experts) + before_BPX[:, number].gather(1, piece)
            for piece, number in zip(pieces, part.pieces, strict=True)
        ]
        return torch.cat(found, dim=1)
