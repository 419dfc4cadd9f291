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
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from conf.schema import Config
from launchers.errors import LauncherError
from launchers.local import run_local
from launchers.slurm import sbatch, script
from launchers.slurm.commands import output_of
from launchers.slurm.script import BatchJob
from launchers.slurm.states import UNKNOWN, JobState, Questions, SubmittedJob, find_by_token
from launchers.spec import LaunchSpec
from launchers.stops import StopRequests
from orchestra.control import user_name
from orchestra.errors import LaunchError
from orchestra.frozen import write_config
from orchestra.network import RESULT_NAME, Measurement, from_record
from orchestra.rundir import RunDir
from orchestra.submit.environment import worker_environment
from orchestra.submit.job import NODE_MODULE, Share, batch_job, new_token
from orchestra.submit.meeting import is_there
from orchestra.submit.snapshot import take_snapshot

WORKER_MODULE = "orchestra.train.network"
_NODE_MODULE = "orchestra.submit.measure_node"
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
    ranks = int(config.cluster.gpus_per_node)
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return LaunchSpec(
        module=WORKER_MODULE,
        arguments=(str(folder.path),),
        environment=worker_environment(config, ranks, search_path=path),
        ranks_per_node=ranks,
        node_logs=tuple(folder.node_log(0, node) for node in range(config.cluster.nodes)),
    )


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
            with _cancelled_unless_over(number):
                _await_end(job, folder, watch, lambda: signals.count() > 0)
        return _result(folder)


def _submitted(batch_script: Path, token: str) -> str:
    """Submit the job and return its id; one that Slurm may have without saying so is cancelled."""
    try:
        return sbatch.submit(batch_script, token)
    except LauncherError as error:
        with contextlib.suppress(LauncherError):
            if (found := find_by_token(token)) is not None:
                _cancel(found)
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
    try:
        yield folder
    except LaunchError:
        raise
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    shutil.rmtree(folder.path, ignore_errors=True)


def _await_end(job: SubmittedJob, folder: RunDir, watch: Watcher, is_interrupted: Callable[[], bool]) -> None:
    """Wait until the job is over; one that has left its result may take its time, but not for ever."""
    questions = Questions(_ASK_S)
    shown: tuple[str, ...] = ()
    give_up_at: float | None = None
    while give_up_at is None or time.monotonic() < give_up_at:
        state = questions.states([job], past=[job])[0][job]
        told = (state.state, state.reason, state.nodes)
        if state.state != UNKNOWN and told != shown:
            watch(state)
            shown = told
        if is_interrupted():
            raise KeyboardInterrupt
        if state.is_over:
            return
        if give_up_at is None and is_there(folder.path / RESULT_NAME):
            give_up_at = time.monotonic() + _END_TIMEOUT_S
        time.sleep(_POLL_S)
    _cancel(job.job)


def _cancel(job: str | None) -> None:
    with contextlib.suppress(LauncherError):
        output_of(("scancel", str(job)))


@contextmanager
def _cancelled_unless_over(job: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _cancel(job)
        raise


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
