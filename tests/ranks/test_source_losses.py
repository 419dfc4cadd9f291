"""The training's loss by source of a blend: its sums are the whole, and no bit of the training changes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pool import Ranks
from small_trainings import EVEN, SEQUENCE, assert_same_bits, config_of, mesh_of
from small_trainings import Trained as Whole
from torch._dynamo.utils import counters

from conf.schema import Config
from orchestra.data.loader import Batch, Loader
from orchestra.data.source import Blend, TokenSamples
from orchestra.parallel.mesh import Mesh
from orchestra.sizes.topology import layout
from orchestra.train.build import BuiltModel, build_model_and_optimizer, build_step
from orchestra.train.hooks import StepHooks, TrainedStep
from orchestra.train.inference.evaluation import HeldOutLoss
from orchestra.train.state import TensorState
from orchestra.train.watch.source_losses import SourceLosses

TRAIN: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 2}
LAYOUTS: list[dict[str, Any]] = [
    *({"zero": zero} for zero in (0, 1, 3)),
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
]
STEPS = 4


def samples(words: int, seed: int) -> TokenSamples:
    tokens = np.random.default_rng(seed).integers(0, words, 40 * SEQUENCE + 1)
    return TokenSamples(tokens.astype(np.uint16), SEQUENCE, EVEN.vocab_size, "array")


def blend() -> Blend:
    """Sources that are learned at different rates; of the last one most steps have no sample."""
    parts = [samples(4, 1), samples(EVEN.vocab_size, 2), samples(16, 3)]
    return Blend(parts, [5, 3, 0.3], ["plain", "rich", "rare"])


def config(**parallelism: Any) -> Config:
    return config_of(EVEN, optim={"lr": 1e-2}, train=TRAIN, **parallelism)


def alone_losses(built: BuiltModel, batch: Batch, source: Blend) -> dict[str, float]:
    """Return the mean loss by source of sequences that go through the model one by one."""
    of_source: dict[str, list[float]] = {}
    model = built.parallelized.model
    for place, sample_id in np.ndenumerate(batch.sample_ids):
        tokens = batch.tokens[place].unsqueeze(0)
        with torch.no_grad():
            loss = float(model(tokens[:, :-1], tokens[:, 1:])) / SEQUENCE
        of_source.setdefault(source.names[int(source.parts_of(int(sample_id)))], []).append(loss)
    return {f"train/{name}/loss": sum(found) / len(found) for name, found in of_source.items()}


def start(rank: int, world: int, config: Config, source: Blend | None) -> tuple[BuiltModel, Mesh, Any, Any]:
    mesh = mesh_of(rank, layout(config.parallelism, world))
    built = build_model_and_optimizer(config, mesh)
    sources = None if source is None else SourceLosses(source, built.parallelized.model, mesh)
    return built, mesh, sources, build_step(config, mesh, built, StepHooks((sources,)))


def trained(
    rank: int, world: int, config: Config, *, keeps: bool
) -> tuple[Whole, list[dict[str, float]], list[dict[str, int]]]:
    """Train; return the training, and of each step the losses and the numbers of samples by source. On one
    rank the first step's losses are compared with those of its sequences.
    """
    source = blend()
    built, mesh, sources, step = start(rank, world, config, source if keeps else None)
    parallel = built.parallelized
    held_out = HeldOutLoss(
        {"a": samples(9, 4)}, 4, parallel.model, built.batch, mesh, parallel.stage.begin_forward
    )
    loader = Loader(source, built.batches, mesh.coordinates.dp, seed=1)
    rows, losses, shares = [], [], []
    for number in range(1, STEPS + 1):
        batch = loader.next_batch()
        expected = alone_losses(built, batch, source) if world == number == 1 else None
        result = step.run(number, batch.tokens)
        rows.append((float(result.loss), float(result.grad_norm), bool(result.was_skipped)))
        # What is computed between the steps is none of them.
        held_out.compute()
        if sources is not None:
            losses.append(sources.columns(TrainedStep(number, batch, result, 0.0, 0.0)))
            assert expected is None or losses[0] == pytest.approx(expected, rel=1e-5)
        whole = source.parts_of(source.ids_at((number - 1) * 8, 8, 1))
        counts = np.bincount(whole, minlength=len(source.names)).tolist()
        shares.append(
            {f"train/{name}/loss": count for name, count in zip(source.names, counts, strict=True) if count}
        )
    loader.close()
    state = TensorState(parallel, built.optimizer, mesh)
    shards = [shard for shard in state.snapshot() if not shard.name.startswith("rng.")]
    parallel.stage.settle()
    parallel.stage.close()
    return Whole(rows, shards), losses, shares


@pytest.mark.parametrize("parallelism", LAYOUTS, ids=str)
def test_sums_are_the_whole_on_every_layout_and_no_bit_changes(
    ranks: Ranks, parallelism: dict[str, Any]
) -> None:
    alone = ranks(1).run(trained, config=config(), keeps=True)[0]
    found = ranks(2).run(trained, config=config(**parallelism), keeps=True)
    plain = ranks(2).run(trained, config=config(**parallelism), keeps=False)
    assert_same_bits([whole for whole, *_ in found], [whole for whole, *_ in plain])
    for whole, losses, shares in found:
        assert losses == found[0][1]
        for row, mine, count, expected in zip(whole.rows, losses, shares, alone[1], strict=True):
            assert list(mine) == list(count)
            assert sum(mine[name] * count[name] / 8 for name in mine) == pytest.approx(row[0], rel=1e-6)
            assert mine == pytest.approx(expected, rel=1e-4)
    of_steps = alone[1]
    assert "train/rare/loss" not in of_steps[0] or "train/rare/loss" not in of_steps[1]
    assert of_steps[-1]["train/plain/loss"] < of_steps[-1]["train/rich/loss"] - 0.3


def test_no_graph_is_compiled_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is traced is the same; only the code that is made of it is left out.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = replace(config(), train=replace(config().train, compile=True))

    def rows_and_graphs(*, keeps: bool) -> tuple[list[float], int]:
        torch._dynamo.reset()
        counters.clear()
        source = blend()
        built, _, _, step = start(0, 1, compiled, source if keeps else None)
        loader = Loader(source, built.batches, 0, seed=1)
        losses = [float(step.run(number, loader.next_batch().tokens).loss) for number in (1, 2)]
        loader.close()
        return losses, counters["stats"]["unique_graphs"]

    assert rows_and_graphs(keeps=True) == rows_and_graphs(keeps=False)
