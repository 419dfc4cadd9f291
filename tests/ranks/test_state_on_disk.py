"""Masters and moments on a disk (`parallelism.offload=optimizer_disk`) train, save and restore with the same
bits as in memory.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import attempts
import pytest
from pool import Ranks
from small_trainings import (
    ODD,
    assert_same_bits,
    bits,
    config_of,
    restore_and_go_on,
    save_and_go_on,
    start,
    take_steps,
    trained_on,
)

from conf.schema import Config, Offload, StateDType
from orchestra.train.state import TensorState

WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16 moments": {"precision": "bf16_fp32_grad", "optim": {"state_dtype": StateDType.bf16}},
}


def in_memory(way: str, **parallelism: Any) -> Config:
    train = {"global_batch_size": 4, "micro_batch_size": 1}
    return config_of(ODD, train=train, **WAYS[way], **parallelism)


def on_disk(config: Config, folder: Path) -> Config:
    moved = replace(config.parallelism, offload=Offload.optimizer_disk, offload_dir=str(folder))
    return replace(config, parallelism=moved)


# bf16: below, with updates that are slow.
@pytest.mark.parametrize("way", ["fp32", "bf16 moments"])
def test_state_on_disk_trains_with_the_same_bits(ranks: Ranks, tmp_path: Path, way: str) -> None:
    kept = [in_memory(way, zero=zero) for zero in (0, 1, 2, 3)]
    moved = [on_disk(config, tmp_path) for config in kept]
    expected = trained_on(ranks(2), kept, steps=4)
    for of_ranks, of_ranks_expected in zip(trained_on(ranks(2), moved, steps=4), expected, strict=True):
        assert_same_bits(of_ranks, of_ranks_expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", WAYS)
def test_state_on_disk_is_saved_and_restored_like_any(ranks: Ranks, tmp_path: Path, way: str) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    kept = in_memory(way, zero=2)
    moved = on_disk(kept, folder)
    found = {}
    for name, config in (("kept", kept), ("moved", moved)):
        found[name] = ranks(2).run(save_and_go_on, config=config, place=tmp_path / name)
    assert found["moved"] == found["kept"]
    for source, target, config in (
        ("moved", "moved", moved),
        ("moved", "kept", kept),
        ("kept", "moved", moved),
    ):
        going_on = ranks(2).run(
            restore_and_go_on, config=config, place=tmp_path / source, topic=f"to {target}"
        )
        for (rows, state, restored, again), expected in zip(going_on, found["kept"], strict=True):
            assert (rows, state) == expected, f"{source} → {target}"
            assert restored == again
    assert list(folder.iterdir()) == []


def trained_with_slow_updates(rank: int, world: int, config: Config) -> tuple[list[Any], list[bool]]:
    """Train like `trained`; return the rows and the bits, and of each step whether its update outlived it."""
    training, mesh = start(rank, world, config)
    update, units = training.optimizer.update, len(training.parallelized.units.units)
    ended: list[float] = []

    def slow(*arguments: Any) -> None:
        time.sleep(0.01)
        update(*arguments)
        ended.append(time.monotonic())

    training.optimizer.update = slow  # type: ignore[method-assign]
    rows, outlived = [], []
    for step in range(1, 5):
        rows += take_steps(config, training, mesh, [step])
        outlived.append(len(ended) < step * units)
    state = TensorState(training.parallelized, training.optimizer, mesh)
    found = [*rows, *bits(state)]
    training.parallelized.stage.close()
    return found, outlived


@pytest.fixture(scope="module")
def kept_in_memory(ranks: Ranks) -> list[list[tuple[list[Any], list[bool]]]]:
    """Return what each stage trains whose state lies in memory."""
    return [
        ranks(2).run(trained_with_slow_updates, config=in_memory("bf16", zero=zero)) for zero in (0, 1, 2, 3)
    ]


@pytest.mark.parametrize("offload", [Offload.optimizer, Offload.optimizer_disk])
def test_the_next_step_waits_for_what_it_needs_of_an_update(
    ranks: Ranks,
    tmp_path: Path,
    kept_in_memory: list[list[tuple[list[Any], list[bool]]]],
    offload: Offload,
) -> None:
    for zero, expected in enumerate(kept_in_memory):
        kept = in_memory("bf16", zero=zero)
        there = replace(kept.parallelism, offload=offload, offload_dir=str(tmp_path))
        moved = replace(kept, parallelism=there)
        found = ranks(2).run(trained_with_slow_updates, config=moved)
        assert [rows for rows, _ in found] == [rows for rows, _ in expected], zero
        assert all(not any(outlived) for _, outlived in expected)
        assert all(all(outlived) for _, outlived in found), zero
    assert list(tmp_path.iterdir()) == []


def test_a_run_on_disk_that_is_killed_goes_on_bit_for_bit(
    ranks: Ranks, alone: tuple[Path, list[dict[str, str]]], tmp_path: Path
) -> None:
    """By attempts of the trainer, whose saves are put together on that disk too."""
    path, expected = alone
    folder, broken = tmp_path / "disk", tmp_path / "run"
    folder.mkdir()
    usual = attempts.config_of()
    until_killed = on_disk(attempts.config_of(inject=attempts.kill_all(9)), folder)
    ended = ranks(2).run(attempts.attempt_of, path=broken, attempt=0, config=until_killed)
    assert ended == [None, None]
    config = on_disk(usual, folder)
    assert ranks(2).run(attempts.attempt_of, path=broken, attempt=1, config=config) == expected
    assert attempts.rows(broken) == attempts.rows(path)
    assert attempts.restored(broken)["step"] == attempts.EVERY
    # And from there in memory again.
    longer = attempts.with_steps(usual, attempts.STEPS + 2)
    ranks(2).run(attempts.attempt_of, path=broken, attempt=2, config=longer)
    assert attempts.rows(broken)[: attempts.STEPS] == attempts.rows(path)
    assert list(folder.iterdir()) == []
