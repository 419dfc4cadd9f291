"""Which members share an array, how it is cut, and the script that follows: pure text and numbers."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, Config, Device, LauncherName
from orchestra.run.paths import SweepDir
from orchestra.submit.job import Share
from orchestra.submit.sweeps.arrays import (
    Numbering,
    PlannedArray,
    Templates,
    num_nodes,
    planned_arrays,
    task_ranges,
    template_of,
    with_code,
)

SWEEP = SweepDir(Path("/runs/my grid"))


def config(nodes: int = 1) -> Config:
    cluster = ClusterConfig(launcher=LauncherName.slurm, device=Device.cpu, gpus_per_node=2, nodes=nodes)
    return dataclasses.replace(Config(), cluster=cluster)


def planned(templates: dict[int, str], size: int = 1000, throttle: int | None = None) -> list[PlannedArray]:
    numbering = Numbering("grid", "ada", 0.0, size, throttle)
    return planned_arrays(templates, numbering, itertools.count())


def expanded(text: str) -> list[int]:
    """Read task numbers as Slurm does."""
    found: list[int] = []
    for word in text.split(","):
        span, _, step = word.partition(":")
        first, _, last = span.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return found


@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        ([0], "0"),
        ([0, 1], "0-1"),
        ([0, 1, 2, 7], "0-2,7"),
        ([0, 2, 4, 6], "0-6:2"),
        ([3, 9], "3,9"),
        ([0, 2, 3, 4, 9, 12, 15], "0,2-4,9-15:3"),
    ],
)
def test_task_numbers_are_said_in_ranges(tasks: list[int], text: str) -> None:
    assert task_ranges(tasks) == text


def test_ranges_mean_the_same_numbers_for_every_subset() -> None:
    for bits in range(1, 1 << 9):
        tasks = [number for number in range(9) if bits >> number & 1]
        assert expanded(task_ranges(tasks)) == tasks


def test_members_with_equal_jobs_share_an_array_and_others_do_not() -> None:
    made = Templates(SWEEP)
    arrays = planned({index: made.of(config(1 + index % 2), Share()) for index in range(6)})
    assert [it.array.members for it in arrays] == [(0, 2, 4), (1, 3, 5)]
    assert [num_nodes(it.script()) for it in arrays] == [1, 2]
    assert len({it.array.token for it in arrays}) == 2


@pytest.mark.parametrize("size", [1, 3, 4, 10, 11])
def test_no_array_is_larger_than_the_cluster_takes_and_each_member_has_one_task(size: int) -> None:
    members = [0, 1, 2, 5, 6, 8, 9, 10]
    arrays = planned(dict.fromkeys(members, "same"), size)
    assert [index for it in arrays for index in it.array.members] == members
    assert all(0 <= task < size for it in arrays for task in it.array.tasks)


def test_arrays_of_one_sweep_share_what_may_run_at_a_time() -> None:
    assert [it.throttle for it in planned(dict.fromkeys(range(10), "same"), 5, throttle=4)] == [2, 2]
    assert [it.throttle for it in planned({0: "a", 1: "b"}, throttle=1)] == [1, 1]


def test_the_script_names_tasks_token_and_first_member_and_gives_its_template_back() -> None:
    template = Templates(SWEEP).of(config(2), Share())
    (_, second) = planned(dict.fromkeys(range(7), template), size=4, throttle=3)
    script = second.script()
    assert "#SBATCH --array=0-2%1\n" in script
    assert f"#SBATCH --comment={second.array.token}\n" in script
    assert "-m orchestra.agents '/runs/my grid' --first 4\n" in script
    assert "-m orchestra.agents.srun_failed '/runs/my grid' --first 4 \"$code\"\n" in script
    assert "%A_%a_%t_log.out" in script
    assert "export PYTHONPATH='/runs/my grid/code'" in script
    assert template_of(script) == template
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_members_that_go_on_can_get_another_snapshot() -> None:
    template = Templates(SWEEP).of(config(), Share())
    other = with_code(template, SWEEP, SWEEP.code_of_array(3))
    assert "export PYTHONPATH='/runs/my grid/code.array-003'$" in other
    assert with_code(other, SWEEP, SWEEP.code) == template


def test_a_split_array_keeps_its_token_and_its_rest_gets_another() -> None:
    (whole,) = planned(dict.fromkeys(range(5), "same"))
    head, rest = whole.split(2, 7)
    assert (head.array.token, head.array.members) == (whole.array.token, (0, 1))
    assert (rest.array.number, rest.array.members) == (7, (2, 3, 4))
    assert rest.array.token != whole.array.token
