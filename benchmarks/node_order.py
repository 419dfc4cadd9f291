"""Bytes of a step between leaf switches, with nodes in a shuffled order and in that by topology.

    python benchmarks/node_order.py

A pure count (`orchestra.plan.leaf_traffic`); nothing is trained.
"""

from __future__ import annotations

import random
import statistics

from launchers.slurm.switches import ordered
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.plan.assemble import case_of
from orchestra.plan.case import PlanCase
from orchestra.plan.frameworks import OWN
from orchestra.plan.leaf_traffic import leaf_bytes
from orchestra.sizes.topology import node_blocks

_GIVEN = (
    "model=llama3_8b",
    "precision=bf16",
    "train.seq_len=8192",
    "train.global_batch_size=128",
    "train.micro_batch_size=1",
    "cluster=slurm",
    "cluster.hardware=h100",
    "cluster.device=cuda",
    "cluster.gpus_per_node=8",
)
_LAYOUTS = {
    "tp 8, dp": (
        "parallelism.tp=8",
        "parallelism.sequence_parallel=true",
    ),
    "tp 8, pp 4, dp": ("parallelism.tp=8", "parallelism.sequence_parallel=true", "parallelism.pp=4"),
    "tp 8, cp 2, dp": ("parallelism.tp=8", "parallelism.sequence_parallel=true", "parallelism.cp=2"),
    "ZeRO-3": ("parallelism.zero=3",),
}
_SHUFFLES = 100


def main() -> None:
    print("| network | layout | shuffled: mean of 100 (least to most) | by topology | ratio |")
    print("|---|---|---|---|---|")
    # Even leaves, and a job that got odd shares of them.
    for sizes in ((4, 4), (2, 2, 2, 2), (5, 3), (3, 2, 2, 1)):
        for name, overrides in _LAYOUTS.items():
            all_overrides = [*_GIVEN, *overrides, f"cluster.nodes={sum(sizes)}"]
            case = case_of(compose(all_overrides, Situation("plan")).config, OWN, None)
            _row(f"{len(sizes)} leaves of {sizes}", name, case, sizes)


def _row(network: str, name: str, case: PlanCase, sizes: tuple[int, ...]) -> None:
    leaves = [leaf for leaf, size in enumerate(sizes) for _ in range(size)]
    paths = {node: ("spine", f"leaf{leaf}") for node, leaf in enumerate(leaves)}
    blocks, draw = node_blocks(case.layout, case.devices_per_node), random.Random(0)
    before, after = [], []
    for _ in range(_SHUFFLES):
        nodes = list(paths)
        draw.shuffle(nodes)
        before.append(_gb(case, nodes, leaves))
        after.append(_gb(case, ordered(nodes, paths, blocks), leaves))
    mean, best = statistics.mean(before), max(after)
    ratio = f"{mean / best:.1f}" if best else "none is left"
    spread = f"{mean:.1f} GB ({min(before):.1f} to {max(before):.1f})"
    print(f"| {network} | {name} | {spread} | {best:.1f} GB | {ratio} |")


def _gb(case: PlanCase, nodes: list[int] | tuple[int, ...], leaves: list[int]) -> float:
    return sum(leaf_bytes(case, [leaves[node] for node in nodes]).values()) / 1e9


if __name__ == "__main__":
    main()
