"""A sweep's arrays, its directory and its claims.

Which members share an array, how it is cut and the script that follows; the directory is there all at once or
not at all, and there is one submitter at a time.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
from support.fake_slurm import FakeSlurm

from conf.schema import ClusterConfig, Config, Device, LauncherName, OptimConfig, RunConfig
from orchestra.config.machine import signature
from orchestra.errors import ConfigError
from orchestra.run.config_file import read_config, write_config
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import Sweep, SweepDir, read_sweep, to_json
from orchestra.submit.claims import exclusively, refuse_busy_sweep, take_array
from orchestra.submit.hand_over import SweepLedger, make, submit
from orchestra.submit.job import Share
from orchestra.submit.new_run import is_snapshot
from orchestra.submit.site import Site
from orchestra.submit.submission import PlannedMember, Submission, planned_sweep
from orchestra.submit.sweeps.arrays import (
    Numbering,
    PlacedSubmission,
    PlannedArray,
    Templates,
    num_nodes,
    planned_arrays,
    task_ranges,
    template_of,
    with_code,
)
from orchestra.submit.sweeps.members import ExistingSweep, same_sweep, sweeps_in
from orchestra.submit.sweeps.submit_sweep import resume_action

# No process of this machine has such a number.
NOBODY = 2**22 + 1
NUMBERING = Numbering("grid", "ada", 1.0, 1000)
CLUSTER = ClusterConfig(launcher=LauncherName.slurm, device=Device.cpu, gpus_per_node=2)
SWEEP = SweepDir(Path("/runs/my grid"))


def config(nodes: int = 1) -> Config:
    return dataclasses.replace(Config(), cluster=dataclasses.replace(CLUSTER, nodes=nodes))


def planned(templates: dict[int, str], size: int = 1000, throttle: int | None = None) -> list[PlannedArray]:
    numbering = Numbering("grid", "ada", 0.0, size, throttle)
    return planned_arrays(templates, numbering, itertools.count())


def expanded(text: str) -> list[int]:
    """Read task numbers as Slurm does."""
    numbers: list[int] = []
    for word in text.split(","):
        span, _, step = word.partition(":")
        first, _, last = span.partition("-")
        numbers += range(int(first), int(last or first) + 1, int(step or 1))
    return numbers


def test_ranges_are_short_and_mean_the_same_numbers_for_every_subset() -> None:
    for bits in range(1, 1 << 9):
        tasks = [number for number in range(9) if bits >> number & 1]
        assert expanded(task_ranges(tasks)) == tasks
    for tasks, text in (([0, 1], "0-1"), ([3, 9], "3,9"), ([0, 2, 3, 4, 9, 12, 15], "0,2-4,9-15:3")):
        assert task_ranges(tasks) == text


def test_members_with_equal_jobs_share_an_array_and_others_do_not() -> None:
    made = Templates(SWEEP)
    arrays = planned({index: made.of(config(1 + index % 2), Share()) for index in range(6)})
    assert [planned.array.members for planned in arrays] == [(0, 2, 4), (1, 3, 5)]
    assert [num_nodes(part.script()) for part in arrays] == [1, 2]
    assert len({part.array.token for part in arrays}) == 2


@pytest.mark.parametrize("size", [1, 3, 4, 10, 11])
def test_no_array_is_larger_than_the_cluster_takes_and_each_member_has_one_task(size: int) -> None:
    members = [0, 1, 2, 5, 6, 8, 9, 10]
    arrays = planned(dict.fromkeys(members, "same"), size)
    assert [index for part in arrays for index in part.array.members] == members
    assert all(0 <= task < size for part in arrays for task in part.array.tasks)


def test_arrays_of_one_sweep_share_what_may_run_at_a_time() -> None:
    assert [part.throttle for part in planned(dict.fromkeys(range(10), "same"), 5, throttle=4)] == [2, 2]
    assert [part.throttle for part in planned({0: "a", 1: "b"}, throttle=1)] == [1, 1]


@pytest.mark.parametrize(
    ("sizes", "throttle", "lanes"),
    [
        # (throttle, lane) of each array: one after another in a lane, whose sum is the throttle.
        ((5, 5, 5), 3, [(1, 0), (1, 1), (1, 2)]),
        ((5, 5, 5), 1, [(1, 0), (1, 0), (1, 0)]),
        ((3, 3, 1), 2, [(1, 0), (1, 1), (1, 0)]),
        ((4, 4, 2), 2, [(2, 0), (2, 0), (2, 0)]),
        ((5, 5), 5, [(5, 0), (5, 0)]),
        ((1000, 10), 2, [(2, 0), (2, 0)]),
        ((1000, 10), 101, [(100, 0), (1, 1)]),
        ((2, 1), 99, [(2, 0), (1, 1)]),
    ],
)
def test_lanes_never_run_more_than_the_throttle_and_take_the_fewest_rounds(
    sizes: tuple[int, ...], throttle: int, lanes: list[tuple[int, int]]
) -> None:
    names = [name for name, size in zip("abc", sizes, strict=False) for _ in range(size)]
    parts = planned(dict(enumerate(names)), throttle=throttle)
    assert [(part.throttle, part.lane) for part in parts] == lanes
    assert sum({part.lane: part.throttle or 0 for part in parts}.values()) <= throttle


def test_arrays_that_come_later_run_beside_the_jobs_that_live_or_after_them() -> None:
    living = ("7_0", "7_1", "9_0")
    for throttle, shares in ((5, [(2, ())]), (3, [(3, ("7", "9"))])):
        numbering = Numbering("grid", "ada", 0.0, 1000, throttle, living)
        parts = planned_arrays(dict.fromkeys(range(8), "same"), numbering, itertools.count())
        assert [(part.throttle, part.after) for part in parts] == shares


def test_an_array_is_submitted_to_begin_after_the_one_before_it_in_its_lane(
    tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    """Also where it is one of the halves of an array that a user's limit did not let in."""
    # Jobs 10, 11, 13, 14; the third one is refused.
    script = """cd {0}; echo >> count; n=$(wc -l < count); [ $n = 3 ] || {{ echo $((n + 9)); exit; }}
echo "sbatch: error: QOSMaxSubmitJobPerUserLimit" >&2; exit 1"""
    fake_slurm.put("sbatch", script.format(fake_slurm.folder))
    fake_slurm.put("squeue")
    plan = plan_of(tmp_path, tuple(range(9)))
    placed = PlacedSubmission(plan, planned_sweep(plan, 0.0), Numbering("grid", "ada", 1.0, 3, 2))
    assert [part.lane for part in placed.arrays()] == [0, 1, 0]
    _, outcome = submit(placed)
    calls = [call.split() for call in fake_slurm.calls("sbatch")]
    after = [next((word for word in call if "dependency" in word), "")[-2:] for call in calls]
    # The refused one, and its halves.
    assert after == ["", "", "10", "10", "13"]
    assert [array.id for array in outcome.accepted] == ["10", "11", "13", "14"]


def test_members_that_share_nodes_have_as_many_tasks_as_they_fill_and_all_of_them_in_one_list() -> None:
    cluster = dataclasses.replace(CLUSTER, members_per_node=3)
    packed = dataclasses.replace(Config(), cluster=cluster)
    template = Templates(SWEEP).of(packed, Share())
    assert "#SBATCH --cpus-per-task=6" in template
    (array,) = planned(dict.fromkeys(range(8), template))
    assert (array.array.tasks, array.array.members) == ((0, 1, 2), tuple(range(8)))
    (throttled,) = planned(dict.fromkeys(range(8), template), throttle=2)
    assert (throttled.array.tasks, throttled.throttle) == ((0, 1), 2)
    cut = planned(dict.fromkeys(range(8), template), size=2)
    assert [(len(part.array.tasks), part.array.members) for part in cut] == [
        (2, (0, 1, 2, 3, 4, 5)),
        (1, (6, 7)),
    ]
    head, rest = array.split(1, 7)
    assert sorted([*head.array.members, *rest.array.members]) == list(range(8))
    assert f"{SWEEP.path}' --at-once 3 --array 7\n" in rest.script()
    assert template_of(rest.script()) == template
    record = Sweep("grid", "s", (), (), (head.array, rest.array))
    assert json.loads(to_json(record))["arrays"][1]["packed"] == list(rest.array.packed)


def test_the_script_names_tasks_token_and_first_member_and_gives_its_template_back() -> None:
    template = Templates(SWEEP).of(config(2), Share())
    (_, second) = planned(dict.fromkeys(range(7), template), size=4, throttle=3)
    script = second.script()
    assert "#SBATCH --array=0-2%1\n" in script
    assert f"#SBATCH --comment={second.array.token}\n" in script
    assert "-m orchestra.agents '/runs/my grid' --first 4\n" in script
    assert "-m orchestra.agents.srun_failed '/runs/my grid' --first 4 \"$code\"\n" in script
    assert "%A_%a_%t_log.out" in script
    assert "export PYTHONPATH='/runs/my grid/code:/runs/my grid/plugins'" in script
    assert template_of(script) == template
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_members_that_go_on_can_get_another_snapshot() -> None:
    template = Templates(SWEEP).of(config(), Share())
    other = with_code(template, SWEEP, SWEEP.code_of_array(3))
    assert "export PYTHONPATH='/runs/my grid/code.array-003:/runs/my grid/plugins'" in other
    assert with_code(other, SWEEP, SWEEP.code) == template


def test_a_split_array_keeps_its_token_and_its_rest_gets_another() -> None:
    (whole,) = planned(dict.fromkeys(range(5), "same"))
    head, rest = whole.split(2, 7)
    assert (head.array.token, head.array.members) == (whole.array.token, (0, 1))
    assert (rest.array.number, rest.array.members) == (7, (2, 3, 4))
    assert rest.array.token != whole.array.token


# The directory and its claims.


def member(index: int, parent: Path, name: str | None, **cluster: object) -> PlannedMember:
    own = dataclasses.replace(
        Config(),
        run=RunConfig(name=name, dir=str(parent)),
        optim=OptimConfig(lr=0.1 + index),
        cluster=dataclasses.replace(CLUSTER, **cluster),  # type: ignore[arg-type]
    )
    chosen = (f"optim.lr={0.1 + index}",)
    return PlannedMember(index, signature(own), chosen, chosen, own, Share())


def plan_of(parent: Path, indices: tuple[int, ...] = (0, 1, 2), name: str | None = "grid") -> Submission:
    members = [
        dataclasses.replace(member(value, parent, name), index=index) for index, value in enumerate(indices)
    ]
    return Submission(tuple(members), ("-m",), ("orchestra", "submit"))


def made(parent: Path, **options: object) -> tuple[SweepDir, Sweep]:
    plan = plan_of(parent, **options)  # type: ignore[arg-type]
    ledger, _ = make(PlacedSubmission(plan, planned_sweep(plan, 0.0), NUMBERING))
    assert isinstance(ledger, SweepLedger)
    return ledger.sweep, ledger.record


def forget_claim(sweep: SweepDir, number: int = 0) -> None:
    """Let a claim look like one of a process that is no more."""
    sweep.claim(number).write_text(json.dumps({"host": socket.gethostname(), "pid": NOBODY, "time": 0.0}))


def test_the_directory_holds_record_code_script_and_the_members_runs(tmp_path: Path) -> None:
    sweep, record = made(tmp_path / "runs")
    assert read_sweep(sweep) == record
    assert {"000", "001", "002", "array-000.sbatch", "code", "control", "logs", "sweep.json"} == {
        path.name for path in sweep.path.iterdir()
    }
    assert (sweep.code / "orchestra" / "agents" / "__main__.py").is_file()
    run = sweep.member(2)
    frozen = read_config(run.config)
    assert (frozen.optim.lr, frozen.run.name, frozen.run.dir) == (2.1, "002", str(sweep.path))
    facts = json.loads(run.record.read_text())
    assert (facts["sweep"], facts["member"], facts["pid"]) == ("grid", 2, None)
    assert (facts["steps"], facts["signature"]) == (frozen.train.steps, record.members[2].signature)
    (job,) = facts["jobs"]
    assert (job["token"], job["task"], job["id"]) == (record.arrays[0].token, 2, None)


def test_a_taken_name_is_refused_and_a_made_one_changed(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(ConfigError, match=r"run.name=grid.*holds another sweep"):
        made(tmp_path)
    first, second = made(tmp_path, name=None)[0], made(tmp_path, name=None)[0]
    assert second.name == f"{first.name}-2"
    assert json.loads(second.member(0).record.read_text())["sweep"] == second.name
    assert f"--job-name={second.name}\n" in second.script(0).read_text()


def test_a_full_snapshot_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestra.submit.new_run._MAX_BYTES", 1)
    with pytest.raises(ConfigError, match="the code to be copied"):
        made(tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_the_order_of_the_values_and_the_throttle_make_no_other_sweep(tmp_path: Path) -> None:
    sweep, record = made(tmp_path)
    (existing,) = sweeps_in(tmp_path)
    assert existing == ExistingSweep(sweep, record)
    assert same_sweep(plan_of(tmp_path, (2, 0, 1)), [existing]) is existing
    assert same_sweep(plan_of(tmp_path, (2, 0, 1), name=None), [existing]) is existing
    assert same_sweep(plan_of(tmp_path, (0, 1)), [existing]) is None
    assert same_sweep(plan_of(tmp_path, name="other"), [existing]) is None
    throttled = member(0, tmp_path, "grid", array_throttle=3)
    assert throttled.signature == member(0, tmp_path, "grid").signature


def test_what_another_process_submits_is_left_to_it(tmp_path: Path) -> None:
    sweep, record = made(tmp_path)
    claim = {"host": socket.gethostname(), "pid": os.getppid(), "pid_started": None, "time": 0.0}
    sweep.claim(0).write_text(json.dumps(claim))
    with pytest.raises(ConfigError, match="is being submitted already: process"):
        refuse_busy_sweep(sweep, record)
    forget_claim(sweep)
    refuse_busy_sweep(sweep, record)


def test_a_snapshot_is_known_from_other_code(tmp_path: Path) -> None:
    sweep, _ = made(tmp_path)
    assert sweep.newest_code() == sweep.code
    assert is_snapshot(sweep.code)
    (sweep.code / "orchestra" / "__pycache__").mkdir()
    (sweep.code / "orchestra" / "__pycache__" / "units.pyc").write_text("")
    assert is_snapshot(sweep.code), "what Python leaves there is no change"
    (sweep.code / "orchestra" / "units.py").write_text("")
    assert not is_snapshot(sweep.code)


def test_of_two_commands_that_go_on_with_a_sweep_one_submits_and_none_by_an_older_record(
    tmp_path: Path,
) -> None:
    sweep, record = made(tmp_path)
    forget_claim(sweep)
    with pytest.raises(ConfigError, match="changed by another command meanwhile"):
        take_array(sweep, dataclasses.replace(record, arrays=()))
    assert not sweep.claim(1).exists()
    assert take_array(sweep, record) == 1
    claim = {"host": "elsewhere", "pid": 1, "time": 4e9}
    sweep.claim(1).write_text(json.dumps(claim))
    with pytest.raises(ConfigError, match="being submitted already"):
        take_array(sweep, record)


def test_members_of_an_older_version_may_keep_what_a_new_run_may_not_have(
    tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    fake_slurm.put("squeue")
    sweep, record = made(tmp_path)
    forget_claim(sweep)
    for index in range(3):
        run = sweep.member(index)
        frozen = read_config(run.config)
        # Of a model without experts; nobody asked about it once.
        model = dataclasses.replace(frozen.model, num_experts_per_tok=4)
        write_config(run.config, dataclasses.replace(frozen, model=model))
        EventWriter(run, node_writer(0, 0), 0).write("failed", node=0, code=1, cause="Error")
    action = resume_action(ExistingSweep(sweep, record), Site(None, is_dry=True), ("train.steps=2000",))
    assert action.resume is not None
    configs = [resumed.config for resumed in action.resume.members]
    kept = [(each.train.steps, each.model.num_experts_per_tok) for each in configs if each is not None]
    assert kept == [(2000, 4)] * 3


def lock_of(parent: Path, pid: int) -> Path:
    """Leave the lock of a process of this host."""
    claim = parent / ".sweep-abc.claim"
    claim.write_text(json.dumps({"host": socket.gethostname(), "pid": pid, "pid_started": None, "time": 0.0}))
    return claim


def test_lock_of_a_process_that_is_no_more_is_taken_over_and_ends_with_the_command(tmp_path: Path) -> None:
    claim = lock_of(tmp_path, NOBODY)
    with exclusively(tmp_path, "abc"):
        assert json.loads(claim.read_text())["pid"] == os.getpid()
    assert not claim.exists()


def test_lock_of_a_living_process_is_respected_and_stays(tmp_path: Path) -> None:
    claim = lock_of(tmp_path, os.getppid())
    with pytest.raises(ConfigError, match="being submitted already"), exclusively(tmp_path, "abc"):
        pytest.fail("two commands at a time")
    assert claim.exists()


def test_of_two_that_find_a_dead_lock_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_of(tmp_path, NOBODY)
    unlink = Path.unlink

    def unlink_and_lose(self: Path, missing_ok: bool = False) -> None:
        """Let the other command be faster by the time the lock is free."""
        unlink(self, missing_ok)
        lock_of(tmp_path, os.getppid())

    monkeypatch.setattr(Path, "unlink", unlink_and_lose)
    with pytest.raises(ConfigError, match="by another command"), exclusively(tmp_path, "abc"):
        pytest.fail("two commands at a time")
