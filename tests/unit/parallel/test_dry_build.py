"""Layouts at their real size without memory: the ZeRO paper's example, presets, and the estimate beside.

Every preset, with few layers: tests/unit/train/test_exact_count.py.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from conf.schema import (
    Config,
    Family,
    ModelConfig,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    TrainConfig,
)
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.run.config_file import write_config
from orchestra.sizes.flops import num_parameters
from orchestra.sizes.memory.rank_memory import RankBytes
from orchestra.sizes.topology import layout
from orchestra.train.dry_build import dry_build, main
from orchestra.train.memory.out_of_memory import bytes_needed

# 7.5 billion parameters, as in the paper (Rajbhandari and others, 2020, figure 1): 16 bytes of each are kept.
PAPER = ModelConfig(
    family=Family.gpt,
    hidden_size=4096,
    intermediate_size=16384,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=60000,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
CLUSTER = ["cluster=slurm", "cluster.gpus_per_node=8", "data=tokens"]


def composed(*overrides: str) -> tuple[Config, int]:
    """Return a configuration and its number of ranks."""
    everything = [*overrides, "data.path=s3://bucket/corpus"]
    config = compose(everything, Situation("plan", num_gpus=8)).config
    return config, config.cluster.nodes * int(config.cluster.gpus_per_node)


def estimated(config: Config, world_size: int, *, is_gpu: bool = False) -> RankBytes:
    return bytes_needed(config, layout(config.parallelism, world_size), is_gpu=is_gpu)


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_zero_papers_example_holds_what_the_paper_says(zero: int, gigabytes: float) -> None:
    assert num_parameters(PAPER) == pytest.approx(7.5e9, rel=0.002)
    config = Config(
        model=PAPER,
        precision=PrecisionConfig(PrecisionName.bf16),
        parallelism=ParallelismConfig(zero=zero, bucket_mib=500.0),
        train=TrainConfig(seq_len=1024, global_batch_size=64, micro_batch_size=1),
    )
    held = dry_build(config, 64)
    assert held.state == pytest.approx(gigabytes * 1e9, rel=0.02)
    assert estimated(config, 64).state == pytest.approx(held.state, rel=0.02)


@pytest.mark.parametrize("preset", ["zero3", "hsdp8", "tp8"])
def test_parallel_presets_build_at_their_real_size(preset: str) -> None:
    sizes = ["model=llama3_8b", "precision=bf16", "train=pretrain_8k", "train.micro_batch_size=1"]
    layouts = [f"parallelism={preset}", "parallelism.bucket_mib=500", "cluster.nodes=2"]
    config, world_size = composed(*CLUSTER, *sizes, *layouts)
    held = dry_build(config, world_size, rank=world_size - 1)
    expected = estimated(config, world_size)
    assert held.state == pytest.approx(expected.state, rel=0.02)
    assert held.gathered_units == pytest.approx(expected.first_buffers, rel=0.05)


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"experiment={name}"] for name in ("llama3_70b", "mixtral_8x7b", "qwen3_30b_a3b")),
        ["experiment=llama3_70b", "parallelism=tp8_pp4"],
    ],
    ids="+".join,
)
def test_experiments_build_at_their_real_size(overrides: list[str]) -> None:
    config, world_size = composed(*overrides, "parallelism.bucket_mib=500")
    expected = estimated(config, world_size, is_gpu=True)
    assert dry_build(config, world_size).state == pytest.approx(expected.state, rel=0.02)


def test_the_fullest_stage_of_deepseek_v3_builds_at_its_real_size() -> None:
    """Its first layers, which are dense, are the first stages'."""
    config, world_size = composed("experiment=deepseek_v3")
    expected = estimated(config, world_size, is_gpu=True).state
    assert dry_build(config, world_size).state < 0.7 * expected
    assert dry_build(config, world_size, rank=world_size // 2).state == pytest.approx(expected, rel=0.02)


@pytest.mark.slow
def test_the_405b_model_builds_on_1024_ranks_within_a_minute_and_8_gb(tmp_path: Path) -> None:
    config, world_size = composed("experiment=llama3_405b")
    assert world_size == 1024
    write_config(tmp_path / "config.yaml", config)
    command = [sys.executable, "-m", "orchestra.train.dry_build", str(tmp_path / "config.yaml")]
    command += ["--world-size=1024", "--rank=1023"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert used.ru_maxrss * 1024 < 8e9
    # The time of processors: on a busy machine the clock tells of others.
    assert used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime < 60
    held = json.loads(done.stdout)
    assert held["state_bytes"] == pytest.approx(16 * num_parameters(config.model) / 1024, rel=0.02)


def test_the_command_says_what_does_not_fit_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path / "config.yaml", Config(train=TrainConfig(global_batch_size=16)))
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "config.yaml"), "--world-size=64"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: train.global_batch_size=16 is not a multiple of dp=64")


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 2, 3])
@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True)])
def test_the_estimate_for_messages_is_what_a_dry_step_takes(
    zero: int, tp: int, sequence_parallel: bool
) -> None:
    """Users read it when memory has run out, so it must not send them to the wrong place."""
    model = ModelConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=3, vocab_size=4096)
    config = Config(
        model=model,
        precision=PrecisionConfig(PrecisionName.bf16),
        parallelism=ParallelismConfig(zero=zero, tp=tp, sequence_parallel=sequence_parallel),
        train=TrainConfig(seq_len=1024, global_batch_size=16, micro_batch_size=4),
    )
    held = dry_build(config, 4, with_step=True)
    assert held.passing is not None
    whole = held.state + held.gathered_units + held.passing
    assert whole == pytest.approx(estimated(config, 4).total, rel=0.15)
    if zero != 2:
        return
    halved = dataclasses.replace(config.train, micro_batch_size=2)
    smaller = dry_build(dataclasses.replace(config, train=halved), 4, with_step=True)
    assert smaller.passing is not None
    assert smaller.passing < held.passing
