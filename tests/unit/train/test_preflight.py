"""What is looked at before step 1: the numbers that do not fit stand in the message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checkpointing.options import Needs
from orchestra.errors import TrainingError
from orchestra.sizes.units import MIB
from orchestra.train.memory import host_memory
from orchestra.train.memory.micro_batch import host_limit_bytes

GIB = 1024 * MIB


def test_copies_of_all_ranks_of_a_node_must_fit_into_its_memory() -> None:
    host_memory.check_host_memory(3 * GIB, 2, 6 * GIB)
    host_memory.check_host_memory(3 * GIB, 2, None)
    with pytest.raises(TrainingError, match=r"6 GiB .* \(2 × 3 GiB\), and 5 GiB are free"):
        host_memory.check_host_memory(3 * GIB, 2, 5 * GIB)


def needs(free: int | None) -> Needs:
    return Needs(checkpoint_bytes=2 * GIB, staging_bytes=GIB, free_storage_bytes=free)


def test_one_checkpoint_must_fit_on_storage_and_room_for_more_is_counted() -> None:
    host_memory.check_storage(needs(2 * GIB), "s3://bucket/run")
    host_memory.check_storage(needs(None), "s3://bucket/run")
    with pytest.raises(TrainingError, match=r"s3://bucket/run: .* 2 GiB, and 1 GiB are free there"):
        host_memory.check_storage(needs(GIB), "s3://bucket/run")
    # What it outdates would go first.
    host_memory.check_storage(replace(needs(GIB), removable_bytes=GIB), "s3://bucket/run")
    # Room for those that are kept.
    assert host_memory.missing_storage_bytes(needs(8 * GIB), 4) == 0
    assert host_memory.missing_storage_bytes(needs(5 * GIB), 4) == 3 * GIB
    assert host_memory.missing_storage_bytes(needs(None), 4) == 0


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a machine with 8 GiB available and a process in the control group /slurm/job."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {8 * MIB} kB\n")
    (tmp_path / "cgroup").write_text("12:devices:/elsewhere\n0::/slurm/job\n")
    monkeypatch.setattr(host_memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_OWN_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_GROUPS", tmp_path / "groups")
    return tmp_path


def limit(folder: Path, maximum: int | str, used: int, inactive_file: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    for name, value in zip(names, (maximum, used), strict=True):
        (folder / f"memory.{name}").write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\n")


def test_without_a_limit_the_machine_s_memory_counts_where_it_is_told(system: Path) -> None:
    assert host_memory.available_host_bytes() == 8 * GIB
    limit(system / "groups/slurm/job", "max", GIB, 0)
    assert host_memory.available_host_bytes() == 8 * GIB
    (system / "meminfo").unlink()
    assert host_memory.available_host_bytes() is None


def test_the_tightest_group_counts_and_file_cache_is_no_use(system: Path) -> None:
    limit(system / "groups/slurm/job", 6 * GIB, 3 * GIB, GIB)
    assert host_memory.available_host_bytes() == 4 * GIB
    limit(system / "groups/slurm", 5 * GIB, 4 * GIB, 0)
    assert host_memory.available_host_bytes() == GIB


def test_a_container_of_version_1_counts_too(system: Path) -> None:
    limit(system / "groups/memory", 6 * GIB, 3 * GIB, GIB, version=1)
    assert host_memory.available_host_bytes() == 4 * GIB


def test_a_limit_counts_where_the_file_cache_is_not_told(system: Path) -> None:
    limit(system / "groups/slurm/job", 6 * GIB, 3 * GIB, GIB)
    (system / "groups/slurm/job/memory.stat").unlink()
    assert host_memory.available_host_bytes() == 3 * GIB
    # Two ranks share it, and none takes all.
    assert host_limit_bytes(2) <= 3 * GIB // 2
