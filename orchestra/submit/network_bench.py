"""Measures the network with real ranks, here or as a Slurm job, and waits for the result.

What is started is laid out like a run, in a folder of its own that is removed when all went well. It judges
no figure and keeps none.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from conf.schema import Config, LauncherName
from launchers import LauncherError
from launchers.node_agent import StopRequests, run_local
from launchers.slurm import batch_script as script
from launchers.slurm import sbatch
from launchers.slurm.batch_script import BatchJob
from launchers.slurm.commands import cluster_name, output_of
from launchers.slurm.queue import UNKNOWN, JobState, Questions, SubmittedJob, find_by_token
from launchers.slurm.this_job import JobTask
from launchers.torchrun import LaunchSpec
from orchestra.errors import LaunchError
from orchestra.run.config_file import write_config
from orchestra.run.control.stop_requests import user_name
from orchestra.run.files import names_in, read_json, write_atomically
from orchestra.run.paths import RunDir
from orchestra.sizes.network import (
    RESULT_NAME,
    Measurement,
    from_record,
    measured_file,
    read_measured,
    with_measured,
)
from orchestra.submit.job import NODE_MODULE, Share, batch_job, new_token
from orchestra.submit.launch import launch_spec
from orchestra.submit.new_run import take_snapshot

# The nodes of a measuring job agree on where they meet by a file in <run>/control/ that belongs to this start
# of this job alone: node 0 writes it, the others read it.
#
# From the start of the first node's task to the last one's: images are pulled, Python is loaded by many.
MEETING_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Meeting:
    """One attempt's number and the place where its ranks meet."""

    attempt: int
    address: str
    port: int
    host: str
    time: float


def publish(run: RunDir, task: JobTask, meeting: Meeting) -> None:
    """Let the other nodes of this start know. *Node 0 only*. Raises OSError."""
    write_atomically(run.meeting(task.job, task.restart), json.dumps(asdict(meeting)) + "\n")


def await_meeting(
    run: RunDir, task: JobTask, is_stopped: Callable[[], bool], timeout_s: float = MEETING_TIMEOUT_S
) -> Meeting | None:
    """Return what node 0 decided, None when `is_stopped` said so before. *All nodes but 0*.

    Raises LaunchError when it says nothing for `timeout_s`.
    """
    place = run.meeting(task.job, task.restart)
    deadline = time.monotonic() + timeout_s
    while not is_stopped():
        if (meeting := _read(place)) is not None:
            return meeting
        if time.monotonic() > deadline:
            raise LaunchError(
                f"node 0 of job {task.job} has not said within {timeout_s:g} s where to meet ({place}): its "
                f"log tells what became of it, or the nodes do not share {run.path}"
            )
        time.sleep(_POLL_S)
    return None


def is_there(file: Path) -> bool:
    """Tell whether a file exists by listing its folder, if that is there. Raises OSError where it cannot be
    read.
    """
    return file.name in names_in(file.parent)


def _read(place: Path) -> Meeting | None:
    try:
        return Meeting(**(read_json(place) or {})) if is_there(place) else None
    except (OSError, TypeError):
        return None


_WORKER_MODULE = "orchestra.train.network_rank"
_NODE_MODULE = "orchestra.agents.node_check.network_bench_node"
_NAME = "orchestra-network"
# Minutes, whatever the cluster's profile gives its runs: measuring takes seconds, starting the ranks may take
# more, and a short job waits less.
_TIME_LIMIT = "15"
_POLL_S = 0.5
# Between two questions to Slurm, which may be busy while the job waits for hours.
_ASK_S = 3.0
# From the result to the job's end, and from a job's end to its files on a shared file system.
_END_TIMEOUT_S = 30.0
_RESULT_TIMEOUT_S = 5.0
_LOG_LINES = 12

# Called with Slurm's word for the job whenever it changes.
Watcher = Callable[[JobState], None]


def measuring_spec(config: Config, folder: RunDir) -> LaunchSpec:
    """Return what measures on every rank; `config` says ranks per node, nodes and interface."""
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    spec = launch_spec(config, folder, 0, path)
    return replace(spec, module=_WORKER_MODULE, arguments=(str(folder.path),))


def measure_here(config: Config) -> Measurement:
    """Measure between ranks of this machine. Main thread only.

    Raises LaunchError when the ranks do not get through, KeyboardInterrupt when the user has enough.
    """
    with _folder(Path(tempfile.gettempdir()), config) as folder, StopRequests() as signals:
        spec = measuring_spec(config, folder)
        try:
            code = run_local(
                spec,
                verdict=lambda ending: ending.exit_code,
                stops=lambda: 2 * signals.count(),
                tick=lambda: None,
            )
        except LauncherError as error:
            raise LaunchError(str(error)) from error
        if signals.count():
            raise KeyboardInterrupt
        if code:
            raise LaunchError(_unmeasured(folder, "the ranks failed"))
        return _result(folder)


def planned_script(config: Config, share: Share) -> str:
    """Return the batch script that `measure_as_job` would submit, with a name in the folder's place."""
    folder = RunDir(Path(config.run.dir).absolute() / f".{_NAME}")
    return script.rendered(_job(config, folder, new_token(), share))


def measure_as_job(config: Config, share: Share, watch: Watcher) -> Measurement:
    """Measure in a Slurm job of `config.cluster`, wait for it however long it is queued, return the result.

    Main thread only. Whatever ends the waiting early cancels the job. Raises LaunchError when it cannot be
    submitted or ends without a result; its folder is kept then.
    """
    token = new_token()
    with _folder(Path(config.run.dir).absolute(), config) as folder:
        take_snapshot(folder.code)
        folder.job_logs.mkdir(parents=True)
        folder.control.mkdir()
        folder.batch_script.write_text(script.rendered(_job(config, folder, token, share)))
        with StopRequests() as signals:
            number = _submitted(folder.batch_script, token)
            job = SubmittedJob(token, number, _NAME, user_name(), time.time())
            try:
                _await_end(job, folder, watch, lambda: signals.count() > 0)
            except BaseException:
                _cancel(number)
                raise
        return _result(folder)


def _submitted(batch_script: Path, token: str) -> str:
    """Submit the job and return its id; one that Slurm may have without saying so is cancelled."""
    try:
        return sbatch.submit(batch_script, token)
    except LauncherError as error:
        with contextlib.suppress(LauncherError):
            if (job := find_by_token(token)) is not None:
                _cancel(job)
        raise LaunchError(f"the job was not submitted: {error}") from error


def _job(config: Config, folder: RunDir, token: str, share: Share) -> BatchJob:
    """Return the job that would train a run in `folder`, with another program, once and for minutes only."""
    job = batch_job(config, folder, token, share)
    words = tuple(_NODE_MODULE if word == NODE_MODULE else word for word in job.command)
    options = {**job.options, "time": _TIME_LIMIT}
    return replace(job, name=_NAME, command=words, requeue=False, options=options)


@contextmanager
def _folder(parent: Path, config: Config) -> Iterator[RunDir]:
    """Make a folder for one measurement below `parent`; it is removed unless a LaunchError needs its logs."""
    folder = RunDir(parent / f".{_NAME}-{secrets.token_hex(4)}")
    try:
        folder.path.mkdir(parents=True)
        write_config(folder.config, config)
    except OSError as error:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise LaunchError(f"{folder.path}: {error.strerror}; choose another run.dir") from error
    is_kept = False
    try:
        yield folder
    except LaunchError:
        is_kept = True
        raise
    finally:
        if not is_kept:
            shutil.rmtree(folder.path, ignore_errors=True)


def _await_end(job: SubmittedJob, folder: RunDir, watch: Watcher, is_interrupted: Callable[[], bool]) -> None:
    """Wait until the job is over; one that has left its result may take its time, but not for ever."""
    questions = Questions(_ASK_S)
    shown: tuple[str, ...] = ()
    give_up_at: float | None = None
    while give_up_at is None or time.monotonic() < give_up_at:
        state = questions.states([job], past=[job])[0][job]
        answer = (state.state, state.reason, state.nodes)
        if state.state != UNKNOWN and answer != shown:
            watch(state)
            shown = answer
        if is_interrupted():
            raise KeyboardInterrupt
        if state.is_over:
            return
        if not folder.path.is_dir():
            raise LaunchError(f"{folder.path}, where the result was to be written, is gone; measure again")
        if give_up_at is None and is_there(folder.path / RESULT_NAME):
            give_up_at = time.monotonic() + _END_TIMEOUT_S
        time.sleep(_POLL_S)
    _cancel(str(job.job))


def _cancel(job: str) -> None:
    with contextlib.suppress(LauncherError):
        output_of(("scancel", job))


def _result(folder: RunDir) -> Measurement:
    deadline = time.monotonic() + _RESULT_TIMEOUT_S
    while not is_there(folder.path / RESULT_NAME):
        if time.monotonic() > deadline:
            raise LaunchError(_unmeasured(folder, "the ranks left no result"))
        time.sleep(_POLL_S)
    try:
        record: Mapping[str, object] = json.loads((folder.path / RESULT_NAME).read_text())
        return from_record(record)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise LaunchError(
            f"{folder.path / RESULT_NAME}: not a measurement of this version: {error}"
        ) from error


def _unmeasured(folder: RunDir, what: str) -> str:
    """Return what happened with the last words of the newest log, and where all of them lie."""
    logs = sorted(folder.logs.rglob("*.*"), key=lambda file: file.stat().st_mtime)
    spoken = [lines for log in reversed(logs) if (lines := log.read_text(errors="replace").splitlines())]
    last = [f"  {line}" for line in (spoken[0][-_LOG_LINES:] if spoken else [])]
    return "\n".join([f"{what}; logs: {folder.logs}", *last])


def file_of(config: Config) -> Path:
    """Return where the network of the configuration's cluster is kept: Slurm's name of it, or this host's.

    Where Slurm does not say its name, the cluster's in the configuration.
    """
    if config.cluster.launcher is not LauncherName.slurm:
        return measured_file(os.environ, socket.gethostname())
    try:
        name = cluster_name(os.environ)
    except LauncherError:
        name = config.cluster.name
    return measured_file(os.environ, name)


def with_measured_network(config: Config) -> Config:
    """Return the configuration with what was measured in the place of the nulls of cluster.network."""
    measured = read_measured(file_of(config), config.cluster.device.value)
    network = with_measured(config.cluster.network, measured)
    return replace(config, cluster=replace(config.cluster, network=network))
