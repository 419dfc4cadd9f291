"""Runs an attempt on this machine in the foreground. It shows nothing; `recording` says what is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conf.schema import Config
from launchers.errors import LauncherError
from launchers.local import run_local
from launchers.spec import Ending
from launchers.stops import StopRequests
from orchestra.errors import LaunchError
from orchestra.report.verdict import Verdict
from orchestra.rundir import RunDir
from orchestra.submit.launch import launch_spec
from orchestra.submit.recording import announced
from orchestra.submit.urgency import Urgency


def train_here(
    config: Config, run: RunDir, attempt: int, *, tick: Callable[[int], None], search_path: Sequence[str] = ()
) -> Verdict:
    """Run one attempt to its end on this machine; no process of it is left.

    SIGTERM, SIGHUP and requests in control/ stop it behind a step, with a checkpoint; SIGINT and whatever
    else `orchestra.submit.urgency` finds urgent end it at once. Main thread only. `config` is resolved;
    `tick` is called about ten times a second with the number of stop requests so far. Raises LaunchError when
    torchrun cannot be started or the run directory not be written.
    """
    spec = launch_spec(config, run, attempt, search_path)
    verdicts: list[Verdict] = []
    with StopRequests() as signals:
        urgency = Urgency(run, attempt, signals, config.recovery.stop_timeout_s)
        record = announced(config, run, attempt, spec)

        def conclude(ending: Ending) -> int:
            verdicts.append(record.conclude(ending, urgency.interruption))
            return verdicts[-1].code

        try:
            run_local(spec, verdict=conclude, stops=urgency.level, tick=lambda: tick(urgency.num_asked()))
        except LauncherError as error:
            failure = LaunchError(str(error))
            record.write_failed(failure)
            raise failure from error
    return verdicts[-1]
