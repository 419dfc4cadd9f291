"""What a task knows of its job from the variables that Slurm sets. It asks Slurm nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launchers.errors import LauncherError


@dataclass(frozen=True)
class JobTask:
    """One task of a job's step; with one task per node also that node's number."""

    # The id of the array and the member's number, where the job is one of an array: 12_3. Slurm's commands
    # take it; the job's own number may be the whole array's id.
    job: str
    # How often the job has been started before this time.
    restart: int
    node: int
    num_nodes: int
    # As Slurm calls this host.
    host: str
    # Where srun runs: the first node, by an address that the others reach.
    launch_address: str | None
    # Slurm's name of the cluster; None where Slurm did not say it.
    cluster: str | None = None

    @property
    def array_task(self) -> int | None:
        """The number of the job in its array; None for a job of its own."""
        member = self.job.partition("_")[2]
        return int(member) if member else None


def job_task(environment: Mapping[str, str]) -> JobTask:
    """Return this task's place. Raises LauncherError outside a step, and with several tasks per node."""
    missing = [name for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS") if name not in environment]
    if missing:
        raise LauncherError(f"{', '.join(missing)} is not set: srun starts this inside a Slurm job")
    num_tasks, num_nodes = int(environment["SLURM_NTASKS"]), int(environment.get("SLURM_NNODES", "1"))
    if num_tasks != num_nodes:
        raise LauncherError(f"{num_tasks} tasks on {num_nodes} nodes, expected one task on each")
    array, member = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return JobTask(
        job=f"{array}_{member}" if array and member else environment["SLURM_JOB_ID"],
        restart=int(environment.get("SLURM_RESTART_COUNT") or 0),
        # The steps' tasks are numbered node by node.
        node=int(environment["SLURM_PROCID"]),
        num_nodes=num_nodes,
        host=environment.get("SLURMD_NODENAME", ""),
        launch_address=environment.get("SLURM_LAUNCH_NODE_IPADDR"),
        cluster=environment.get("SLURM_CLUSTER_NAME") or None,
    )
