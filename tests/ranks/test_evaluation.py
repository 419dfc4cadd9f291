"""Held-out losses between the steps: no bit of the training changes, and every layout finds the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attempts
import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import Ranks
from small_trainings import (
    EVEN,
    SEQUENCE,
    Row,
    assert_same_bits,
    config_of,
    start,
    take_steps,
    trained,
)
from small_trainings import Trained as Whole
from torch._dynamo.utils import counters

from checkpointing.catalog import read_manifest
from checkpointing.storage import open_storage
from conf.schema import Config, EvalConfig, Offload, Recompute, RunConfig
from orchestra.data.source import TokenSamples
from orchestra.errors import StopRequested
from orchestra.model.loss import cross_entropy_sum
from orchestra.model.weight_gradients import WeightGradient, attach
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter
from orchestra.run.metrics_file import eval_column, read_metrics
from orchestra.run.paths import RunDir
from orchestra.train import stopping
from orchestra.train.inference.evaluation import Evaluation, HeldOutLoss
from orchestra.train.state import TensorState

COLUMN = eval_column("held_out")
TRAIN: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 2}
LAYOUTS: list[dict[str, Any]] = [
    *({"zero": zero} for zero in (0, 1, 3)),
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
    {"zero": 3, "cp": 2},
    {"num_experts": 3, "ep": 2, "zero": 1},
]


def config(num_experts: int = 0, **parallelism: Any) -> Config:
    model = replace(EVEN, num_experts=num_experts, first_k_dense_replace=1) if num_experts else EVEN
    return config_of(model, train=TRAIN, **parallelism)


def samples(num_samples: int, seed: int) -> TokenSamples:
    tokens = np.random.default_rng(seed).integers(0, EVEN.vocab_size, num_samples * SEQUENCE + 1)
    return TokenSamples(tokens.astype(np.uint16), SEQUENCE, EVEN.vocab_size, "array")


def evaluated(rank: int, world: int, config: Config, steps: int = 4) -> tuple[Whole, list[dict[str, float]]]:
    """Train, evaluating before the first step and after each; return the training and the losses."""
    training, mesh = start(rank, world, config)
    # 13 samples are no multiple of anything; 3 leave ranks without any.
    sources = {"odd": samples(13, 1), "few": samples(3, 2), "many": samples(200, 3)}
    parallel = training.parallelized
    forward, pipeline = parallel.stage.begin_forward, parallel.pipeline
    loss = HeldOutLoss(sources, 16, parallel.model, training.batch, mesh, forward, pipeline)
    found, rows = [loss.compute()], list[Row]()
    for step in range(1, steps + 1):
        rows += take_steps(config, training, mesh, [step])
        before = torch.random.get_rng_state()
        found.append(loss.compute())
        assert torch.equal(before, torch.random.get_rng_state())
    state = TensorState(parallel, training.optimizer, mesh)
    shards = [shard for shard in state.snapshot() if not shard.name.startswith("rng.")]
    parallel.stage.settle()
    parallel.stage.close()
    return Whole(rows, shards), found


@pytest.mark.parametrize("parallelism", LAYOUTS, ids=str)
def test_no_bit_changes_and_layouts_agree(ranks: Ranks, parallelism: dict[str, Any]) -> None:
    alone = ranks(1).run(evaluated, config=config(parallelism.get("num_experts", 0)))[0]
    found = ranks(2).run(evaluated, config=config(**parallelism))
    plain = ranks(2).run(trained, config=config(**parallelism), steps=4)
    assert_same_bits([whole for whole, _ in found], plain)
    for _, losses in found:
        assert losses == found[0][1]
        for mine, expected in zip(losses, alone[1], strict=True):
            assert mine == pytest.approx(expected, rel=1e-6)
    losses = alone[1]
    assert losses[0]["odd"] != losses[-1]["odd"]


def test_offloaded_and_recomputed_trainings_keep_their_bits(ranks: Ranks, tmp_path: Path) -> None:
    disk = config(zero=1, offload=Offload.optimizer_disk, offload_dir=str(tmp_path))
    again = config(zero=3)
    again = replace(again, train=replace(again.train, recompute=Recompute.selective))
    for each in (disk, again):
        found = ranks(2).run(evaluated, config=each)
        assert_same_bits([whole for whole, _ in found], ranks(2).run(trained, config=each, steps=4))


def test_blocks_are_compiled_once_more_and_not_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # What is traced is the same; only the code that is made of it is left out.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compiled = replace(config(), train=replace(config().train, compile=True))

    def rows_and_graphs(*, evaluates: bool) -> tuple[list[Row], list[int]]:
        torch._dynamo.reset()
        counters.clear()
        training, mesh = start(0, 1, compiled)
        parallel = training.parallelized
        sources = {"odd": samples(13, 1), "many": samples(200, 3)}
        loss = HeldOutLoss(sources, 16, parallel.model, training.batch, mesh, parallel.stage.begin_forward)
        if evaluates:
            loss.warm_up()
        rows, graphs = list[Row](), list[int]()
        for step in (1, 2, 3):
            rows += take_steps(compiled, training, mesh, [step])
            if evaluates:
                loss.compute()
            graphs.append(counters["stats"]["unique_graphs"])
        return rows, graphs

    plain, (without, *_) = rows_and_graphs(evaluates=False)
    found, graphs = rows_and_graphs(evaluates=True)
    assert found == plain
    assert graphs == [without + 1] * 3


def test_no_gradient_is_made_where_they_are_switched_off() -> None:
    weight = torch.nn.Parameter(torch.randn(7, 4))
    begun: list[int] = []

    def begin() -> tuple[torch.Tensor, bool]:
        begun.append(1)
        return torch.empty(7, 4), False

    gradient = WeightGradient(begin, lambda: None)
    attach(weight, gradient)
    hidden, target = torch.randn(5, 4), torch.tensor([0, 3, -100, 6, 1])
    with torch.no_grad():
        found = cross_entropy_sum(hidden, weight, target)
    assert not begun
    assert float(found) == float(cross_entropy_sum(hidden, weight, target).detach())
    assert begun


def with_evaluations(config: Config) -> Config:
    evaluation = EvalConfig(every_steps=3, steps=1, at_start=True)
    best = replace(config.checkpoint, keep_best=1)
    return replace(config, eval=evaluation, checkpoint=best, run=RunConfig(metric="eval/held_out/loss"))


def test_what_is_measured_before_the_first_step_is_told_before_anything_is_saved(
    ranks: Ranks, tmp_path: Path
) -> None:
    # Killed in step 8, after the checkpoint of step 5 and before the row of step 10.
    config = with_evaluations(attempts.config_of(inject=attempts.kill_all(8)))
    config = replace(
        config, train=replace(config.train, log_every=10), eval=replace(config.eval, every_steps=10)
    )
    for attempt in (0, 1):
        ranks(2).run(attempts.attempt_of, path=tmp_path / "run", attempt=attempt, config=config)
    rows = read_metrics(RunDir(tmp_path / "run"))
    assert [(row["step"], f"{COLUMN}_at_start" in row) for row in rows] == [
        (1, True),
        (10, False),
        (12, False),
    ]


def test_a_run_that_evaluates_and_resumes_has_the_bits_of_one_that_does_not(
    ranks: Ranks, alone: tuple[Path, list[dict[str, str]]], tmp_path: Path
) -> None:
    plain, expected = alone
    # Killed in step 8, after the checkpoint of step 5: steps 6 to 12 are trained again.
    first = with_evaluations(attempts.config_of(inject=attempts.kill_all(8)))
    path = tmp_path / "run"
    assert ranks(2).run(attempts.attempt_of, path=path, attempt=0, config=first) == [None, None]
    found = ranks(2).run(attempts.attempt_of, path=path, attempt=1, config=first)
    assert found == expected
    assert attempts.rows(path) == attempts.rows(plain)
    rows = read_metrics(RunDir(path))
    told = {row["step"]: row[COLUMN] for row in rows if COLUMN in row}
    # The last step too, and the start of the run once.
    assert list(told) == [3, 6, 9, 12]
    assert [row["step"] for row in rows if f"{COLUMN}_at_start" in row] == [1]
    assert rows[0][f"{COLUMN}_at_start"] > told[3] > told[12]
    assert all(row["eval_time_s"] > 0 for row in rows if COLUMN in row)
    assert [event["step"] for event in attempts.events_of(path, "evaluated")] == [0, 3, 6, 6, 9, 12]
    # Compared by what was evaluated at that step, and by nothing where nothing was.
    storage = open_storage(path / "checkpoints")
    scores = {step: read_manifest(storage, step).state["score"] for step in attempts.committed(path)}
    assert scores == {5: None, 10: None, 12: told[12]}


def stopped_while_it_evaluates(rank: int, world: int, path: Path, config: Config, ask_at: int) -> str:
    """Train an attempt that rank 1 asks to stop within its `ask_at`-th evaluation; return how it ended."""
    compute, loss_of = HeldOutLoss.compute, HeldOutLoss._loss
    begun, done = [0], [0]

    def counted(self: HeldOutLoss, beat: Callable[[], None]) -> dict[str, float]:
        begun[0] += 1
        return compute(self, beat)

    def ask(self: HeldOutLoss, *tokens: Any) -> torch.Tensor:
        if begun[0] == ask_at:
            done[0] += 1
            if rank == 1:
                stop_requests.write_request(RunDir(path), 0, stop_requests.CANCEL)
            attempts.await_sight(path, 0)
        return loss_of(self, *tokens)

    with (
        patch.object(HeldOutLoss, "compute", counted),
        patch.object(HeldOutLoss, "_loss", ask),
        patch.object(stopping, "LOOK_S", 0.001),
        patch.object(stopping, "ROUND_S", 0.0),
    ):
        try:
            attempts.attempt_of(rank, world, path, 0, config)
            dist.barrier()
        except StopRequested as error:
            dist.barrier()
            return f"{type(error).__name__} after {done[0]} micro-batches"
    return f"finished after {done[0]} micro-batches"


@pytest.mark.parametrize(("ask_at", "step"), [(1, 0), (2, 3), (5, 12)], ids=["at start", "amid", "last"])
def test_a_stop_during_an_evaluation_leaves_it_and_saves(
    ranks: Ranks, alone: tuple[Path, list[dict[str, str]]], tmp_path: Path, ask_at: int, step: int
) -> None:
    config = with_evaluations(attempts.config_of())
    path = tmp_path / "run"
    ended = ranks(2).run(stopped_while_it_evaluates, path=path, config=config, ask_at=ask_at)
    is_whole = step == attempts.STEPS
    assert ended == [f"{'finished' if is_whole else 'StopRequested'} after 1 micro-batches"] * 2
    assert [event["step"] for event in attempts.events_of(path, "evaluation_left")] == [step]
    assert [event["step"] for event in attempts.events_of(path, "evaluated")] == [0, 3, 6, 9][: ask_at - 1]
    if step:
        assert attempts.committed(path)[-1] == step
    plain, expected = alone
    if 0 < step < attempts.STEPS:
        assert ranks(2).run(attempts.attempt_of, path=path, attempt=1, config=config) == expected
        assert attempts.rows(path) == attempts.rows(plain)


@pytest.mark.parametrize("parallelism", [{"pp": 2}, {"zero": 3}], ids=str)
def test_what_a_left_evaluation_leaves_behind_is_in_nobodys_way(
    ranks: Ranks, tmp_path: Path, parallelism: dict[str, Any]
) -> None:
    config, pool = with_evaluations(attempts.config_of(**parallelism)), ranks(2)
    whole = pool.run(attempts.attempt_of, path=tmp_path / "whole", attempt=0, config=config)
    path = tmp_path / "run"
    ended = pool.run(stopped_while_it_evaluates, path=path, config=config, ask_at=2)
    assert ended == ["StopRequested after 1 micro-batches"] * 2
    assert attempts.committed(path) == [3]
    assert pool.run(attempts.attempt_of, path=path, attempt=1, config=config) == whole
    assert attempts.rows(path) == attempts.rows(tmp_path / "whole")


def test_a_full_disk_takes_the_record_of_an_evaluation_and_no_more(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events.mkdir()
    run.event_file("rank").symlink_to("/dev/full")
    training, mesh = start(0, 1, config())
    loss = HeldOutLoss({"few": samples(3, 2)}, None, training.parallelized.model, training.batch, mesh)
    evaluation = Evaluation(EvalConfig(), 4, loss, EventWriter(run, "rank", 0), compiles=False)
    assert evaluation.run(2, lambda: None).losses == loss.compute()
