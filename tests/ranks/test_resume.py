"""A run that is interrupted and resumed against the same run left alone, on the same and on other ranks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from attempts import (
    EVERY,
    GLOBAL_BATCH,
    STEPS,
    attempt_of,
    committed,
    config_of,
    digest_at,
    events_of,
    kill_all,
    restored,
    rows,
    with_steps,
)
from pool import Ranks
from small_trainings import SEQUENCE

from checkpointing import catalog
from checkpointing.storage import open_storage
from conf.schema import ClusterConfig, FaultPhase, PipelineSchedule, Restore
from orchestra.agents.choose_nodes import shrunk
from orchestra.data.order import read_ledger
from orchestra.run.paths import RunDir
from orchestra.sizes.save_interval import AUTO

# Of the first attempt, before the interval is known.
TIMED_STEPS = 20


def tensors(found: dict[str, str]) -> dict[str, str]:
    """Leave the generators out: they belong to places in the mesh."""
    return {name: value for name, value in found.items() if not name.startswith("rng.")}


@pytest.fixture(scope="module")
def interrupted(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return runs of 1 to 4 ranks that were interrupted after step 8: their checkpoint is that of step 5."""
    runs = {world: tmp_path_factory.mktemp("interrupted") / "run" for world in (1, 2, 3, 4)}
    for world, path in runs.items():
        ended = ranks(world).run(attempt_of, path=path, attempt=0, config=config_of(inject=kill_all(9)))
        assert ended == [None] * world
    return runs


@pytest.mark.parametrize(
    ("precision", "mode"),
    [("fp32", "broadcast"), ("fp32", "rank0"), ("fp32", "direct"), ("bf16", "broadcast")],
)
def test_a_run_resumed_on_the_same_ranks_continues_bit_for_bit(
    ranks: Ranks,
    alone: tuple[Path, list[dict[str, str]]],
    interrupted: dict[int, Path],
    tmp_path: Path,
    precision: str,
    mode: str,
) -> None:
    config = config_of(precision, checkpoint={"restore": Restore(mode)})
    pool, broken = ranks(2), tmp_path / "run"
    path, expected = alone
    if precision == "fp32":
        shutil.copytree(interrupted[2], broken)
    else:
        path = tmp_path / "alone"
        expected = pool.run(attempt_of, path=path, attempt=0, config=config)
        until_killed = config_of(precision, inject=kill_all(9))
        assert pool.run(attempt_of, path=broken, attempt=0, config=until_killed) == [None, None]
    assert pool.run(attempt_of, path=broken, attempt=1, config=config) == expected
    assert rows(broken) == rows(path)
    assert [row["step"] for row in rows(broken)] == list(range(1, STEPS + 1))
    assert read_ledger(RunDir(broken)) == read_ledger(RunDir(path))
    assert restored(broken)["step"] == EVERY
    assert restored(broken)["digest"] == digest_at(broken, EVERY) == digest_at(path, EVERY)
    assert digest_at(broken, STEPS) == digest_at(path, STEPS)


@pytest.mark.parametrize("loaded_on", [1, 2, 3, 4])
@pytest.mark.parametrize("saved_on", [1, 2, 3, 4])
def test_any_number_of_ranks_loads_what_any_other_saved(
    ranks: Ranks, interrupted: dict[int, Path], tmp_path: Path, saved_on: int, loaded_on: int
) -> None:
    source, copy = interrupted[saved_on], tmp_path / "copy"
    shutil.copytree(source, copy)
    # The restored step is the last one, so nothing is trained.
    config = with_steps(config_of(), EVERY)
    manifest = catalog.read_manifest(open_storage(source / "checkpoints"), EVERY)
    expected = {name: tensor.digest for name, tensor in manifest.tensors.items()}
    found = ranks(loaded_on).run(attempt_of, path=copy, attempt=1, config=config)
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
    ranks: Ranks, alone: tuple[Path, object], interrupted: dict[int, Path], tmp_path: Path, world: int
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(interrupted[2], broken)
    ranks(world).run(attempt_of, path=broken, attempt=1, config=config_of())
    assert [row["step"] for row in rows(broken)] == list(range(1, STEPS + 1))
    losses, expected = ([row["loss"] for row in rows(path)] for path in (broken, alone[0]))
    assert losses[:EVERY] == expected[:EVERY]
    assert losses == pytest.approx(expected, rel=1e-6)
    ledger = read_ledger(RunDir(broken))
    assert {step: sorted(ids) for step, ids in ledger.items()} == {
        step: sorted(ids) for step, ids in read_ledger(RunDir(alone[0])).items()
    }
    seen = [sample for ids in ledger.values() for sample in ids]
    assert len(seen) == len(set(seen)) == STEPS * GLOBAL_BATCH


def test_three_interruptions_on_changing_ranks_lose_and_repeat_no_sample(
    ranks: Ranks, tmp_path: Path
) -> None:
    for attempt, (world, kill_at) in enumerate(((2, 9), (4, 8), (1, 12), (3, None))):
        config = config_of(inject=kill_all(kill_at, attempt) if kill_at else ())
        ranks(world).run(attempt_of, path=tmp_path / "run", attempt=attempt, config=config)
    run = RunDir(tmp_path / "run")
    seen = [sample for ids in read_ledger(run).values() for sample in ids]
    assert len(seen) == len(set(seen)) == STEPS * GLOBAL_BATCH
    assert [event["step"] for event in events_of(run.path, "restored")] == [5, 5, 10]
    assert rows(run.path)[-1]["tokens"] == STEPS * GLOBAL_BATCH * SEQUENCE


def test_a_run_whose_experts_are_shared_out_shrinks_to_nodes_that_still_share_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Of four nodes one is lost: two of the three that are left have the experts together."""
    experts = {"num_experts": 5, "ep": 2, "zero": 1}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    ranks(4).run(attempt_of, path=whole, attempt=0, config=config_of(**experts))
    config = config_of(**experts, inject=kill_all(9))
    config = replace(
        config,
        cluster=ClusterConfig(nodes=4, gpus_per_node=1),
        recovery=replace(config.recovery, min_nodes=1),
    )
    assert ranks(4).run(attempt_of, path=broken, attempt=0, config=config) == [None] * 4
    left = shrunk([0, 1, 3], config)
    assert left == (0, 1)
    ranks(len(left)).run(attempt_of, path=broken, attempt=1, config=config)
    assert restored(broken)["layout"]["ep"] == 2
    losses, expected = ([row["loss"] for row in rows(path)] for path in (broken, whole))
    assert losses[:EVERY] == expected[:EVERY]
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_spike_on_a_rank_with_several_stages_is_one(ranks: Ranks, tmp_path: Path) -> None:
    """The rank that has the last stage passes all gradients on: each is as much larger as the loss."""
    norms = []
    for name, inject in (("without", []), ("with", [{"at_step": 2, "rank": 1, "fault": "spike"}])):
        config = with_steps(config_of(inject=inject, pp=2, schedule=PipelineSchedule.interleaved), 2)
        config = replace(config, parallelism=replace(config.parallelism, virtual_stages=2))
        config = replace(config, model=replace(config.model, num_hidden_layers=4))
        ranks(2).run(attempt_of, path=tmp_path / name, attempt=0, config=config)
        norms.append(rows(tmp_path / name)[1]["grad_norm"])
    assert norms[1] == pytest.approx(norms[0] * 1e4, rel=1e-3)


def test_saving_in_the_background_changes_no_bit_of_the_run(ranks: Ranks, tmp_path: Path) -> None:
    with_saves, without = tmp_path / "with", tmp_path / "without"
    saves_nothing = config_of(checkpoint={"every_steps": None})
    expected = ranks(2).run(attempt_of, path=without, attempt=0, config=saves_nothing)
    saves = config_of(checkpoint={"every_steps": 1, "async_save": True})
    assert ranks(2).run(attempt_of, path=with_saves, attempt=0, config=saves) == expected
    assert rows(with_saves) == rows(without)
    assert not (without / "checkpoints").exists()


def test_a_save_that_fails_on_one_rank_is_told_by_all_and_changes_no_bit(
    ranks: Ranks, alone: tuple[Path, list[dict[str, str]]], tmp_path: Path
) -> None:
    config = config_of(inject=[{"at_step": EVERY, "rank": 1, "phase": FaultPhase.mid_file.name}])
    # Inside the thread that writes, the interruption is a failure of the write.
    assert ranks(2).run(attempt_of, path=tmp_path, attempt=0, config=config) == alone[1]
    assert rows(tmp_path) == rows(alone[0])
    failed = events_of(tmp_path, "checkpoint_failed")
    assert sorted((event["rank"], event["step"]) for event in failed) == [(0, EVERY), (1, EVERY)]
    assert all(list(event["reasons"]) == ["1"] for event in failed)
    assert committed(tmp_path) == [10, STEPS]


def intervals(path: Path) -> list[tuple[str, int]]:
    return [(event["source"], event["every_steps"]) for event in events_of(path, "save_interval")]


def test_ranks_save_the_same_steps_by_their_first_steps_and_then_by_earlier_attempts(
    ranks: Ranks, tmp_path: Path
) -> None:
    # Devices fail so often that each step is worth a save.
    often = ClusterConfig(mtbf_device_hours=1e-9)
    base = replace(config_of(checkpoint={"every_steps": AUTO, "keep_last": 100}), cluster=often)
    config = with_steps(base, TIMED_STEPS + 3)
    ranks(2).run(attempt_of, path=tmp_path, attempt=0, config=config)
    ((source, every),) = intervals(tmp_path)
    assert source == "measured"
    # The first step is not timed, and after the last timed one the interval is known.
    due = [step for step in range(TIMED_STEPS + 1, config.train.steps) if step % every == 0]
    assert committed(tmp_path) == [*due, config.train.steps]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "step_time_s": 1e6}) + "\n")
    longer = with_steps(base, config.train.steps + 3)
    ranks(2).run(attempt_of, path=tmp_path, attempt=1, config=longer)
    assert intervals(tmp_path)[1:] == [("measured", 1)]
    assert committed(tmp_path)[-3:] == list(range(config.train.steps + 1, longer.train.steps + 1))
