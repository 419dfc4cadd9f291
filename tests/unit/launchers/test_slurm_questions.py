"""Questions to Slurm and their answers: stand-ins for its commands print what the real ones were seen to."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fork_trials import eventually
from support.fake_slurm import ME, FakeSlurm, queue_line

from launchers import LauncherError, SlurmMissing, SlurmRefused, SlurmSilent, processes
from launchers.slurm import queue, sbatch
from launchers.slurm.cluster import parsed
from launchers.slurm.commands import DEFAULT_ARRAY_SIZE, array_size, is_full, output_of
from launchers.slurm.queue import GONE, UNKNOWN, Questions, SubmittedJob
from launchers.slurm.this_job import job_task

SILENCE = "squeue: error: slurm_receive_msg: Zero Bytes were transmitted or received"
FIRST = SubmittedJob("orchestra:aa", "11", "first", ME, 1e9)
LOST = SubmittedJob("orchestra:bb", None, "lost", ME, 1e9)


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr(sbatch, "_LOOK_AGAIN_S", (0.0, 0.0))
    return fake_slurm


def past_line(job: str, state: str, name: str, user: str = ME) -> str:
    return f"{job}|{state}|{user}|0:15|node1|2026-01-01T00:00:00|{name}|"


def test_one_question_answers_for_all_jobs(slurm: FakeSlurm) -> None:
    lines = [
        queue_line("11", "PENDING", "first", token=FIRST.token),
        queue_line("12", "RUNNING", "lost", token=LOST.token),
    ]
    slurm.says("squeue", prints="\n".join(lines))
    found, problems = Questions().states([FIRST, LOST], past=[FIRST, LOST])
    assert (found[FIRST].state, found[FIRST].reason) == ("PENDING", "Priority")
    assert (found[LOST].job, found[LOST].state) == ("12", "RUNNING"), "found by its token alone"
    assert (problems, len(slurm.calls())) == ([], 1)


def test_a_recycled_id_is_not_the_job(slurm: FakeSlurm) -> None:
    slurm.says("squeue", prints=queue_line("11", "RUNNING", "first", token="orchestra:cc"))
    others = [past_line("11", "COMPLETED", "first", user="somebody"), past_line("11", "FAILED", "other")]
    slurm.says("sacct", prints="\n".join(others))
    found, _ = Questions().states([FIRST], past=[FIRST])
    assert found[FIRST].state == GONE


def test_accounting_is_asked_for_what_left_the_queue_and_may_be_missing(slurm: FakeSlurm) -> None:
    slurm.says("squeue")
    slurm.says("sacct", prints=past_line("11", "CANCELLED by 1000", "first"))
    found, problems = Questions().states([FIRST, LOST], past=[FIRST, LOST])
    assert (found[FIRST].state, found[LOST].state) == ("CANCELLED", GONE)
    slurm.says("sacct", complains="Slurm accounting storage is disabled", code=1)
    found, problems = Questions().states([FIRST], past=[FIRST])
    assert (found[FIRST].state, problems) == (GONE, [])


def test_a_question_that_fails_is_no_answer(slurm: FakeSlurm) -> None:
    slurm.says("squeue", complains=SILENCE, code=1)
    found, problems = Questions().states([FIRST], past=[FIRST])
    assert found[FIRST].state == UNKNOWN
    states = ("PENDING", "COMPLETING", "TIMEOUT", GONE, UNKNOWN)
    assert [state for state in states if queue.JobState("1", state).is_over] == ["TIMEOUT", GONE]
    assert "Zero Bytes" in problems[0]


def test_refusal_silence_and_absence_are_told_apart(slurm: FakeSlurm) -> None:
    slurm.says("squeue", complains="squeue: error: Invalid user: x", code=1)
    with pytest.raises(SlurmRefused, match=r"squeue: Invalid user: x$"):
        output_of(("squeue",))
    slurm.says("squeue", complains=SILENCE, code=1)
    with pytest.raises(SlurmSilent):
        output_of(("squeue",))
    # In four lines, on a machine where Slurm is installed and no cluster is configured.
    lines = ("resolve_ctls_from_dns_srv: Unknown host", "fatal: Could not establish a configuration source")
    slurm.says("squeue", complains="\n".join(f"squeue: {line}" for line in lines), code=1)
    with pytest.raises(SlurmSilent, match=r"^squeue finds no configuration of a Slurm cluster [^;]*$"):
        output_of(("squeue",))
    with pytest.raises(SlurmMissing, match="login node"):
        output_of(("sbatch-of-nowhere",))
    slurm.put("squeue", "exec sleep 60")
    with pytest.raises(SlurmSilent, match=r"within 0\.2 s"):
        output_of(("squeue",), timeout_s=0.2)


def test_a_wrapper_that_hangs_ends_with_what_it_has_started(slurm: FakeSlurm) -> None:
    slurm.put("squeue", f"sleep 61 & echo $! > {slurm.folder}/child\nwait")
    began = time.monotonic()
    with pytest.raises(SlurmSilent, match=r"within 3 s"):
        output_of(("squeue",), timeout_s=3.0)
    assert time.monotonic() - began < 20
    child = int((slurm.folder / "child").read_text())
    assert eventually(lambda: processes.find(child) is None)


def test_a_job_whose_answer_was_lost_is_looked_for_and_not_submitted_again(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    slurm.says("sbatch", complains="sbatch: error: Socket timed out on send/recv operation", code=1)
    slurm.says("squeue", prints=queue_line("77", "PENDING", "x", token=f"{LOST.token} of mine"))
    assert sbatch.submit(tmp_path / "script", LOST.token) == "77"
    assert len(slurm.calls()) == 2
    slurm.says("squeue")
    with pytest.raises(SlurmRefused, match="holds no such job"):
        sbatch.submit(tmp_path / "script", LOST.token)
    slurm.says("squeue", complains=SILENCE, code=1)
    with pytest.raises(SlurmSilent):
        sbatch.submit(tmp_path / "script", LOST.token)


def test_an_id_and_an_estimate_are_read(slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.says("sbatch", prints="42;cluster")
    assert sbatch.submit(tmp_path / "script", LOST.token) == "42"
    slurm.says("sbatch", prints="checking your budget\n43\nproject p1 has 10 hours left")
    assert sbatch.submit(tmp_path / "script", LOST.token) == "43"
    where = "using 6 processors on nodes node[1-3] in partition main"
    said = f"sbatch: Job 9 to start at 2026-01-02T03:04:05 {where}"
    slurm.says("sbatch", complains=said)
    assert sbatch.tested("") == sbatch.Estimate("2026-01-02T03:04:05", "node[1-3]")
    assert sbatch.tested("#!/bin/bash\n#SBATCH --hold\ntrue\n") is None


def test_srun_is_asked_about_the_words_that_a_configuration_gives_it(slurm: FakeSlurm) -> None:
    own = "srun --unbuffered --output '/a run/%j_log.out' --open-mode=append --export=ALL --wait=0"
    words = "apptainer exec --nv x.sif env A=B python3 -m orchestra.agents"
    assert sbatch.srun_refuses(f"#!/bin/bash\n{own} {words}\n") is None
    assert slurm.calls() == []
    slurm.says("srun", complains="srun: unrecognized option '--mpii=x'\nTry \"srun --help\" for more", code=1)
    said = sbatch.srun_refuses(f"#!/bin/bash\n{own} --mpii=x --exact {words}\n")
    assert said is not None
    assert "unrecognized option '--mpii=x'" in said
    assert slurm.calls() == ["srun --mpii=x --exact --version"]


def test_partitions_and_their_kinds_of_nodes_are_read() -> None:
    text = """\
main*|up|infinite|3|16|idle|gpu:4(S:0)
main*|up|infinite|1|16+|down*|gpu:h100:8,shard:2
cpu|inact|1-00:00:00|10|128|mixed|(null)
slurm_load: something else
"""
    main, cpu = parsed(text)
    assert (main.name, main.is_default, main.most_gpus) == ("main", True, 8)
    assert (main.num_nodes(), main.num_nodes(8)) == (4, 1)
    assert [kind.gpu_types for kind in main.kinds] == [frozenset(), {"h100"}]
    assert (cpu.is_up, cpu.time_limit, cpu.most_gpus) == (False, "1-00:00:00", 0)


def test_a_task_knows_its_place() -> None:
    inside = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_NNODES": "3"}
    task = job_task({**inside, "SLURM_RESTART_COUNT": "1", "SLURMD_NODENAME": "node3"})
    assert (task.job, task.restart, task.node, task.num_nodes, task.host) == ("12", 1, 2, 3, "node3")
    assert task.job_began is None
    assert job_task({**inside, "SLURM_JOB_START_TIME": "1795648000"}).job_began == 1795648000.0
    member = job_task({**inside, "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "4"})
    assert (member.job, member.restart) == ("10_4", 0)
    with pytest.raises(LauncherError, match="SLURM_JOB_ID"):
        job_task({})
    with pytest.raises(LauncherError, match="one task on each"):
        job_task({**inside, "SLURM_NTASKS": "6"})


def test_a_script_that_somebody_submitted_by_hand_is_another_job(slurm: FakeSlurm) -> None:
    by_hand = queue_line("9", "FAILED", "first", token=FIRST.token)
    slurm.says("squeue", prints="\n".join([by_hand, queue_line("11", "RUNNING", "first", token=FIRST.token)]))
    assert Questions().states([FIRST], past=[FIRST])[0][FIRST].state == "RUNNING"
    slurm.says("squeue", prints=by_hand)
    slurm.says("sacct", code=1)
    assert Questions().states([FIRST], past=[FIRST])[0][FIRST].state == GONE


def test_the_size_of_an_array_is_the_clusters_own(fake_slurm: FakeSlurm) -> None:
    for config, size in (("MaxArraySize = 500", 500), ("ClusterName = alps", DEFAULT_ARRAY_SIZE)):
        fake_slurm.says("scontrol", prints=config)
        assert array_size() == size


VIOLATED = "Batch job submission failed: Job violates accounting/QOS policy"


# As sbatch of Slurm 22.05 says them.
@pytest.mark.parametrize(
    ("words", "is_passing"),
    [
        (f"sbatch: AssocMaxSubmitJobLimit; {VIOLATED} (job submit limit, user's size)", True),
        (f"sbatch: QOSMaxSubmitJobPerUserLimit; {VIOLATED}", True),
        ("sbatch: Slurm temporarily unable to accept job, sleeping and retrying", True),
        ("sbatch: Batch job submission failed: Requested node configuration is not available", False),
        ("sbatch: Batch job submission failed: Invalid account or account/partition combination", False),
    ],
)
def test_too_many_jobs_are_a_refusal_that_passes_and_a_wrong_job_not(words: str, is_passing: bool) -> None:
    assert is_full(words) == is_passing
