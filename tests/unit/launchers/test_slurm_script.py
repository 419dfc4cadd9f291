"""The batch script and the environment of Slurm's commands: text that is compared with what Slurm needs."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest
from submitit.slurm.slurm import SlurmExecutor

from launchers import LauncherError
from launchers.slurm.batch_script import BatchJob, rendered
from launchers.slurm.commands import scrubbed

JOB = BatchJob(
    name="first",
    num_nodes=3,
    command=("python", "-u", "-m", "node", "/runs/my first"),
    log_folder=Path("/runs/my first/logs"),
    directory=Path("/runs/my first"),
    comment="orchestra:0123",
    exports={"PYTHONPATH": "/runs/my first/code", "PYTHONSAFEPATH": "1"},
    warning_lead_s=150,
)

# What stands before set-up lines, so that one that fails ends the job.
WATCHED = (
    "setup_failed() {",
    '  [ "${#BASH_SOURCE[@]}" -gt "$((setup_depth + 1))" ] && return',
    '  echo "set-up line $2 failed with exit code $1" >&2',
    '  PYTHONPATH=\'/runs/my first/code\' PYTHONSAFEPATH=1 exec python -m setup_failed "$2" "$1"',
    "}",
    "setup_depth=${#BASH_SOURCE[@]}",
    'setup_begin=$LINENO; trap \'setup_failed "$?" "$((LINENO - setup_begin))"\' ERR',
)


def options(script: str) -> dict[str, str]:
    """Return the options in a script's #SBATCH lines."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert len({line.partition("=")[0] for line in lines}) == len(lines), "an option stands there twice"
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def srun_line(script: str) -> str:
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    return line


def changed(**fields: object) -> str:
    return rendered(dataclasses.replace(JOB, **fields))  # type: ignore[arg-type]


class ExecutorOfAnyMachine(SlurmExecutor):  # type: ignore[misc]
    """Writes scripts where there is no srun, too."""

    @classmethod
    def affinity(cls) -> int:
        return 2


@pytest.mark.parametrize("array", [None, "0-3,7%2"])
def test_the_script_is_the_one_that_submitit_writes(array: str | None) -> None:
    job = dataclasses.replace(
        JOB,
        array=array,
        cpus_per_task=4,
        gpus_per_node=2,
        setup=("module load 'a b'",),
        setup_failed=("python", "-m", "setup_failed"),
        after_failure=("python", "-m", "failed"),
        options={"partition": "gpu", "constraint": "[a|b]*2", "exclude": ["n1", "n2"]},
    )
    executor = ExecutorOfAnyMachine(folder=job.log_folder)
    executor.update_parameters(
        job_name="first",
        nodes=3,
        ntasks_per_node=1,
        cpus_per_task=4,
        gpus_per_node=2,
        time=None,
        wckey=None,
        comment="orchestra:0123",
        signal_delay_s=150,
        partition="gpu",
        constraint="[a|b]*2",
        exclude="n1,n2",
        stderr_to_stdout=True,
        setup=[
            *WATCHED,
            "module load 'a b'",
            *("trap - ERR", ""),
            "export PYTHONPATH='/runs/my first/code'${PYTHONPATH:+:$PYTHONPATH}",
            "export PYTHONSAFEPATH=1",
        ],
        teardown=["code=$?", '[ "$code" -eq 0 ] || exec python -m failed "$code"'],
        additional_parameters={
            "chdir": "/runs/my first",
            "requeue": True,
            **({} if array is None else {"array": array}),
        },
        srun_args=[
            *("--open-mode=append", "--export=ALL", "--kill-on-bad-exit=1", "--wait=180"),
            "--cpus-per-task=4",
        ],
    )
    if array is not None:
        executor.parameters["map_count"] = 1
    command = "python -u -m node '/runs/my first'"
    assert rendered(job) == executor._make_submission_file_text(command, "") + "\n"


def test_every_option_of_sbatch_can_be_said_once() -> None:
    extra = {
        "reservation": "night",
        "mail_type": ["END", "FAIL"],
        "exclusive": True,
        "mem": 0,
        "nice": "0",
        "hold": False,
        "hint": None,
        "cpus-per-task": 9,
    }
    script = changed(options=extra, cpus_per_task=2)
    said = options(script)
    assert (said["reservation"], said["mail-type"], said["exclusive"]) == ("night", "END,FAIL", "")
    assert (said["cpus-per-task"], "--cpus-per-task=9" in srun_line(script)) == ("9", True)
    assert (said["mem"], said["nice"]) == ("0", "0"), "0 is a value"
    assert not {"hint", "hold"} & set(said)


def test_a_range_of_nodes_is_no_number_of_tasks() -> None:
    # sbatch would ask for the tasks of the fewest nodes, and Slurm give no more nodes than tasks.
    for nodes, is_said_to_srun in ((3, False), ("2-4", True)):
        script = changed(num_nodes=nodes)
        assert ("ntasks-per-node" in options(script)) is not is_said_to_srun
        assert ("--ntasks-per-node=1" in srun_line(script)) is is_said_to_srun


@pytest.mark.parametrize("name", ["signal", "--comment", "ntasks-per-node", "open_mode"])
def test_options_that_the_script_depends_on_are_refused(name: str) -> None:
    with pytest.raises(LauncherError, match=name):
        changed(options={name: "x"})


# What the script becomes when a set-up line failed: here it tells what it was started with.
TELLS = ("/bin/sh", "-c", 'echo "line $1 code $2 $PYTHONSAFEPATH"', "tells")


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["true", "nosuch_command"], "line 2 code 127 1\n"),
        (["source /nonexistent/env.sh", "export A=1"], "line 1 code 1 1\n"),
        (["source ./ends_well.sh", 'echo "srun has $SOURCED"'], "srun has yes\n"),
        (["source ./ends_badly.sh"], "line 1 code 3 1\n"),
        (["load() { false; return 4; }", "load cuda"], "line 2 code 4 1\n"),
        (["load() { false; true; }", "load cuda"], ""),
        (["if false; then", "  nosuch_command", "fi", "[ -z word ] && nosuch", "false || true"], ""),
        (["for i in 1 2; do", "  false", "done"], "line 2 code 1 1\n"),
        (["export A=1\nfalse", "true"], "line 2 code 1 1\n"),
    ],
    ids=["command", "source", "inside", "sourced", "function", "in function", "conditions", "loop", "block"],
)
@pytest.mark.parametrize("is_file", [True, False], ids=["as a file", "on standard input"])
def test_a_set_up_line_that_fails_ends_the_script(
    tmp_path: Path, lines: list[str], told: str, is_file: bool
) -> None:
    (tmp_path / "ends_well.sh").write_text("false\nexport SOURCED=yes\n")
    (tmp_path / "ends_badly.sh").write_text("true\nfalse\nreturn 3\n")
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "srun").chmod(0o755)
    script = changed(setup=tuple(lines), setup_failed=TELLS)
    (tmp_path / "script").write_text(script)
    done = subprocess.run(
        ["/bin/bash", *(["script"] if is_file else [])],
        input=None if is_file else script,
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/bin:/usr/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == told
    assert ("set-up line" in done.stderr) == told.startswith("line ")


@pytest.mark.parametrize(
    "fields",
    [
        {"options": {"account": "a\nb"}},
        {"directory": Path("/runs/new\nline")},
        {"exports": {"PYTHONPATH": "/a\n/b"}},
        {"command": ("python", "a\x1b")},
        {"setup_failed": ("python", "a\rb"), "setup": ("true",)},
    ],
    ids=["option", "directory", "export", "command", "what follows"],
)
def test_no_control_character_reaches_the_script(fields: dict[str, object]) -> None:
    with pytest.raises(LauncherError, match="holds a control character"):
        changed(**fields)


def test_gpus_and_requeue_follow_the_job() -> None:
    said = options(changed(gpus_per_node=8, requeue=False))
    assert (said["gpus-per-node"], "no-requeue" in said, "requeue" in said) == ("8", True, False)
    assert "gpus-per-node" not in options(rendered(JOB))


def test_the_callers_allocation_is_scrubbed_and_the_cluster_kept() -> None:
    kept = {"SLURM_CONF": "/etc/slurm.conf", "HOME": "/home", "SLURMCTLD": "x", "PATH": "/bin"}
    dropped = ("SLURM_JOB_ID", "SBATCH_PARTITION", "PMIX_RANK", "SRUN_CPUS_PER_TASK", "SLURMD_NODENAME")
    environment = {**kept, **dict.fromkeys(dropped, "1"), "SQUEUE_FORMAT": "%i"}
    assert scrubbed(environment) == kept
