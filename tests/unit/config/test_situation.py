"""What a configuration meets: numbers that the machine decides, and sizes that it cannot carry."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import OmegaConf

from conf.schema import Config
from orchestra.config.machine import Situation, resolved, this_machine, world_size
from orchestra.config.rules.all_rules import problems_of
from orchestra.run.config_file import writable_schema

PLAN = Situation("plan", num_gpus=0)
DRY_RUN = Situation("run", num_gpus=0)
LAPTOP = Situation("run", num_gpus=0, num_cores=2, memory_bytes=16 * 2**30)

Change = dict[str, Any]


def met(changes: Change, situation: Situation) -> Config:
    """The default configuration with some keys changed, where it is resolved."""
    node = writable_schema()
    for name, value in changes.items():
        OmegaConf.update(node, name, value)
    return resolved(cast(Config, OmegaConf.to_object(node)), situation)


def broken(changes: Change, situation: Situation) -> list[str]:
    return problems_of(met(changes, situation), situation)


@pytest.mark.parametrize(
    ("num_gpus", "changes", "device", "ranks"),
    [
        (0, {}, "cpu", 2),
        (4, {}, "cuda", 4),
        (4, {"cluster.device": "cpu"}, "cpu", 2),
        (4, {"cluster.gpus_per_node": 1}, "cuda", 1),
        (0, {"cluster.gpus_per_node": 5}, "cpu", 5),
        (0, {"cluster.device": "cuda"}, "cuda", None),
        (4, {"cluster.launcher": "slurm"}, "auto", None),
    ],
)
def test_auto_becomes_what_this_machine_has(
    num_gpus: int, changes: Change, device: str, ranks: int | None
) -> None:
    config = met(changes, Situation("run", num_gpus))
    assert config.cluster.device.value == device
    assert world_size(config) == ranks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster.gpus_per_node": 17}, ["gpus_per_node=17", "2 usable core(s)", "use at most 16"]),
        (
            {"model.vocab_size": 10**7},
            ["2,560,738,432 parameters × 16 bytes", "× 2 rank(s)", "78,147 MiB", "16,384 MiB"],
        ),
    ],
)
def test_what_cannot_run_on_this_machine_is_refused_where_it_would_start(
    changes: Change, words: Sequence[str]
) -> None:
    found = broken(changes, LAPTOP)
    assert any(all(word in problem for word in words) for problem in found), found
    assert broken(changes, DRY_RUN) == []
    assert broken({}, LAPTOP) == []


def test_a_machine_on_which_ranks_start_says_its_cores_and_memory() -> None:
    machine = this_machine(starts=True)
    assert machine.num_cores is not None
    assert machine.num_cores >= 1
    assert machine.memory_bytes is not None
    assert machine.memory_bytes > 2**27
    assert this_machine() == Situation("run", machine.num_gpus)


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 16),
        ({"cluster.gpus_per_node": 3}, 18),
        ({"cluster.gpus_per_node": 6, "parallelism.tp": 2}, 18),
        ({"train.micro_batch_size": 5}, 20),
        ({"train.global_batch_size": 6}, 6),
        ({"train.global_batch_tokens": 1024}, None),
        ({"cluster.launcher": "slurm"}, None),
        ({"parallelism.tp": 3}, None),
    ],
)
def test_a_batch_size_that_nobody_gave_is_written_down(changes: Change, size: int | None) -> None:
    assert met(changes, PLAN).train.global_batch_size == size


def test_a_checkpoint_must_fit_the_disk_it_goes_to(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    # Just enough tokens that 12 bytes for each of their parameters are more than what is free.
    changes = {"model.vocab_size": free // (12 * 256) + 1, "model.tie_word_embeddings": False}
    huge = Situation("run", num_gpus=0, num_cores=2, memory_bytes=2**60)
    for place, name in (
        ({"run.dir": str(tmp_path)}, "run.dir"),
        ({"checkpoint.dir": f"file://{tmp_path}/new"}, "checkpoint.dir"),
    ):
        found = [
            problem for problem in broken({**changes, **place}, huge) if "one checkpoint needs" in problem
        ]
        assert len(found) == 1, found
        for word in (f"{name}=", "parameters × 12 bytes", "are free", "checkpoint.every_steps=null"):
            assert word in found[0]
    assert broken({**changes, "checkpoint.dir": "s3://bucket/x"}, huge) == []
    assert broken({**changes, "run.dir": str(tmp_path), "checkpoint.every_steps": None}, huge) == []
    assert broken({**changes, "run.dir": str(tmp_path)}, DRY_RUN) == []


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({}, 16),
        ({"parallelism.zero": 1}, 8 + 8 / 4),
        ({"parallelism.zero": 2}, 4 + 12 / 4),
        ({"parallelism.zero": 3}, 16 / 4),
        ({"parallelism.zero": 3, "parallelism.shard_degree": 2}, 16 / 2),
        ({"parallelism.tp": 2}, 16 / 2),
        ({"parallelism.tp": 2, "parallelism.zero": 3}, 16 / 4),
        ({"precision.name": "bf16", "parallelism.zero": 1}, 4 + 12 / 4),
        ({"optim.state_dtype": "bf16"}, 12),
    ],
    ids=str,
)
def test_training_on_cpu_must_fit_host_memory_as_its_layout_shares_it_out(
    changes: Change, each: float
) -> None:
    on_cpu = {"cluster.device": "cpu", "cluster.gpus_per_node": 4, "checkpoint.every_steps": None, **changes}
    needed = round(808_064 * 4 * each)
    assert broken(on_cpu, replace(LAPTOP, memory_bytes=needed)) == []
    (problem,) = broken(on_cpu, replace(LAPTOP, memory_bytes=needed - 1))
    assert f"808,064 parameters × {each:g} bytes" in problem
    assert ("or parallelism=zero3" in problem) is (changes.get("parallelism.zero") != 3)


def test_a_checkpoint_must_fit_host_memory_beside_the_training() -> None:
    # 808,064 parameters: 2 ranks × 16 bytes for training and 12 bytes for one staged copy.
    just_enough = 808_064 * (2 * 16 + 12)
    on_cpu = {"cluster.device": "cpu", "cluster.gpus_per_node": 2}
    machine = replace(LAPTOP, memory_bytes=just_enough)
    assert broken(on_cpu, machine) == []
    (problem,) = broken(on_cpu, replace(machine, memory_bytes=just_enough - 1))
    for word in (
        "808,064 parameters × 12 bytes = 9.25 MiB of host memory",
        "beside the 24.7 MiB",
        "every_steps=null",
    ):
        assert word in problem
    assert (
        broken({**on_cpu, "checkpoint.every_steps": None}, replace(machine, memory_bytes=just_enough - 1))
        == []
    )


def test_a_folder_for_checkpoints_must_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (problem,) = broken({"checkpoint.dir": str(tmp_path / "file" / "checkpoints")}, LAPTOP)
    assert f"{tmp_path}/file is not a folder" in problem


def test_a_folder_for_checkpoints_means_the_same_from_anywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert met({"checkpoint.dir": "saved"}, PLAN).checkpoint.dir == str(tmp_path / "saved")
    assert met({"checkpoint.dir": "s3://bucket/saved"}, PLAN).checkpoint.dir == "s3://bucket/saved"
