"""The batch script of a job, word for word: #SBATCH lines, set-up lines, and srun with one task on each node.

A pure function: it needs no Slurm here and submits nothing. The lines are those that submitit's SlurmExecutor
writes (tests compare the two). submitit offers no public way to them: its public `submit` pickles a function
into the script and calls sbatch at once, where a run needs its script, its directory and the record of its
token before sbatch is called, and no pickle.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers import LauncherError

# Options that the rest of the script depends on.
_OWN = {
    "nodes": "the number of nodes is said elsewhere",
    "ntasks": "one task per node is started",
    **dict.fromkeys(
        ("ntasks_per_node", "ntasks_per_gpu", "ntasks_per_socket", "ntasks_per_core"),
        "one task per node is started",
    ),
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
    **dict.fromkeys(
        ("clusters", "cluster"),
        "sbatch alone would hear of it, and the job be looked for on another cluster; export "
        "SLURM_CLUSTERS=NAME, which all of Slurm's commands read,",
    ),
    "test_only": "sbatch would submit nothing; --dry-run asks Slurm so",
    "wait": "sbatch would return when the job is over; --wait waits for the run",
    "wrap": "the script is the run's",
}
# Options of srun that the script says itself, or that would part a step from what the agents count on.
_OWN_OF_SRUN = {
    **{name: _OWN[name] for name in ("nodes", "ntasks", "ntasks_per_node", "output", "error", "open_mode")},
    **{name: _OWN[name] for name in ("job_name", "comment", "chdir", "signal")},
    "no_kill": "the step outlives a lost node",
    "kill_on_bad_exit": "the step outlives a failed task",
    "wait": "the step outlives a failed task",
    "export": "the ranks need all of the job's variables",
    "unbuffered": "it is said already",
    "label": "logs are read by line",
    "cpus_per_task": "the job says it",
    "nodelist": "the job has its nodes",
    "exclude": "the job has its nodes",
    "relative": "the job has its nodes",
    "container_image": "cluster.container.image says it",
    "container_mounts": "cluster.container.mounts says it",
    "multi_prog": "every node starts the same",
    "pty": "nobody sits at it",
    "time": "the job's limit is the step's",
}
# Another job does what this one was submitted for.
NOT_THIS_JOB = 100
# How long srun lets other tasks go on after the first has ended.
_WAIT_S = 180
# The step outlives a lost node and a failed task; without a limit on how long.
_VARIABLE = re.compile(r"\$\w+|\$\{\w+\}")
_SURVIVING = ("--no-kill", "--kill-on-bad-exit=0", "--wait=0")


@dataclass(frozen=True)
class BatchJob:
    """One job: the same command once on each node."""

    name: str
    # A number, or a range as sbatch writes it: 4-8.
    num_nodes: int | str
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
    # What the batch script becomes when one of them fails, its number (from 1) and its exit code as the last
    # words. Empty: such a line is passed over.
    setup_failed: tuple[str, ...] = ()
    # What a reader of the script is told after Slurm's options.
    notes: tuple[str, ...] = ()
    # Pyxis and the like: options of srun.
    srun_options: tuple[str, ...] = ()
    # Any other option of srun by its long name; None and False leave it out.
    srun_extra: Mapping[str, Any] = field(default_factory=dict)
    # Words before the command, in which the shell expands variables ($NAME, ${NAME}) and nothing else.
    prefix: tuple[str, ...] = ()
    # Several such jobs, one for each task number: 0-11, 0,3-5. None: one job.
    array: str | None = None
    # The job goes on when nodes of it are lost or tasks fail: what it starts looks after itself.
    survives_nodes: bool = False
    # What the batch script runs first of all. Where that ends with `NOT_THIS_JOB` the job ends, with code 0.
    before_all: tuple[str, ...] = ()
    # What the batch script runs beside srun, the shell's process id as its last word.
    beside_step: tuple[str, ...] = ()
    # What the batch script becomes when srun failed, srun's exit code as its last word.
    after_failure: tuple[str, ...] = ()
    # Any option of sbatch by its long name, with dashes or underscores: partition, time, reservation …
    options: Mapping[str, Any] = field(default_factory=dict)


def option_problems(options: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each option that may not be set because the script depends on it."""
    return [f"{name}: {_OWN[key]}" for name in options if (key := _key(name)) in _OWN]


def srun_option_problems(options: Mapping[str, Any]) -> list[str]:
    """Return the same for options of srun."""
    return [f"{name}: {_OWN_OF_SRUN[key]}" for name in options if (key := _key(name)) in _OWN_OF_SRUN]


def rendered(job: BatchJob) -> str:
    """Return the batch script. Raises LauncherError for options that may not be set."""
    problems = [*option_problems(job.options), *srun_option_problems(job.srun_extra)]
    if problems:
        raise LauncherError("; ".join(problems))
    options = _options(job)
    directives = [_directive(name, options[name]) for name in sorted(options)]
    exports = [_export(*pair) for pair in job.exports.items()]
    srun = _srun_line(job, options.get("cpus-per-task"))
    programs = (*job.before_all, *job.beside_step, *job.after_failure, *job.setup_failed)
    _refuse_control_characters([*directives, *exports, *job.notes, *programs, srun])
    lines = ["#!/bin/bash", "", "# Parameters", *directives]
    lines += [f"# {note}" for note in job.notes]
    lines += ["", "# setup", *_setup(job, exports)]
    # With this variable `submitit.JobEnvironment()`, called by code in the job, describes the Slurm job.
    lines += ["", "# command", "export SUBMITIT_EXECUTOR=slurm"]
    lines += [srun, "", ""]
    if job.after_failure:
        failed = f'[ "$code" -eq 0 ] || exec {shlex.join(job.after_failure)} "$code"'
        lines += ["# teardown", "code=$?", failed, ""]
    return "\n".join(lines)


def _options(job: BatchJob) -> dict[str, object]:
    """Return sbatch's options by their long names; True stands for one without a value.

    What `job.options` says replaces the job's own number of cores and GPUs.
    """
    options: dict[str, object] = {
        "array": job.array,
        "chdir": job.directory,
        "comment": job.comment,
        "cpus-per-task": job.cpus_per_task,
        "gpus-per-node": job.gpus_per_node,
        "job-name": job.name,
        "no-kill": job.survives_nodes,
        "nodes": job.num_nodes,
        # With it sbatch asks for the tasks of the fewest nodes of a range, and gets no more nodes than tasks.
        "ntasks-per-node": None if _is_range(job) else 1,
        "open-mode": "append",
        "output": _log_file(job).replace("%t", "0"),
        "requeue" if job.requeue else "no-requeue": True,
        "signal": f"USR2@{job.warning_lead_s}",
        **_given(job.options),
    }
    return {name: value for name, value in options.items() if value is not None and value is not False}


def _is_range(job: BatchJob) -> bool:
    """Whether Slurm may choose the number of nodes."""
    return "-" in str(job.num_nodes)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by their long names, without those that are left out."""
    # Not `in (None, False)`, which holds for 0 too: mem=0 asks for all memory of a node.
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    return {_key(name).replace("_", "-"): _text(value) for name, value in given.items()}


def _directive(name: str, value: object) -> str:
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"


def _log_file(job: BatchJob) -> str:
    """Return where the task of a node logs, with Slurm's own placeholders: <job>_<node> or
    <array>_<task>_<node>.
    """
    return str(job.log_folder / f"{'%j' if job.array is None else '%A_%a'}_%t_log.out")


def _refuse_control_characters(lines: Iterable[str]) -> None:
    """Raise LauncherError for a control character: quotes do not keep a line break in an #SBATCH line."""
    for line in lines:
        if any(unicodedata.category(sign) == "Cc" for sign in line):
            raise LauncherError(f"{line!r} holds a control character, such as a line break; leave it out")


def _setup(job: BatchJob, exports: Sequence[str]) -> list[str]:
    """Return the lines before srun: those of the configuration, then ours, which stay the stronger ones."""
    lines = []
    if job.before_all:
        # Its interpreter needs what is exported only later.
        exports_now = " ".join(f"{name}={shlex.quote(value)}" for name, value in job.exports.items())
        leave = f'exit "$(( $? == {NOT_THIS_JOB} ? 0 : $? ))"'
        lines += [f"{exports_now} {shlex.join(job.before_all)} || {leave}", ""]
    lines += [*_watched(job), ""] if job.setup else []
    lines += exports
    if job.beside_step:
        lines.append(f'{shlex.join(job.beside_step)} "$$" &')
    return lines


def _watched(job: BatchJob) -> list[str]:
    """Return the set-up lines of the configuration, between those that end the job when one of them fails.

    What counts is how a line itself ends: commands inside of files that it sources, of functions and of
    conditions may fail.
    """
    if not job.setup_failed:
        return list(job.setup)
    # Its interpreter needs what is exported only later.
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in job.exports.items())
    return [
        "setup_failed() {",
        '  [ "${#BASH_SOURCE[@]}" -gt "$((setup_depth + 1))" ] && return',
        '  echo "set-up line $2 failed with exit code $1" >&2',
        f'  {exports} exec {shlex.join(job.setup_failed)} "$2" "$1"',
        "}",
        "setup_depth=${#BASH_SOURCE[@]}",
        'setup_begin=$LINENO; trap \'setup_failed "$?" "$((LINENO - setup_begin))"\' ERR',
        *job.setup,
        "trap - ERR",
    ]


def _srun_line(job: BatchJob, cpus: object) -> str:
    """Return the line that starts the command; srun is told again what it does not take from the job
    (cpus-per-task since Slurm 22.05) and what sites change by variables.
    """
    srun_extra = _given(job.srun_extra)
    words = [
        *("srun", "--unbuffered", "--output", _log_file(job), "--open-mode=append", "--export=ALL"),
        *(_SURVIVING if job.survives_nodes else ("--kill-on-bad-exit=1", f"--wait={_WAIT_S}")),
        *([] if cpus is None else [f"--cpus-per-task={cpus}"]),
        *(["--ntasks-per-node=1"] if _is_range(job) else []),
        *job.srun_options,
        *(f"--{name}" if value is True else f"--{name}={value}" for name, value in srun_extra.items()),
    ]
    return " ".join([shlex.join(words), *map(_with_variables, job.prefix), shlex.join(job.command)])


def _with_variables(word: str) -> str:
    """Return a word for the shell, which puts in the values of variables as they are, spaces and all."""
    if not _VARIABLE.search(word):
        return shlex.quote(word)
    parts = re.split(f"({_VARIABLE.pattern})", word)
    # Every second part is a variable.
    quoted = [
        part if number % 2 else re.sub(r'([\\"`$])', r"\\\1", part) for number, part in enumerate(parts)
    ]
    return f'"{"".join(quoted)}"'


def _export(name: str, value: str) -> str:
    """Return the line that exports a variable; a search path and a list of mounts keep what the set-up lines
    put into them.
    """
    if name.endswith("_BIND"):
        return f"export {name}={shlex.quote(value)}${{{name}:+,${name}}}"
    if name.endswith("PATH") and not name.endswith("SAFEPATH"):
        return f"export {name}={shlex.quote(value)}${{{name}:+:${name}}}"
    return f"export {name}={shlex.quote(value)}"


def _key(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _text(value: Any) -> Any:
    if value is True:
        return True
    return ",".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)
