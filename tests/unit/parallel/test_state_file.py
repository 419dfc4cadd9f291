"""State on a disk: what memory holds of it, what is left of it, and what ends a training in words."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.schema import (
    Config,
    ModelConfig,
    Offload,
    OptimConfig,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    StateDType,
    TrainConfig,
)
from orchestra.errors import TrainingError
from orchestra.parallel.mesh import make_mesh
from orchestra.parallel.zero.state_file import NUM_BUFFERS
from orchestra.sizes.topology import Layout
from orchestra.train.build import Training, build_training
from orchestra.train.dry_build import held_bytes, take_step
from orchestra.train.state import TensorState

MESH = make_mesh(0, Layout(dp=1), torch.device("cpu"))
# Of a parameter: an fp32 master and two moments.
STATE_BYTES = 12


def config_of(folder: Path, **model: int) -> Config:
    """Return a model of several units, whose state lies in `folder`."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 96, **model}
    return Config(
        model=ModelConfig(**sizes, num_attention_heads=4, num_key_value_heads=4),  # type: ignore[arg-type]
        parallelism=ParallelismConfig(
            bucket_mib=0.01, offload=Offload.optimizer_disk, offload_dir=str(folder)
        ),
        precision=PrecisionConfig(PrecisionName.bf16),
        train=TrainConfig(seq_len=8, global_batch_size=1, micro_batch_size=1),
    )


@contextmanager
def trained(config: Config, steps: int = 2) -> Iterator[Training]:
    training = build_training(config, MESH)
    try:
        for step in range(1, steps + 1):
            take_step(training, MESH, step, 1)
        training.parallelized.stage.settle()
        yield training
    finally:
        training.parallelized.stage.close()


def take_to_the_end(training: Training, step: int) -> None:
    take_step(training, MESH, step, 1)
    training.parallelized.stage.settle()


def open_file(folder: Path, process: str = "self") -> Path:
    """Return the path under which the file without a name can be opened."""
    links = [link for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()]
    (found, *_) = [link for link in links if str(link.readlink()).startswith(f"{folder}/")]
    return found


def flip_a_bit(folder: Path, at: int) -> None:
    with open_file(folder).open("r+b") as file:
        file.seek(at)
        content = file.read(1)
        file.seek(at)
        file.write(bytes([content[0] ^ 4]))


@contextmanager
def file_sizes_limited_to(num_bytes: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def middle(training: Training) -> tuple[int, int]:
    """Return the number of a unit that no buffer holds between steps, and where it begins in the file."""
    units = training.parallelized.units
    assert units.state_file is not None
    assert len(units.units) > 2 * NUM_BUFFERS
    number = units.state_file.order[len(units.units) // 2]
    return number, units.state_file.mapped(number).masters.storage_offset() * 4


@pytest.mark.parametrize("moment", StateDType)
def test_memory_holds_two_units_of_the_state(tmp_path: Path, moment: StateDType) -> None:
    config = replace(config_of(tmp_path), optim=OptimConfig(state_dtype=moment))
    each = 12 if moment is StateDType.fp32 else 8
    with trained(config) as training:
        held, units = held_bytes(training), training.parallelized.units
        largest = max(unit.layout.range_size for unit in units.units)
        page = 4096
        assert held.on_disk >= each * sum(item.parameter.numel() for item in units.trained)
        assert held.optimizer <= NUM_BUFFERS * (each * largest + page)
        assert held.optimizer < held.on_disk / 2


def test_a_flipped_bit_ends_the_training_where_it_is_read(tmp_path: Path) -> None:
    with trained(config_of(tmp_path)) as training:
        number, begin = middle(training)
        flip_a_bit(tmp_path, begin + 100)
        expected = rf"{tmp_path}: unit {number} \(layers\..*bytes {begin:,} to .*not what was written"
        with pytest.raises(TrainingError, match=expected):
            take_to_the_end(training, 3)


def test_a_flipped_bit_is_never_saved(tmp_path: Path) -> None:
    with trained(config_of(tmp_path)) as training:
        state = TensorState(training.parallelized, training.optimizer, MESH)
        take_step(training, MESH, 3, 1)
        state.snapshot()
        number, begin = middle(training)
        flip_a_bit(tmp_path, begin + 100)
        with pytest.raises(TrainingError, match=rf"unit {number} .* not what was written"):
            state.snapshot()


def test_a_disk_without_room_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    needed = r"this rank's masters and moments take \d+ KiB there: .*; free some, give another folder"
    with (
        file_sizes_limited_to(1 << 16),
        pytest.raises(TrainingError, match=f"parallelism.offload_dir={tmp_path}: {needed}"),
    ):
        build_training(config_of(tmp_path), MESH)
    gone = tmp_path / "gone"
    with pytest.raises(TrainingError, match=f"offload_dir={gone}: .* it is no folder of this node"):
        build_training(config_of(gone), MESH)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_more_ends_the_training_in_words(tmp_path: Path) -> None:
    with (
        trained(config_of(tmp_path)) as training,
        file_sizes_limited_to(1 << 16),
        pytest.raises(TrainingError, match=r"unit \d+ .* cannot be written: File too large; check that"),
    ):
        take_to_the_end(training, 3)


def test_folders_in_memory_serve_too(tmp_path: Path) -> None:
    """Some file systems there know no direct I/O, others take any length."""
    del tmp_path
    with trained(config_of(Path("/dev/shm"))) as training:
        on_disk = training.optimizer.num_updates
    assert on_disk == 2


# Prints how much memory of its own it holds once it has trained, beside what it had before, and waits.
PROGRAM = """
import json, sys, time
from pathlib import Path
import torch
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.parallel.mesh import make_mesh
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_training
from orchestra.train.dry_build import take_step
torch.set_num_threads(1)
mesh = make_mesh(0, Layout(dp=1), torch.device("cpu"))
config = compose(sys.argv[1:], Situation("plan")).config
def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(dict(line.split(":", 1) for line in lines)["RssAnon"].split()[0])
before = held()
training = build_training(config, mesh)
for step in (1, 2):
    take_step(training, mesh, step, 1)
training.parallelized.stage.settle()
count = sum(item.parameter.numel() for item in training.parallelized.trained)
print(json.dumps({"held": held() - before, "count": count}), flush=True)
time.sleep(60)
"""
LARGE = (
    *("model=debug", "model.hidden_size=512", "model.intermediate_size=1024", "model.num_hidden_layers=8"),
    *("train.seq_len=8", "train.global_batch_size=1", "train.micro_batch_size=1", "precision=bf16"),
    *("cluster.gpus_per_node=1", "cluster.device=cpu", "parallelism.bucket_mib=1", "train.compile=false"),
)


def test_a_process_holds_no_state_in_memory_and_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    disk = ("parallelism.offload=optimizer_disk", f"parallelism.offload_dir={tmp_path}")
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *LARGE, *disk], stdout=subprocess.PIPE, env=os.environ
    ) as process:
        try:
            assert process.stdout is not None
            found = json.loads(process.stdout.readline())
            file = open_file(tmp_path, str(process.pid))
            assert file.stat().st_size >= STATE_BYTES * found["count"]
            # Nobody has to remove what has no name.
            assert list(tmp_path.iterdir()) == []
        finally:
            process.kill()
    # Parameters and gradients in 16 bits; what two units and the step take is less than a third of the state.
    assert found["held"] < (2 + 2 + STATE_BYTES / 3) * found["count"]
