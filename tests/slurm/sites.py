"""One development cluster as tests see it: its commands, and commands of the ordinary user who submits
there."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from slurm.cluster.hosts import processes_on
from slurm.cluster.layout import ClusterLayout, load_layout

ROOT = Path(__file__).parents[2]
POLL_S = 0.2
# Between two looks, as a multiple of what a look takes.
_LOOK_SHARE = 4
_POLL_AT_MOST_S = 3.0


class Site:
    """A cluster below one folder.

    `folder/shared` belongs to the ordinary user and is the same on all hosts, as a home on a real cluster is.
    """

    def __init__(self, folder: Path, user: pwd.struct_passwd) -> None:
        self.folder = folder
        self.user = user
        self.state = folder / "cluster"
        self.shared = folder / "shared"
        folder.chmod(0o755)
        self.shared.mkdir(exist_ok=True)
        os.chown(self.shared, user.pw_uid, user.pw_gid)

    @property
    def layout(self) -> ClusterLayout:
        layout = load_layout(self.state)
        assert layout, f"no cluster in {self.state}"
        return layout

    @property
    def environment(self) -> dict[str, str]:
        """The ordinary user's whole environment in a shell on the login node."""
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        who = {"HOME": str(self.shared), "USER": self.user.pw_name, "LOGNAME": self.user.pw_name}
        return {"PATH": path, "LANG": "C.UTF-8", **who, **self.layout.environment}

    def devcluster(
        self, *arguments: str, check: bool = True, timeout_s: float = 110
    ) -> subprocess.CompletedProcess[str]:
        """Run `slurm/devcluster` on this cluster as root."""
        command = [sys.executable, str(ROOT / "slurm" / "devcluster"), "--state", str(self.state), *arguments]
        return _finished(subprocess.run(command, capture_output=True, text=True, timeout=timeout_s), check)

    def run(
        self, *command: str, check: bool = True, timeout_s: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the ordinary user, in the shared folder."""
        done = subprocess.run(
            command,
            cwd=self.shared,
            env=self.environment | environment,
            user=self.user.pw_uid,
            group=self.user.pw_gid,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return _finished(done, check)

    def submit(self, *options: str) -> str:
        """Run sbatch as the ordinary user and return the job's id."""
        return self.run("sbatch", "--parsable", *options).stdout.strip()

    def job_state(self, job: str) -> str:
        """Return Slurm's word for a job's state, asking no accounting."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)["JobState"]

    def node_state(self, node: str) -> str:
        """Return Slurm's word for a node's state, with an asterisk where the node is silent."""
        return self._ask_about(node, "%T")

    def is_node_down(self, node: str) -> bool:
        """Whether Slurm has given a silent node up.

        Slurm 22.05 can go on calling such a node `mixed*`: it counts the CPUs in use at most once a second,
        and misses a change in the second of its last count. The reason is always set.
        """
        return self._ask_about(node, "%E") == "Not responding"

    def _ask_about(self, node: str, column: str) -> str:
        query = ["sinfo", "--noheader", "--partition=main", f"--nodes={node}", f"--format={column}"]
        return self.run(*query).stdout.strip()

    def processes_on(self, host: str) -> dict[int, str]:
        """Return the processes in a host's namespaces by the machine's numbers, with their commands."""
        return processes_on(self.layout, host)

    def cancel_all_jobs(self) -> None:
        """End all of the user's jobs, and wait until no node holds any of them."""
        self.run("scancel", "--user", self.user.pw_name)
        wait_until(lambda: not self.run("squeue", "--noheader").stdout.strip(), "all jobs have ended")


def wait_until(is_true: Callable[[], object], what: str, within_s: float = 90) -> None:
    """Wait until something is true, or fail with its name.

    A look that starts a process is repeated more rarely: the processors are for what is waited for.
    """
    deadline = time.monotonic() + within_s
    while True:
        looked = time.monotonic()
        if is_true():
            return
        now = time.monotonic()
        assert now < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(max(POLL_S, min(_LOOK_SHARE * (now - looked), _POLL_AT_MOST_S)))


def _finished(done: subprocess.CompletedProcess[str], check: bool) -> subprocess.CompletedProcess[str]:
    said = f"{done.args} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    assert not check or done.returncode == 0, said
    return done
