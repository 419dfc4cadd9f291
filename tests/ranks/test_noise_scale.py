"""The gradient noise scale that a training measures, against gradients of single sequences, on any layout."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import attempts
import pytest
import torch
from pool import Ranks
from small_trainings import EVEN, SEQUENCE, Row, config_of, mesh_of
from torch import Tensor

from conf.schema import Config
from orchestra.data.loader import Batch
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.run.metrics_file import NOISE_GRADIENT, NOISE_VARIANCE, read_metrics
from orchestra.run.paths import RunDir
from orchestra.sizes.topology import layout
from orchestra.train.build import build_model_and_optimizer, build_step
from orchestra.train.hooks import StepHooks, TrainedStep
from orchestra.train.watch.noise_scale import NoiseScale

# With these seeds 80 steps are still 14 % off, 160 are 1 %.
STEPS, FEW_STEPS, MICRO, GLOBAL = 160, 5, 2, 8
MODEL = replace(
    EVEN, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=2, vocab_size=32
)


def noise_config(**parallelism: Any) -> Config:
    # A rate that moves nothing: all steps measure the same true gradient.
    train = {"steps": STEPS, "global_batch_size": GLOBAL, "micro_batch_size": MICRO, "noise_scale_every": 1}
    return config_of(MODEL, optim={"lr": 1e-12, "weight_decay": 0.0}, train=train, **parallelism)


def sequences(step: int) -> Tensor:
    """Return the sequences [GBS, S + 1] of a step: they count up, from anywhere, but for noise."""
    generator = torch.Generator().manual_seed(step)
    begin = torch.randint(0, MODEL.vocab_size // 2, (GLOBAL, 1), generator=generator)
    jumps = torch.randint(0, 3, (GLOBAL, SEQUENCE + 1), generator=generator)
    return (begin + jumps.cumsum(1) // 2) % MODEL.vocab_size


def measured(
    rank: int, world: int, config: Config, every: int = 1, steps: int = STEPS
) -> tuple[list[Row], dict[str, float]]:
    """Train, and return the rows and the mean of what was measured; `every` 0: nothing is."""
    mesh = mesh_of(rank, layout(config.parallelism, world))
    built = build_model_and_optimizer(config, mesh)
    noise = NoiseScale(every, built.parallelized, built.batches, mesh) if every else None
    hooks = StepHooks((noise,))
    step_of_run = build_step(config, mesh, built, hooks)
    rows: list[Row] = []
    for step in range(1, steps + 1):
        whole = sequences(step).view(-1, built.batch.dp, MICRO, SEQUENCE + 1)
        tokens = whole[:, mesh.coordinates.dp].contiguous()
        result = step_of_run.run(step, tokens)
        batch = Batch(tokens, torch.zeros(tokens.shape[:2], dtype=torch.int64).numpy(), step * GLOBAL)
        hooks.after_step(TrainedStep(step, batch, result, time.perf_counter(), 0.0))
        rows.append((float(result.loss), float(result.grad_norm), bool(result.was_skipped)))
    built.parallelized.stage.settle()
    built.parallelized.stage.close()
    return rows, {} if noise is None else noise.columns()


@pytest.fixture(scope="module")
def true() -> tuple[float, float]:
    """Return |G|² and tr(Σ) of the gradients of all sequences, taken one by one."""
    config = noise_config()
    with torch.device("meta"):
        model = Transformer(MODEL)
    model.to_empty(device="cpu")
    fill_initial_values(model, config.train.seed)
    total, squares = torch.zeros(sum(each.numel() for each in model.parameters())), 0.0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for step in range(1, STEPS + 1):
        for sequence in sequences(step):
            model.zero_grad()
            model(sequence[None, :-1], sequence[None, 1:], 1.0 / SEQUENCE).backward()
            gradient = torch.cat(
                [each.grad.flatten() for each in model.parameters() if each.grad is not None]
            )
            total, squares = total + gradient, squares + float(gradient.square().sum())
    torch.set_num_threads(threads)
    count = STEPS * GLOBAL
    mean = float((total / count).square().sum())
    variance = (squares / count - mean) * count / (count - 1)
    return mean - variance / count, variance


def test_it_is_that_of_single_sequences_and_no_bit_of_the_training_changes(
    ranks: Ranks, true: tuple[float, float]
) -> None:
    config = noise_config()
    rows, found = ranks(1).run(measured, config=config)[0]
    assert rows[:20] == ranks(1).run(measured, config=config, every=0, steps=20)[0][0]
    of_two = ranks(2).run(measured, config=config)
    for columns in (found, of_two[0][1]):
        gradient, variance = columns[NOISE_GRADIENT], columns[NOISE_VARIANCE]
        assert variance / gradient == pytest.approx(true[1] / true[0], rel=0.1)
        assert (gradient, variance) == pytest.approx(true, rel=0.1)


def test_every_stage_of_zero_and_every_cut_of_the_model_measures_the_same(ranks: Ranks) -> None:
    def columns(world: int, **degrees: Any) -> dict[str, float]:
        found = ranks(world).run(measured, config=noise_config(**degrees), steps=FEW_STEPS)
        assert all(each == found[0] for each in found), degrees
        return dict(found[0][1])

    alone, two = columns(1), columns(2)
    for degrees in ({"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}):
        assert columns(2, **degrees) == pytest.approx(alone, rel=1e-4), degrees
    for stage in (1, 2, 3):
        assert columns(2, zero=stage) == pytest.approx(two, rel=1e-4), stage
    assert columns(4, tp=2, zero=2) == pytest.approx(two, rel=1e-4)


def test_what_was_measured_between_two_rows_is_kept_through_a_restart(ranks: Ranks, tmp_path: Path) -> None:
    """Rows of steps 4, 8 and 12, a checkpoint of step 6, and an end in step 7."""

    def columns(name: str, *kill_at: int) -> list[tuple[float, float]]:
        path = tmp_path / name
        for attempt, at in enumerate([*kill_at, None]):
            inject = () if at is None else attempts.kill_all(at, attempt)
            base = attempts.config_of(checkpoint={"every_steps": 6}, inject=inject)
            config = replace(base, train=replace(base.train, noise_scale_every=1, log_every=4))
            ranks(2).run(attempts.attempt_of, path=path, attempt=attempt, config=config)
        found = read_metrics(RunDir(path))
        assert [row["step"] for row in found] == [4, 8, 12]
        return [(row[NOISE_GRADIENT], row[NOISE_VARIANCE]) for row in found]

    assert columns("interrupted", 7) == columns("whole")
