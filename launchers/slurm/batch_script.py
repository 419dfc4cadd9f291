"""From a description of a job to its batch script, word for word, with submitit's SlurmExecutor.

One task per node: srun starts the same command on each. It submits nothing and needs no Slurm here.

No pickle goes with the script: submitit's own command would load one, and install signal handlers that save
on one rank alone. What srun starts is a plain command line.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers.launch_errors import LauncherError

# Options that the rest of the script depends on.
_OWN = {
    "nodes": "the number of nodes is said elsewhere",
    "ntasks": "one task per node is started",
    "ntasks_per_node": "one task per node is started",
    "job_name": "it is the run's name, by which the job is found again",
    "comment": "it holds the token by which the job is found again",
    "output": "the log files are the run's",
    "error": "the log files are the run's",
    "open_mode": "logs are only ever appended to",
    "signal": "the warning before the end is said elsewhere",
    "array": "several jobs are submitted as a sweep",
    "chdir": "it is the run's directory",
    "requeue": "it is said elsewhere",
    "no_requeue": "it is said elsewhere",
}
# How long srun lets other tasks go on after the first has ended.
_WAIT_S = 180
# The step outlives a lost node and a failed task; without a limit on how long.
_SURVIVING = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")


@dataclass(frozen=True)
class BatchJob:
    """One job: the same command once on each node."""

    name: str
    num_nodes: int
    # What srun starts, a word each; the shell expands nothing in them.
    command: tuple[str, ...]
    # Where the job's own output goes; it must exist when the job starts.
    log_folder: Path
    directory: Path
    # Found again by it when sbatch's answer was lost.
    comment: str
    # Exported after the set-up lines and before the command.
    exports: Mapping[str, str]
    # Seconds before the time limit at which every process is sent SIGUSR2.
    warning_lead_s: int
    requeue: bool = True
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    setup: tuple[str, ...] = ()
    # Pyxis and the like: options of srun.
    srun_options: tuple[str, ...] = ()
    # Several such jobs, one for each task number: 0-11, 0,3-5. None: one job.
    array: str | None = None
    # The job goes on when nodes of it are lost or tasks fail: what it starts looks after itself.
    survives_nodes: bool = False
    # What the batch script runs beside srun, the shell's process id as its last word.
    beside_step: tuple[str, ...] = ()
    # What the batch script becomes when srun failed, srun's exit code as its last word.
    after_failure: tuple[str, ...] = ()
    # Any option of sbatch by its long name, with dashes or underscores: partition, time, reservation …
    options: Mapping[str, Any] = field(default_factory=dict)


def option_problems(options: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each option that may not be set because the script depends on it."""
    return [f"{name}: {_OWN[key]}" for name in options if (key := _key(name)) in _OWN]


def rendered(job: BatchJob) -> str:
    """Return the batch script. Raises LauncherError for options that may not be set."""
    problems = option_problems(job.options)
    if problems:
        raise LauncherError("; ".join(problems))
    executor = _executor(job.log_folder)
    with warnings.catch_warnings():
        # About combinations of options, which are the user's choice.
        warnings.simplefilter("ignore")
        executor.update_parameters(**_parameters(job))
        if job.array is not None:
            # Names the log files <array>_<task>_<node>_log.out; the tasks themselves are ours.
            executor.parameters["map_count"] = 1
        return str(executor._make_submission_file_text(shlex.join(job.command), "")) + "\n"


def _executor(folder: Path) -> Any:
    from submitit.slurm.slurm import SlurmExecutor

    class AnywhereExecutor(SlurmExecutor):
        """Renders on machines without srun too, for dry runs."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    return AnywhereExecutor(folder=folder)


def _parameters(job: BatchJob) -> dict[str, Any]:
    options = {_key(name): _text(value) for name, value in job.options.items() if value not in (None, False)}
    cpus = options.pop("cpus_per_task", job.cpus_per_task)
    additional = {
        # submitit's own defaults, which sites may refuse, unless they are asked for.
        **{name.replace("_", "-"): value for name, value in options.items()},
        "chdir": str(job.directory),
        **({} if job.array is None else {"array": job.array}),
        ("requeue" if job.requeue else "no-requeue"): True,
        **({"no-kill": True} if job.survives_nodes else {}),
    }
    return {
        "job_name": job.name,
        "nodes": job.num_nodes,
        "ntasks_per_node": 1,
        "cpus_per_task": cpus,
        "gpus_per_node": job.gpus_per_node,
        "time": None,
        "wckey": None,
        "comment": job.comment,
        "signal_delay_s": job.warning_lead_s,
        "stderr_to_stdout": True,
        "setup": [
            *job.setup,
            *([""] if job.setup else []),
            *(_export(*pair) for pair in job.exports.items()),
            *([f'{shlex.join(job.beside_step)} "$$" &'] if job.beside_step else []),
        ],
        "teardown": _teardown(job),
        "additional_parameters": additional,
        "srun_args": _srun_arguments(job, cpus),
    }


def _teardown(job: BatchJob) -> list[str] | None:
    if not job.after_failure:
        return None
    return ["code=$?", f'[ "$code" -eq 0 ] || exec {shlex.join(job.after_failure)} "$code"']


def _srun_arguments(job: BatchJob, cpus: object) -> list[str]:
    """Return what srun does not take from the job (cpus-per-task since Slurm 22.05) or sites change."""
    return [
        "--open-mode=append",
        "--export=ALL",
        *(_SURVIVING if job.survives_nodes else ("--kill-on-bad-exit=1", f"--wait={_WAIT_S}")),
        *([] if cpus is None else [f"--cpus-per-task={cpus}"]),
        *job.srun_options,
    ]


def _export(name: str, value: str) -> str:
    """Return the line that exports a variable; a search path keeps what the set-up lines put into it."""
    if name.endswith("PATH") and not name.endswith("SAFEPATH"):
        return f"export {name}={shlex.quote(value)}${{{name}:+:${name}}}"
    return f"export {name}={shlex.quote(value)}"


def _key(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _text(value: Any) -> Any:
    if value is True:
        return True
    return ",".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)
