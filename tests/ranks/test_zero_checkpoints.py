"""Checkpoints of sharded states: any layout restores what any other saved, and goes on with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from layouts import peers
from pool import RankPool
from small_trainings import ODD, config_of, start, take_steps

from checkpointing.checkpointer import Checkpointer
from checkpointing.options import Options
from checkpointing.shards import as_bytes
from conf.schema import Config
from orchestra.train.state import TensorState, digest

pytestmark = pytest.mark.ranks

Ranks = Callable[[int], RankPool]
# Global batch 12: 1, 2, 3 and 4 ranks can share it.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "zero0 on 2": (2, {}),
    "zero1 on 3": (3, {"zero": 1}),
    "zero2 on 4": (4, {"zero": 2}),
    "zero3 on 2": (2, {"zero": 3}),
    "zero3 on 4": (4, {"zero": 3}),
    "hybrid on 4": (4, {"zero": 3, "shard_degree": 2}),
}


def setting(name: str, precision: str = "fp32") -> tuple[int, Config]:
    world, parallelism = LAYOUTS[name]
    train = {"global_batch_size": 12, "micro_batch_size": 1}
    return world, config_of(ODD, precision, train=train, **parallelism)


def checkpointer(rank: int, world: int, place: Path, topic: str) -> Checkpointer:
    group = dist.group.WORLD if world > 1 else None
    return Checkpointer(str(place), peers(rank, world, f"{place}/{topic}"), Options(), group=group)


def save_behind(rank: int, world: int, config: Config, place: Path, last: int = 6) -> Any:
    """Train 3 steps, save, train on to the last; return the rows behind the save and the final digests."""
    training, mesh = start(rank, world, config)
    take_steps(config, training, mesh, range(1, 4))
    state = TensorState(training.parallelized, training.optimizer, mesh)
    saver = checkpointer(rank, world, place, "save")
    saver.prepare(state.snapshot())
    saver.save(3, state.snapshot(), {})
    saver.wait()
    return take_steps(config, training, mesh, range(4, last + 1)), bits(state)


def go_on(rank: int, world: int, config: Config, place: Path, topic: str, last: int = 6) -> Any:
    """Restore step 3 in a new training, save what was restored as step 9, and train on to the last."""
    training, mesh = start(rank, world, config)
    state = TensorState(training.parallelized, training.optimizer, mesh)
    reader = checkpointer(rank, world, place, topic)
    restored = reader.restore(state.wanted)
    assert restored is not None
    state.take_back(restored.manifest, 3)
    again = checkpointer(rank, world, place / "again" / topic, "save")
    again.save(9, state.snapshot(), {})
    again.wait()
    saved = checkpointer(rank, world, place / "again" / topic, "read").restore(state.wanted)
    assert saved is not None
    rows = take_steps(config, training, mesh, range(4, last + 1))
    return rows, bits(state), digest(restored.manifest), digest(saved.manifest)


def bits(state: TensorState) -> list[tuple[str, tuple[int, ...], bytes]]:
    return [
        (shard.name, shard.offsets, as_bytes(shard.tensor.detach().contiguous()).numpy().tobytes())
        for shard in state.snapshot()
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["zero1 on 3", "zero2 on 4", "zero3 on 2", "hybrid on 4"])
def test_the_same_layout_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path, name: str, precision: str) -> None:
    world, config = setting(name, precision)
    arguments = {"world": world, "config": config, "place": tmp_path}
    expected = ranks(world).run(save_behind, **arguments)
    found = ranks(world).run(go_on, topic="same", **arguments)
    assert [(rows, state) for rows, state, *_ in found] == expected


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.mark.parametrize("source", ["one", "zero1 on 3", "zero3 on 4", "hybrid on 4"])
def test_every_layout_restores_what_another_saved(ranks: Ranks, saved: Path, source: str) -> None:
    world, config = setting(source)
    place = saved / source
    rows = ranks(world).run(save_behind, world=world, config=config, place=place)[0][0]
    for target in LAYOUTS:
        if target == source:
            continue
        world, config = setting(target)
        topic = target.replace(" ", "-")
        found = ranks(world).run(go_on, world=world, config=config, place=place, topic=topic)
        for new_rows, _, restored_digest, saved_again in found:
            assert saved_again == restored_digest, f"{source} → {target}"
            assert new_rows == found[0][0]
            for (loss, norm, _), (loss_expected, norm_expected, _) in zip(new_rows, rows, strict=True):
                assert loss == pytest.approx(loss_expected, rel=1e-5)
                assert norm == pytest.approx(norm_expected, rel=1e-5)
