"""Searches the best layout of each model and number of GPUs, and looks up what it reached when it was run.

    python benchmarks/planner/picks.py playbook_h100.csv

`playbook.py` picks among the layouts that were measured. Here the planner chooses among all layouts that the
trainer of the table could have run (ZeRO 0 and 1, sequence parallelism with tp, no recomputation, no context
parallelism, tp of any width); the pick is the first of them, by predicted speed, that was measured and ran.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from playbook import Sample, samples

from conf.schema import Recompute
from orchestra.plan.predict import predict
from orchestra.plan.space import Fixed, LayoutChoice, MeshDegrees, Space, choice_of

# As in `score`: a pick that reaches this share of the best measured throughput counts as right.
_GOOD_PICK = 0.95
# nanotron shards the optimizer's state and nothing else.
_LARGEST_ZERO = 1

Key = tuple[MeshDegrees, int, int]


@dataclass(frozen=True)
class Pick:
    """A layout that was measured: its place among the predicted ones, and its share of the best measured."""

    key: Key
    place: int
    num_predicted: int
    share: float


def key_of(choice: LayoutChoice) -> Key:
    return choice.mesh, choice.zero, choice.micro_batch_size


def possible(space: Space) -> Iterator[LayoutChoice]:
    for choice in space.choices():
        is_split = choice.sequence_parallel == (choice.mesh.tp > 1)
        if choice.zero <= _LARGEST_ZERO and choice.shard_degree is None and is_split:
            yield choice


def pick(here: Sequence[Sample]) -> Pick | None:
    """Return the pick of a cell; None where nothing is predicted to fit or nothing ran."""
    base = here[0].case
    kept = Fixed(cp=1, recompute=Recompute.none)
    space = Space(base, base.tokens_per_step // base.seq_len, kept, wide=True)
    measured: dict[Key, float] = {}
    for sample in here:
        if sample.ran:
            key = key_of(choice_of(sample.case))
            measured[key] = max(measured.get(key, 0.0), float(sample.row["tokens_per_s_per_gpu"]))
    predicted = [(predict(space.case(choice)), choice) for choice in possible(space)]
    fitting = sorted((it for it in predicted if it[0].fits), key=lambda it: -it[0].tokens_per_s)
    for place, (_, choice) in enumerate(fitting):
        key = key_of(choice)
        if key in measured:
            return Pick(key, place, len(fitting), measured[key] / max(measured.values()))
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("table", type=Path, help="the measured runs, as CSV")
    cells: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples(parser.parse_args().table):
        cells[sample.row["model"], int(sample.row["num_gpus"])].append(sample)
    picks = {cell: pick(here) for cell, here in sorted(cells.items()) if any(it.ran for it in here)}
    for (model, num_gpus), it in picks.items():
        if it is None:
            print(f"{model:>4} {num_gpus:>4}  no layout that is predicted to fit was measured")
            continue
        mesh, zero, size = it.key
        layout = f"dp {mesh.dp}, tp {mesh.tp}, pp {mesh.pp}, zero {zero}, micro-batch {size}"
        place = f"{it.place + 1} of {it.num_predicted}"
        print(f"{model:>4} {num_gpus:>4}  {layout:<48} place {place:>9}  {it.share:5.0%} of the best")
    good = sum(it is not None and it.share >= _GOOD_PICK for it in picks.values())
    print(f"{good} of {len(picks)} picks reach {_GOOD_PICK:.0%} of the best measured")


if __name__ == "__main__":
    main()
