"""What members that train at the same time get of a machine, and who has which member of an array's list."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, Config, Device
from orchestra.run.control.member_places import MemberPlace, end_place, newest_place, take_place
from orchestra.run.paths import RunDir
from orchestra.submit.sweeps.member_shares import shares


@pytest.mark.parametrize(
    ("members", "ranks", "devices"),
    [
        (2, 2, [("4", "5"), ("6", "7")]),
        (3, 1, [("4",), ("5",), ("6",)]),
        (8, 1, [("4",), ("5",), ("6",), ("7",), ("4",), ("5",), ("6",), ("7",)]),
        (1, 2, [None]),
    ],
)
def test_each_member_has_devices_of_its_own_or_shares_one(
    members: int, ranks: int, devices: list[tuple[str, ...] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    cluster = ClusterConfig(device=Device.cuda, gpus_per_node=ranks)
    made = shares([dataclasses.replace(Config(), cluster=cluster)], members)
    assert [share.devices for share in made] == devices
    assert {share.on_device for share in made} == {2 if members == 8 else 1}
    cores = os.sched_getaffinity(0)
    assert all(share.cores and share.cores <= cores for share in made)
    assert sum(len(share.cores) for share in made) <= max(len(cores), members)


def test_a_member_has_one_place_at_a_time_and_each_array_its_own_list(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert newest_place(run, 0) is None
    assert take_place(run, 0, 0, "12_1", 2)
    assert not take_place(run, 0, 0, "12_0")
    assert newest_place(run, 0) == MemberPlace(0, "12_1", 2)
    end_place(run, 0, 0, goes_on=True)
    end_place(run, 0, 0, goes_on=False)
    assert newest_place(run, 0) == MemberPlace(0, "12_1", 2, "goes on"), "the first word counts"
    assert take_place(run, 0, 1, None)
    assert newest_place(run, 0) == MemberPlace(1, None, 0)
    assert newest_place(run, 1) is None
