"""Running out of memory ends a rank with what took how much and what would help."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.schema import (
    CheckpointConfig,
    Config,
    ModelConfig,
    ParallelismConfig,
    Recompute,
    TrainConfig,
    WandbConfig,
    WandbMode,
)
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED
from orchestra.parallel.mesh import RankEnvironment, open_mesh
from orchestra.run.config_file import write_config
from orchestra.run.events import EventWriter, rank_writer, read_events
from orchestra.run.paths import RunDir
from orchestra.sizes.advice import changed
from orchestra.sizes.topology import layout
from orchestra.train import step as training_step
from orchestra.train.hooks import StepResult
from orchestra.train.memory.out_of_memory import (
    OutOfMemoryError,
    best_remedies,
    bytes_needed,
    is_out_of_memory,
    out_of_memory,
)
from orchestra.train.trainer import RankAttempt, train_on

COMPONENTS = ("parameters", "gradients", "optimizer state", "activations", "communication buffers")
SMALL = Config(
    model=ModelConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, vocab_size=259),
    train=TrainConfig(steps=4, seq_len=64, global_batch_size=4, micro_batch_size=2),
    checkpoint=CheckpointConfig(every_steps=None),
    wandb=WandbConfig(mode=WandbMode.disabled),
)
# Runs a rank of a run that may map so many bytes more than it has when everything is imported.
LIMITED = """
import resource, sys
from pathlib import Path
import torch
from orchestra.run.paths import RunDir
from orchestra.train.trainer import run_rank
torch.set_num_threads(1)
(torch.rand(64, 64) @ torch.rand(64, 64)).sum()
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[2]),) * 2)
sys.exit(run_rank(RunDir(Path(sys.argv[1])), 0))
"""


def run_of(tmp_path: Path, config: Config) -> RunDir:
    run = RunDir(tmp_path)
    run.events.mkdir(parents=True)
    write_config(run.config, config)
    return run


def said_with_little_memory(run: RunDir) -> str:
    """Return the last words of a rank that may take 700 MiB, and needs more in its first step or before."""
    command = [sys.executable, "-c", LIMITED, str(run.path), str(700 << 20)]
    environment = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=100)
    (verdict,) = [event for event in read_events(run) if event["event"] == "failed"]
    assert verdict["cause"] == "OutOfMemoryError", done.stderr[-2000:]
    assert verdict["explained"]
    # The first step needs no less the next time.
    assert verdict["code"] == done.returncode == EXIT_DO_NOT_RESTART
    return str(verdict["message"])


@pytest.mark.slow
def test_a_rank_that_really_runs_out_of_memory_says_what_took_it(tmp_path: Path) -> None:
    # 0.4 GiB of activations in each layer, beside a model of a few MiB.
    train = replace(SMALL.train, seq_len=2048, micro_batch_size=32, global_batch_size=32)
    model = replace(SMALL.model, max_position_embeddings=2048)
    message = said_with_little_memory(run_of(tmp_path, replace(SMALL, model=model, train=train)))
    assert "out of memory on cpu in step 1" in message
    assert all(component in message for component in COMPONENTS)
    knobs = message.split("what would help most:\n")[1].splitlines()
    assert len(knobs) == 3
    assert any("train.micro_batch_size=16" in knob for knob in knobs)
    assert any("train.recompute=full" in knob for knob in knobs)


@pytest.mark.slow
def test_a_model_that_cannot_be_built_says_so_before_the_first_step(tmp_path: Path) -> None:
    wide = replace(SMALL.model, hidden_size=2048, intermediate_size=8192)
    message = said_with_little_memory(run_of(tmp_path, replace(SMALL, model=wide)))
    assert "in the build, before the first step" in message


@pytest.mark.parametrize(("at_step", "code"), [(1, EXIT_DO_NOT_RESTART), (3, EXIT_FAILED)])
def test_a_gpus_error_is_explained_wherever_it_comes_from(
    tmp_path: Path, at_step: int, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only an attempt that had trained a while can hope for more memory when it begins again."""
    true_run = training_step.TrainingStep.run

    def run_out(self: training_step.TrainingStep, step: int, tokens: torch.Tensor) -> StepResult:
        if step == at_step:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")
        return true_run(self, step, tokens)

    monkeypatch.setattr(training_step.TrainingStep, "run", run_out)
    run = run_of(tmp_path, SMALL)
    rank = RankAttempt(run, 0, EventWriter(run, rank_writer(0, 0), 0, rank=0))
    alone = RankEnvironment()
    with pytest.raises(OutOfMemoryError) as raised, open_mesh(SMALL, alone) as mesh:
        train_on(mesh, SMALL, alone, rank)
    assert raised.value.exit_code == code
    assert f"step {at_step}: CUDA out of memory. Tried to allocate 2.00 GiB." in str(raised.value)


def test_other_errors_stay_what_they_are() -> None:
    assert is_out_of_memory(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")
    )
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("the shapes do not match"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_each_remedy_is_one_of_this_layout_and_saves_memory(world_size: int) -> None:
    for zero, recompute in ((0, "none"), (1, "selective"), (3, "full")):
        train = replace(SMALL.train, recompute=Recompute(recompute), global_batch_size=16)
        config = replace(SMALL, train=train, parallelism=ParallelismConfig(zero=zero))
        degrees = layout(config.parallelism, world_size)
        need = bytes_needed(config, degrees, is_gpu=False).total
        remedies = best_remedies(config, degrees, is_gpu=False)
        assert 2 <= len(remedies) <= 3
        needs = [remedy.peak_bytes for remedy in remedies]
        assert needs == sorted(needs)
        for remedy in remedies:
            again = changed(config, remedy.changes)
            assert bytes_needed(again, layout(again.parallelism, world_size), is_gpu=False).total < need
        words = " ".join(remedy.overrides for remedy in remedies)
        assert recompute == "none" or f"recompute={recompute}" not in words
        assert world_size > 1 or "parallelism" not in words


def test_the_largest_component_of_a_large_model_is_what_the_advice_is_about() -> None:
    wide = replace(SMALL.model, hidden_size=4096, intermediate_size=16384, num_hidden_layers=32)
    config = replace(SMALL, model=wide, train=replace(SMALL.train, global_batch_size=16))
    degrees = layout(config.parallelism, 8)
    error = out_of_memory(MemoryError(), config, degrees, torch.device("cpu"), step=1, begin=0)
    knobs = str(error).split("what would help most:\n")[1]
    assert "parallelism.zero=3" in knobs
    assert "recompute" not in knobs
