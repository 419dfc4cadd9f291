"""Trains a run on this machine in the foreground: one agent, with the same restarts as on a cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema import Config
from launchers.launch_errors import LauncherError
from launchers.node_agent import StopRequests
from launchers.node_group import NodeGroup
from orchestra.agents.agent import attend, fork_server_of, group_folder
from orchestra.agents.context import AgentContext, Reasons
from orchestra.errors import LaunchError
from orchestra.recovery.history import attempt_of
from orchestra.recovery.incidents import Incident, Verdict, node_verdict
from orchestra.recovery.policy import Decision
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Foreground:
    """A command on this machine, in the place of a scheduler: there is no other job to go on in."""

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

    def final_verdict(self, verdict: Verdict, _attempt: int, _events: EventWriter, /) -> Verdict:
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
    requests in control/ stop it after a step, with a checkpoint; SIGINT and a second signal end it at once
    (`orchestra.agents.attempt.StopDeadline`). Main thread only. `config` is resolved; `tick` is
    called about ten times a second with the attempt (-1 between two) and the number of stop requests so far.
    Raises LaunchError when torchrun cannot be started or the run directory not be written.
    """
    with StopRequests() as signals:
        try:
            group = NodeGroup(group_folder(run.control, f"here-{os.getpid()}", attempt), 0, 1, 60.0)
            fork_server = fork_server_of(config, run, search_path)
            context = AgentContext(
                run, config, group, signals, Foreground(), say, search_path, fork_server=fork_server
            )
            result = attend(context, tick=lambda number: tick(number, signals.count()), first_attempt=attempt)
        except (LauncherError, OSError) as error:
            raise LaunchError(str(error)) from error
    last = attempt if result.last_attempt is None else result.last_attempt
    verdict = result.unwritten or node_verdict(attempt_of(read_events(run), last))
    return last, verdict or Verdict(result.code, "no verdict", "the attempt left no record of its end")
