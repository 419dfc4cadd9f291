"""An srun that waits for nodes which its job no longer has is ended, and no other. The processes are real;
Slurm's commands are stand-ins.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_slurm_job import TASK, Slurm

from orchestra.agents.agent import group_folder
from orchestra.run.paths import RunDir

NODES = "node[1-2]"
# A batch script in short: the watch beside it, an srun that asks for ever, and its exit code.
SCRIPT = """
"$PYTHON" -c "import sys; from orchestra.agents import srun_watch as it
it._LOOK_S, it._ASK_EVERY_S = 0.05, 0.1; sys.exit(it.main(sys.argv[1:]))" "$RUN" "$$" &
srun
code=$?
exit "$code"
"""


class Script:
    """A shell that runs it; it is ended with the test."""

    def __init__(self, folder: Path, run: RunDir) -> None:
        srun = folder / "srun"
        # A program of that name, as the real one is: a script would be called by its interpreter.
        srun.symlink_to("/bin/sleep")
        facts = {"SLURM_JOB_ID": TASK.job, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": NODES}
        variables = {"PYTHON": sys.executable, "RUN": str(run.path), **facts}
        self.shell = subprocess.Popen(
            ["bash", "-c", SCRIPT.replace("srun\n", "srun 60\n")],
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def is_watched(self) -> bool:
        """Tell whether anything beside srun runs, the watch not yet begun included."""
        children = Path(f"/proc/{self.shell.pid}/task/{self.shell.pid}/children").read_text().split()
        return len(children) != 1

    def said(self) -> str:
        """Return what was printed until all of it ended."""
        return self.shell.communicate(timeout=60)[0]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    slurm = Slurm(folder, {"node1": "allocated", "node2": "down"})
    slurm.tell(f"job-{NODES}", "node1\nnode2\n")
    slurm.tell("job-node1", "node1\n")
    return slurm


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "mine")
    run.control.mkdir(parents=True)
    return run


def of_job(nodes: str) -> str:
    return f"JobId=12 JobState=RUNNING Restarts=0 Reason=None NodeList={nodes}\n"


def questions(slurm: Slurm) -> int:
    return len(slurm.calls("scontrol")) if (slurm.folder / "calls").exists() else 0


def test_an_srun_that_waits_for_a_lost_node_is_ended(tmp_path: Path, run: RunDir, slurm: Slurm) -> None:
    slurm.tell("job-12", of_job("node1"))
    script = Script(tmp_path / "bin", run)
    assert script.said() == "node2 lost before the job's step began; srun is ended\n"
    assert script.shell.returncode == 128 + 15


@pytest.mark.parametrize("state", ["whole", "silent", "agents"])
def test_any_other_srun_is_left_alone(tmp_path: Path, run: RunDir, slurm: Slurm, state: str) -> None:
    slurm.tell("job-12", of_job("node1" if state == "agents" else NODES))
    if state == "silent":
        slurm.tell("silent")
    if state == "agents":
        group = group_folder(run.control, TASK.job, TASK.restart)
        group.mkdir()
        (group / "member-000.json").write_text("{}")
    script = Script(tmp_path / "bin", run)
    deadline = time.monotonic() + 60
    while (questions(slurm) < 3) if state != "agents" else script.is_watched():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert script.shell.poll() is None
    os.killpg(script.shell.pid, 15)
    script.said()
