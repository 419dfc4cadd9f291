"""A GPU's memory: the micro-batch that is found fits, the next one does not, running out is explained. And
what observers add on a GPU: kernels in the trace, memory's history and its peak.
"""

from __future__ import annotations

import gc
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.schema import (
    Config,
    ModelConfig,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    ProfileConfig,
    TrainConfig,
)
from orchestra.parallel.mesh import Mesh, RankEnvironment, make_mesh, open_mesh
from orchestra.run.paths import RunDir
from orchestra.sizes.step_shares import OTHER, read_shares
from orchestra.sizes.topology import Layout, divisors
from orchestra.train.build import build_training
from orchestra.train.memory.micro_batch import choose_micro_batch_size
from orchestra.train.memory.out_of_memory import is_out_of_memory
from orchestra.train.metrics import memory_peak_bytes
from orchestra.train.watch.profile import StepProfiler

GPU = torch.device("cuda")

# More sequences than any device holds: 32 MiB of activations and more in each.
SHARE = 1 << 16
CONFIG = Config(
    model=ModelConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1024,
        max_position_embeddings=2048,
    ),
    precision=PrecisionConfig(PrecisionName.bf16),
    parallelism=ParallelismConfig(zero=1),
    train=TrainConfig(seq_len=2048, global_batch_size=SHARE, micro_batch_size="auto"),
)


def test_the_chosen_micro_batch_is_the_largest_that_fits_and_its_trials_leave_nothing() -> None:
    alone = RankEnvironment()
    with open_mesh(CONFIG, alone) as mesh:
        # The first products, forward and backward, allocate what cuBLAS keeps for each thread's later ones.
        take_a_step(1, mesh)
        before = torch.cuda.memory_allocated(mesh.device)
        choice = choose_micro_batch_size(CONFIG, mesh, alone)
        assert torch.cuda.memory_allocated(mesh.device) == before
        assert None in choice.peak_bytes.values()
        sizes = divisors(SHARE)
        assert choice.peak_bytes[sizes[sizes.index(choice.size) + 1]] is None
        take_a_step(choice.size, mesh)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            take_a_step(8 * choice.size, mesh)
        assert is_out_of_memory(raised.value)


def take_a_step(size: int, mesh: Mesh) -> None:
    """Train a step of one micro-batch of so many sequences, and release what it took."""
    training = build_training(replace(CONFIG, train=replace(CONFIG.train, micro_batch_size=size)), mesh)
    try:
        tokens = torch.zeros(1, size, CONFIG.train.seq_len + 1, dtype=torch.int64, device=mesh.device)
        training.step.run(1, tokens)
        training.parallelized.stage.settle()
    finally:
        training.parallelized.stage.close()
    del training, tokens
    gc.collect()
    torch.cuda.empty_cache()


def test_trace_holds_kernels_and_the_memory_history_is_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    profiler = StepProfiler(ProfileConfig(enabled=True, steps=[2, 3]), run, rank=0)
    matrix = torch.rand(256, 256, device=GPU)
    for step in range(1, 5):
        with profiler.around_step(step):
            matrix = (matrix @ matrix).softmax(0)
    profiler.write()
    trace = json.loads(gzip.decompress((run.profile / "rank-00000-steps-2-3.json.gz").read_bytes()))
    assert "kernel" in {event.get("cat") for event in trace["traceEvents"]}
    assert (run.profile / "rank-00000-steps-2-3-memory.pickle").stat().st_size > 0


def test_peak_memory_is_that_of_tensors_on_the_device() -> None:
    before = memory_peak_bytes(GPU)
    block = torch.empty(before + (64 << 20), dtype=torch.uint8, device=GPU)
    assert memory_peak_bytes(GPU) >= block.numel()


@pytest.mark.parametrize("compiled", [False, True])
def test_parts_of_a_profiled_step_add_up_and_nearly_all_of_it_is_attributed(
    tmp_path: Path, compiled: bool
) -> None:
    wide = replace(CONFIG.model, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4)
    sizes = replace(CONFIG.train, seq_len=2048, micro_batch_size=4, global_batch_size=8, compile=compiled)
    config = replace(CONFIG, model=wide, train=sizes)
    mesh = make_mesh(0, Layout(dp=1), torch.device("cuda", 0))
    training = build_training(config, mesh)
    run = RunDir(tmp_path)
    profiler = StepProfiler(ProfileConfig(enabled=True, steps=[4, 6]), run, rank=0)
    tokens = torch.zeros(2, 4, sizes.seq_len + 1, dtype=torch.int64)
    try:
        for step in range(1, 7):
            with profiler.around_step(step):
                training.step.run(step, tokens)
        profiler.write()
    finally:
        training.parallelized.stage.close()
    shares = read_shares(run.profile)
    assert shares is not None
    assert sum(shares.parts_s.values()) == pytest.approx(shares.step_s, rel=1e-6)
    assert shares.parts_s["backward"] > shares.parts_s["forward"] > 0 < shares.parts_s["optimizer"]
    assert shares.parts_s[OTHER] < 0.1 * shares.step_s
