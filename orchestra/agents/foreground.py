"""Trains a run on this machine in the foreground: a crew of one, with the same restarts as on a cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema import Config
from launchers.launch_errors import LauncherError
from launchers.node_agent import StopRequests
from launchers.node_group import Crew
from orchestra.agents.agent import attend, crew_folder, warm_host
from orchestra.agents.context import Reasons, Station
from orchestra.errors import LaunchError
from orchestra.recovery.history import attempt_of
from orchestra.recovery.incidents import Incident, Verdict, node_verdict
from orchestra.recovery.policy import Decision
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Foreground:
    """A command on this machine as the surroundings of a crew."""

    @property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def can_requeue(self) -> bool:
        return False

    def facts(self) -> dict[str, Any]:
        return {}

    def own_address(self) -> str:
        return _LOOPBACK

    def refusal(self) -> str | None:
        return None

    def judged(self, verdict: Verdict, _attempt: int, _events: EventWriter, /) -> Verdict:
        return verdict

    def go_on(
        self, _verdict: Verdict, _attempt: int, _events: EventWriter, _reasons: Reasons | None = None, /
    ) -> str:
        return ""

    def requeue(self, _decision: Decision, _attempt: int, _events: EventWriter, /) -> str:
        raise LaunchError("a run in the foreground has no other job to go on in")

    def excluded(self) -> Mapping[str, str]:
        return {}

    def exclude(self, _decision: Decision, _log: Sequence[Incident], /) -> None:
        return

    def release(self, _lost: Sequence[int], /) -> None:
        return


def train_here(
    config: Config,
    run: RunDir,
    attempt: int,
    *,
    tick: Callable[[int, int], None],
    search_path: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[int, Verdict]:
    """Train to the end on this machine; return the last attempt and its verdict. No process of it is left.

    A failure that may pass begins another attempt, as `orchestra.recovery.policy` says. SIGTERM, SIGHUP and
    requests in control/ stop it behind a step, with a checkpoint; SIGINT and whatever else
    `orchestra.agents.attempt` finds urgent end it at once. Main thread only. `config` is resolved; `tick` is
    called about ten times a second with the attempt (-1 between two) and the number of stop requests so far.
    Raises LaunchError when torchrun cannot be started or the run directory not be written.
    """
    with StopRequests() as signals:
        try:
            crew = Crew(crew_folder(run.control, f"here-{os.getpid()}", attempt), 0, 1, 60.0)
            station = Station(
                run,
                config,
                crew,
                signals,
                Foreground(),
                say,
                search_path,
                tick=lambda number: tick(number, signals.count()),
                warm=warm_host(config, run, search_path),
                first_attempt=attempt,
            )
            code = attend(station)
        except (LauncherError, OSError) as error:
            raise LaunchError(str(error)) from error
    events = read_events(run)
    last = attempt if station.last_attempt is None else station.last_attempt
    verdict = station.untold or node_verdict(attempt_of(events, last))
    return last, verdict or Verdict(code, "no verdict", "the attempt left no record of its end")
