"""A run that is interrupted and resumed against the same run left alone, on the same and on other ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from checkpointing import catalog, checksums
from checkpointing.box import Box
from checkpointing.shard_digest import part_digest
from checkpointing.shards import Shard, as_bytes
from checkpointing.storage import open_storage
from conf.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    Fault,
    FaultPhase,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    PrecisionName,
    RecoveryConfig,
    Restore,
    TrainConfig,
)
from orchestra.data.ledger import read_ledger
from orchestra.parallel.mesh import Mesh, RankEnvironment
from orchestra.run.events import EventWriter, rank_writer, read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from orchestra.sizes.topology import Layout
from orchestra.train.state import TensorState
from orchestra.train.trainer import RankAttempt, TrainingProgress, train_on
from orchestra.train.watch import inject_faults

pytestmark = pytest.mark.ranks

STEPS, EVERY, GLOBAL_BATCH = 12, 5, 12
Ranks = Callable[[int], RankPool]


class Interruption(Exception):  # noqa: N818  no error, the plan
    """Stands for the end of the process, so that the pool's processes can be used again."""


def config_of(precision: str = "fp32", kill_at: int | None = None, **checkpoint: Any) -> Config:
    """Return a tiny model with odd dims (37, 259), whose global batch 1, 2, 3 and 4 ranks can share."""
    kill = {"at_step": kill_at, "rank": "all", "fault": Fault.sigkill.name, "phase": FaultPhase.step.name}
    settings = {"every_steps": EVERY, "async_save": False, "timeout_s": 60.0, **checkpoint}
    return Config(
        model=ModelConfig(
            hidden_size=36,
            intermediate_size=37,
            num_hidden_layers=2,
            num_attention_heads=3,
            num_key_value_heads=1,
            vocab_size=259,
        ),
        precision=PrecisionConfig(name=PrecisionName(precision)),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(steps=STEPS, seq_len=16, global_batch_size=GLOBAL_BATCH, micro_batch_size=1),
        data=DataConfig(ledger=True),
        checkpoint=CheckpointConfig(**settings),
        recovery=RecoveryConfig(inject=[] if kill_at is None else [kill]),
    )


def attempt_of(rank: int, world: int, path: Path, attempt: int, config: Config) -> dict[str, str] | None:
    """Train one attempt as one rank; return the digest of each tensor at its end, None if it was ended."""
    degrees = Layout(dp=world)
    ranks = RankEnvironment(rank, rank, world, world)
    group = dist.group.WORLD if world > 1 else None
    mesh = Mesh(rank, degrees, degrees.coordinates(rank), torch.device("cpu"), group)
    run = RunDir(path)
    events = EventWriter(run, rank_writer(attempt, rank), attempt, rank=rank)
    torch.manual_seed(attempt)  # so that only a restore can bring the generators back
    kill, inject_faults.os.kill = inject_faults.os.kill, _interrupt  # type: ignore[attr-defined]
    try:
        training = train_on(mesh, config, ranks, RankAttempt(run, attempt, events, TrainingProgress()))
    except Interruption:
        return None
    finally:
        inject_faults.os.kill = kill  # type: ignore[attr-defined]
    state = TensorState(training.parallelized, training.optimizer, mesh)
    parameters = [(item.name, item.parameter) for item in training.parallelized.trained]
    return {**digests(state.snapshot()), **{name: digest_of(value) for name, value in parameters}}


def _interrupt(*_: Any) -> None:
    raise Interruption


def digests(shards: Sequence[Shard]) -> dict[str, str]:
    return {shard.name: digest_of(shard.tensor) for shard in shards}


def digest_of(tensor: torch.Tensor) -> str:
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}[tensor.dtype]
    content = as_bytes(tensor.detach().contiguous()).numpy()
    return checksums.written(part_digest(memoryview(content), dtype, Box.whole(tensor.shape)))


def tensors(found: dict[str, str]) -> dict[str, str]:
    """Leave the generators out: they belong to places in the mesh."""
    return {name: value for name, value in found.items() if not name.startswith("rng.")}


KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "nonfinite_steps")


def rows(path: Path) -> list[Record]:
    return [{key: row[key] for key in KEYS} for row in read_metrics(RunDir(path))]


def restored(path: Path) -> Record:
    (event,) = (event for event in read_events(RunDir(path)) if event["event"] == "restored")
    return event


@pytest.mark.parametrize(
    ("precision", "mode"),
    [("fp32", "broadcast"), ("fp32", "rank0"), ("fp32", "direct"), ("bf16", "broadcast")],
)
def test_a_run_resumed_on_the_same_ranks_continues_bit_for_bit(
    ranks: Ranks, tmp_path: Path, precision: str, mode: str
) -> None:
    settings = {"precision": precision, "restore": Restore(mode)}
    pool, alone, broken = ranks(2), tmp_path / "alone", tmp_path / "broken"
    expected = pool.run(attempt_of, world=2, path=alone, attempt=0, config=config_of(**settings))
    ended = pool.run(attempt_of, world=2, path=broken, attempt=0, config=config_of(kill_at=9, **settings))
    assert ended == [None, None]
    assert pool.run(attempt_of, world=2, path=broken, attempt=1, config=config_of(**settings)) == expected
    assert rows(broken) == rows(alone)
    assert [row["step"] for row in rows(broken)] == list(range(1, STEPS + 1))
    assert read_ledger(RunDir(broken)) == read_ledger(RunDir(alone))
    assert restored(broken)["step"] == EVERY
    assert restored(broken)["digest"] == digest_at(broken, EVERY) == digest_at(alone, EVERY)
    assert digest_at(broken, STEPS) == digest_at(alone, STEPS)


def digest_at(path: Path, step: int) -> str:
    """Return the digest of model and optimizer that a checkpoint's manifest holds."""
    manifest = catalog.read_manifest(open_storage(path / "checkpoints"), step)
    return manifest.digest_of(name for name in manifest.tensors if not name.startswith("rng."))


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the runs that earlier tests of this module have trained, by their number of ranks."""
    return {0: tmp_path_factory.mktemp("alone")}


def trained(ranks: Ranks, left_alone: dict[int, Path], world: int) -> Path:
    """Return a run of `world` ranks that was interrupted behind step 9: its checkpoint is that of step 5."""
    if world not in left_alone:
        path = left_alone[0] / f"of-{world}"
        ended = ranks(world).run(attempt_of, world=world, path=path, attempt=0, config=config_of(kill_at=9))
        assert ended == [None] * world
        left_alone[world] = path
    return left_alone[world]


@pytest.mark.parametrize("loaded_on", [1, 2, 3, 4])
@pytest.mark.parametrize("saved_on", [1, 2, 3, 4])
def test_any_number_of_ranks_loads_what_any_other_saved(
    ranks: Ranks, left_alone: dict[int, Path], tmp_path: Path, saved_on: int, loaded_on: int
) -> None:
    source, copy = trained(ranks, left_alone, saved_on), tmp_path / "copy"
    shutil.copytree(source, copy)
    # The restored step is the last one, so nothing is trained.
    config = replace(config_of(), train=replace(config_of().train, steps=EVERY))
    manifest = catalog.read_manifest(open_storage(source / "checkpoints"), EVERY)
    expected = {name: tensor.digest for name, tensor in manifest.tensors.items()}
    found = ranks(loaded_on).run(attempt_of, world=loaded_on, path=copy, attempt=1, config=config)
    assert len(found) == loaded_on
    for rank, values in enumerate(found):
        assert {name: values[name] for name in tensors(expected)} == tensors(expected)
        generator = f"rng.cpu.pp0-dp{rank}-cp0-tp0"
        assert (generator in expected) == (rank < saved_on)
        assert expected.get(generator, values[generator]) == values[generator]
    assert restored(copy)["layout_saved"]["dp"] == saved_on
    assert restored(copy)["layout"]["dp"] == loaded_on
    assert restored(copy)["digest"] == digest_at(source, EVERY)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_a_run_resumed_on_other_ranks_sees_each_sample_once_and_agrees_to_rounding(
    ranks: Ranks, left_alone: dict[int, Path], tmp_path: Path, world: int
) -> None:
    broken, alone = tmp_path / "broken", tmp_path / "alone"
    shutil.copytree(trained(ranks, left_alone, 2), broken)
    ranks(world).run(attempt_of, world=world, path=broken, attempt=1, config=config_of())
    ranks(2).run(attempt_of, world=2, path=alone, attempt=0, config=config_of())
    assert [row["step"] for row in rows(broken)] == list(range(1, STEPS + 1))
    losses, expected = ([row["loss"] for row in rows(path)] for path in (broken, alone))
    assert losses[:EVERY] == expected[:EVERY]
    assert losses == pytest.approx(expected, rel=1e-6)
    ledger = read_ledger(RunDir(broken))
    assert {step: sorted(ids) for step, ids in ledger.items()} == {
        step: sorted(ids) for step, ids in read_ledger(RunDir(alone)).items()
    }
    seen = [sample for ids in ledger.values() for sample in ids]
    assert len(seen) == len(set(seen)) == STEPS * GLOBAL_BATCH


def test_three_interruptions_on_changing_ranks_lose_and_repeat_no_sample(
    ranks: Ranks, tmp_path: Path
) -> None:
    for attempt, (world, kill_at) in enumerate(((2, 9), (4, 8), (1, 12), (3, None))):
        config = config_of(kill_at=kill_at)
        faults_then = [{**fault, "attempt": attempt} for fault in config.recovery.inject]
        config = replace(config, recovery=RecoveryConfig(inject=faults_then))
        ranks(world).run(attempt_of, world=world, path=tmp_path / "run", attempt=attempt, config=config)
    run = RunDir(tmp_path / "run")
    seen = [sample for ids in read_ledger(run).values() for sample in ids]
    assert len(seen) == len(set(seen)) == STEPS * GLOBAL_BATCH
    assert [event["step"] for event in read_events(run) if event["event"] == "restored"] == [5, 5, 10]
    assert rows(run.path)[-1]["tokens"] == STEPS * GLOBAL_BATCH * 16


def test_saving_in_the_background_changes_no_bit_of_the_run(ranks: Ranks, tmp_path: Path) -> None:
    with_saves, without = tmp_path / "with", tmp_path / "without"
    settings = {"every_steps": 1, "async_save": True}
    expected = ranks(2).run(attempt_of, world=2, path=without, attempt=0, config=config_of(every_steps=None))
    found = ranks(2).run(attempt_of, world=2, path=with_saves, attempt=0, config=config_of(**settings))
    assert found == expected
    assert rows(with_saves) == rows(without)
    assert not (without / "checkpoints").exists()


def test_a_save_that_fails_on_one_rank_is_told_by_all_and_changes_no_bit(
    ranks: Ranks, tmp_path: Path
) -> None:
    failing = [{"at_step": EVERY, "rank": 1, "phase": FaultPhase.mid_file.name}]
    config = replace(config_of(), recovery=RecoveryConfig(inject=failing))
    alone, other = tmp_path / "alone", tmp_path / "other"
    expected = ranks(2).run(attempt_of, world=2, path=alone, attempt=0, config=config_of())
    # Inside the thread that writes, the interruption is a failure of the write.
    assert ranks(2).run(attempt_of, world=2, path=other, attempt=0, config=config) == expected
    assert rows(other) == rows(alone)
    told = [event for event in read_events(RunDir(other)) if event["event"] == "checkpoint_failed"]
    assert sorted((event["rank"], event["step"]) for event in told) == [(0, EVERY), (1, EVERY)]
    assert all(list(event["reasons"]) == ["1"] for event in told)
    assert catalog.committed_steps(open_storage(other / "checkpoints")) == [10, STEPS]
