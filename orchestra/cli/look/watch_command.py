"""`orchestra watch RUN…`: say when something is wrong with runs or sweeps, once, and when it is over.

It looks at their records every half minute until all have ended, or once. Of alerts it writes an event into
the run, so that the next watch does not say them again; nothing else of a run is changed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import secrets
import socket
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from conf.schema import WandbMode
from orchestra.alerts import prometheus
from orchestra.alerts.announced import ENDED, RAISED, News, OpenAlert, event_of, news, open_alerts
from orchestra.alerts.detect import Findings, look
from orchestra.alerts.observe import observe
from orchestra.alerts.observed import Alert, CannotSee, Limits, ObservedRun
from orchestra.alerts.outlets import (
    TERMINAL,
    Outlet,
    Printed,
    UndeliveredError,
    mail,
    printable,
    record_of,
    webhook,
)
from orchestra.alerts.upkeep_detectors import failing_members
from orchestra.cli.text.describe import invocation, note_unanswered, typed_name
from orchestra.cli.text.resolve import (
    TARGET_HELP,
    Target,
    add_directory_option,
    path_argument,
    resolve_target,
)
from orchestra.errors import EXIT_ALERT, EXIT_DONE, EXIT_UNSEEN, ConfigError
from orchestra.recovery.history import last_attempt
from orchestra.report.run_state import RunState, SweepState
from orchestra.report.scheduler import read_states
from orchestra.run.events import WATCH_PREFIX, EventWriter, read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import FollowedRows
from orchestra.run.paths import RunDir, SweepDir
from orchestra.run.permissions import open_as_folder
from orchestra.run.record import RunPhase
from orchestra.run.removal import RemovalCheck

_EVERY_S, _LONGEST_EVERY_S = 30.0, 86_400.0
_VERBS = ("status", "logs", "why", "resume", "cancel", "profile", "checkpoint ls")
_EXPLAINED = """\
  orchestra watch first         until it ends, a look every half minute
  orchestra watch first --once  one look, for cron and scripts
  orchestra watch a-sweep --webhook @FILE
                                FILE holds the address; Slack shows the text
  orchestra watch first --mail me@example.org

Each alert is said once to each place, with what shows it, since when and what to do, and once more when it is
over. What could not be seen is said too: it is not fine for being unknown.

Exit codes of --once: 0 all was seen and nothing fires, 3 an alert fires, 4 nothing fires, but not all could
be seen. Without --once: 0 the runs ended well, 3 an alert was open at the end, 4 none was, but a run was
removed or renamed before it ended: it is watched no longer.
"""


def add_arguments(parser: ArgumentParser) -> None:
    limits = Limits()
    parser.usage = (
        "orchestra watch RUN… [--once] [--json] [--webhook URL] [--mail ADDRESS]\n"
        "                       [--wandb] [--dry-run] [--dir DIR]"
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help=TARGET_HELP)
    parser.add_argument("--once", action="store_true", help="look once and end; the exit code tells")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: one object for --once, else one a line"
    )
    parser.add_argument("--every", type=float, default=_EVERY_S, metavar="S", help="seconds (%(default)g)")
    parser.add_argument(
        "--webhook", metavar="URL", help="POST each change there as JSON; @FILE: FILE has the URL"
    )
    parser.add_argument("--mail", metavar="ADDRESS", help="mail each change there")
    parser.add_argument(
        "--smtp", metavar="HOST[:PORT]", help="by this server (default: sendmail, or localhost)"
    )
    parser.add_argument(
        "--wandb", action="store_true", help="as an alert of the run's wandb page, while it is online"
    )
    parser.add_argument(
        "--prometheus",
        type=path_argument,
        metavar="FILE.prom",
        help="write all numbers there for node_exporter",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what is wrong; send and record nothing")
    parser.add_argument(
        "--min-goodput",
        type=float,
        default=limits.goodput,
        metavar="SHARE",
        help="of the time that a run has its nodes (%(default)g)",
    )
    parser.add_argument(
        "--disk-gib",
        type=float,
        default=limits.disk_free_bytes / (1 << 30),
        metavar="GIB",
        help="that should be free (%(default)g)",
    )
    add_directory_option(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Look once or until all have ended; return the exit code."""
    file = arguments.prometheus
    if file is not None and file.suffix != ".prom":
        raise ConfigError(f"--prometheus {file}: node_exporter reads files that end with .prom")
    if not 0 < arguments.every <= _LONGEST_EVERY_S:
        raise ConfigError(f"--every {arguments.every:g}: expected seconds above 0, a day of them at most")
    if not 0 <= arguments.min_goodput <= 1:
        raise ConfigError(
            f"--min-goodput {arguments.min_goodput:g}: expected a share from 0 to 1, such as 0.8"
        )
    if not arguments.disk_gib >= 0:
        raise ConfigError(f"--disk-gib {arguments.disk_gib:g}: expected 0 or more")
    targets = list(dict.fromkeys(resolve_target(text, arguments.dir) for text in arguments.runs))
    watch = Watch(
        limits=replace(
            Limits(), goodput=arguments.min_goodput, disk_free_bytes=arguments.disk_gib * (1 << 30)
        ),
        outlets=_outlets(arguments),
        to_wandb=arguments.wandb and not arguments.dry_run,
        is_dry=arguments.dry_run,
        is_exported=file is not None and not arguments.dry_run,
    )
    while True:
        looks, goes_on = watch.look(targets)
        if arguments.prometheus is not None and not arguments.dry_run:
            looks += watch.export(arguments.prometheus)
        if arguments.once or not goes_on:
            break
        time.sleep(arguments.every)
    is_alarmed = any(each.findings.alerts for each in looks)
    is_blind = any(each.findings.unseen for each in looks)
    if arguments.once:
        _print_whole(looks, arguments)
        return EXIT_ALERT if is_alarmed else EXIT_UNSEEN if is_blind else EXIT_DONE
    return EXIT_ALERT if is_alarmed else EXIT_UNSEEN if watch.has_lost_one else EXIT_DONE


def _outlets(arguments: Namespace) -> list[Outlet]:
    # One look prints all that is wrong, whoever was told before.
    outlets: list[Outlet] = [] if arguments.once else [Printed(sys.stdout, is_json=arguments.json)]
    if arguments.webhook is not None:
        url = arguments.webhook
        if url.startswith("@"):
            try:
                url = Path(url[1:]).expanduser().read_text().strip()
            except OSError as error:
                raise ConfigError(f"--webhook {url}: cannot be read: {error.strerror}") from error
            except UnicodeDecodeError as error:
                raise ConfigError(f"--webhook {url}: cannot be read: it holds no text") from error
        outlets.append(webhook(url))
    if arguments.mail is not None:
        outlets.append(mail(arguments.mail, arguments.smtp))
    elif arguments.smtp is not None:
        raise ConfigError("--smtp says how mail goes; add --mail ADDRESS")
    return outlets[:1] if arguments.dry_run and not arguments.once else [] if arguments.dry_run else outlets


@dataclass(frozen=True)
class OneLook:
    """What was found about one run or sweep."""

    name: str
    state: str
    findings: Findings


@dataclass(frozen=True)
class WandbAlert:
    """The mirror of a run that is online and trains sends what the run's events say that it was told of."""

    mode: WandbMode | None
    trains: bool
    name: str = "wandb"

    def tell(self, change: News) -> None:
        if self.mode is not WandbMode.online:
            found = "unknown" if self.mode is None else self.mode.value
            raise UndeliveredError(
                f"wandb, {change.alert.key}: the run's wandb.mode is {found}; its alerts need online"
            )
        if not self.trains:
            # Its mirror has ended, or passes over what was told before it began.
            raise UndeliveredError(
                f"wandb, {change.alert.key}: the run does not train, and nobody sends alerts to its page"
            )


@dataclass
class Watch:
    """Looks at runs and sweeps, and says what is new."""

    limits: Limits
    outlets: Sequence[Outlet]
    to_wandb: bool = False
    is_dry: bool = False
    # Whether somebody asks for the numbers of all runs, also of those that have ended.
    is_exported: bool = False
    # The runs of the last look, by their paths: a member may be named beside its sweep.
    seen: dict[Path, prometheus.Seen] = field(default_factory=dict)
    # Whether one was removed or renamed before it was seen to end.
    has_lost_one: bool = False
    # Whether those that were removed since then are known to have been removed, by their paths.
    _removal_checks: dict[Path, RemovalCheck] = field(default_factory=dict)
    # Runs and sweeps that have ended, as the last look found them: they may be removed after that.
    _ends: dict[Path, list[OneLook]] = field(default_factory=dict)
    # Members that ended, as they were when they did.
    _over: dict[Path, prometheus.Seen] = field(default_factory=dict)
    # The rows of those that were looked at.
    _rows: dict[Path, FollowedRows] = field(default_factory=dict)
    # What this terminal shows of each run, by the alerts' keys.
    _shown: dict[Path, dict[str, Alert]] = field(default_factory=dict)
    # What was said of runs and does not stand in their events: a disk was full, or it is dry.
    _remembered: dict[Path, list[Record]] = field(default_factory=dict)
    _name: str = field(default_factory=lambda: f"{WATCH_PREFIX}{socket.gethostname()}.{secrets.token_hex(4)}")
    _noted: set[str] = field(default_factory=set)

    def look(self, targets: Sequence[Target]) -> tuple[list[OneLook], bool]:
        """Look at all of them once, and say what is new; return what was found, and whether one goes on."""
        now = time.time()
        self.seen = {}
        removed = [target for target in targets if self._is_removed(target, now)]
        states, problems = self._states([target for target in targets if target not in removed], now)
        if problems and not self._noted.intersection(problems):
            note_unanswered(problems)
            self._noted.update(problems)
        looks, goes_on = [], False
        for target in removed:
            looks += self._of_removed(target, typed_name(target))
        for state in states:
            if isinstance(state, SweepState):
                of_one, may_change = self._of_sweep(state, now)
                self._keep_end(state.sweep.path, of_one, may_change)
            else:
                of_one, may_change = [self._of_run(state, now)], state.state.goes_on
                self._keep_end(Path(state.path), of_one, may_change)
            looks += of_one
            goes_on |= may_change
        return looks, goes_on

    def _is_removed(self, place: Target, now: float) -> bool:
        check = self._removal_checks.setdefault(place.path, RemovalCheck(place))
        try:
            return check.away_s(now) is not None
        except OSError:
            # Reading it tells why.
            return False

    def _of_removed(self, place: Target, name: str) -> list[OneLook]:
        """Return how it ended, as it was seen; else say once that nobody will know."""
        if (end := self._ends.get(place.path)) is not None:
            return end
        self.has_lost_one = True
        detector = "sweep" if isinstance(place, SweepDir) else "ended_badly"
        return [self._unseen(detector, name, "removed", "it was removed or renamed; it is watched no longer")]

    def _keep_end(self, path: Path, looks: list[OneLook], goes_on: bool) -> None:
        if goes_on:
            self._ends.pop(path, None)
        else:
            self._ends[path] = looks

    def export(self, file: Path) -> list[OneLook]:
        """Write the numbers of the last look for Prometheus; return what says so where that fails."""
        try:
            prometheus.write(file, list(self.seen.values()), time.time())
        except OSError as error:
            return [self._unseen("prometheus", str(file), "not written", error)]
        return []

    def _states(self, targets: Sequence[Target], now: float) -> tuple[list[RunState | SweepState], list[str]]:
        """Ask for all of them at once, or for each by itself where one of them cannot be read."""
        try:
            return read_states(targets, now)
        except (OSError, ConfigError) as error:
            if len(targets) > 1:
                each = [self._states([target], now) for target in targets]
                problems = dict.fromkeys(problem for _, of_one in each for problem in of_one)
                return [state for states, _ in each for state in states], list(problems)
            (target,) = targets
            if isinstance(target, SweepDir):
                return [SweepState(target, (), problem=str(error))], []
            unreadable = RunState(target.name, str(target.path), RunPhase.unreadable, 0, cause=str(error))
            return [unreadable], []

    def _of_sweep(self, state: SweepState, now: float) -> tuple[list[OneLook], bool]:
        """Look at a sweep as a whole, and at those of its members that go on or have alerts to end; return
        what was found, and whether one goes on.
        """
        own, name = RunDir(state.sweep.path), state.sweep.name
        if state.problem is not None:
            return [self._unseen("sweep", name, RunPhase.unreadable, state.problem)], True
        is_there = [not self._lacks_member(state.sweep, each.run, now) for each in state.members]
        removed = [each for each, is_kept in zip(state.members, is_there, strict=True) if not is_kept]
        state = replace(state, members=tuple(itertools.compress(state.members, is_there)))
        findings = Findings.of(failing_members(state, self.limits, now, invocation("why", state.sweep)))
        counted = ", ".join(f"{number} {phase}" for phase, number in state.counts.items())
        try:
            events = read_events(own)
        except OSError as error:
            looks = [self._unseen("sweep", name, counted, error)]
        else:
            self._say(own, name, findings, now, events, self.outlets)
            looks = [OneLook(name, counted, findings)]
        for each in removed:
            looks += self._of_removed(each.run, each.state.name)
        for each in state.members:
            goes_on = each.state.state.goes_on
            self._keep_end(each.run.path, [], goes_on)
            if goes_on or self._has_alerts(each.run, name):
                looks.append(self._of_run(each.state, now))
            elif self.is_exported:
                self.seen[each.run.path] = self._ended(each.state, now)
        return looks, any(phase.goes_on for phase in state.counts)

    def _lacks_member(self, sweep: SweepDir, run: RunDir, now: float) -> bool:
        """Whether a member was removed. Those that a sweep made itself are there before its record is."""
        is_own = run.path.parent == sweep.path
        return self._is_removed(run, now) or (is_own and not _has_records(run))

    def _has_alerts(self, run: RunDir, name: str) -> bool:
        """Whether an alert about it has yet to end, or somebody here has yet to hear of its end."""
        if self._shown.get(run.path) or self._remembered.get(run.path):
            return True
        try:
            known = open_alerts(read_events(run, (RAISED, ENDED)), name)
        except OSError:
            # Looking at it tells why.
            return True
        names = {outlet.name for outlet in self.outlets}
        return any(each.ended is None or each.told & names for each in known.values())

    def _ended(self, state: RunState, now: float) -> prometheus.Seen:
        """Return a member that has ended as it was when this was first seen: its records are long."""
        path = Path(state.path)
        before = self._over.get(path)
        if before is None or (before.state.state, before.state.attempts) != (state.state, state.attempts):
            seen = self._see(state, now)
            last = replace(seen.observed, rows=seen.observed.rows[-1:], events=(), nodes=())
            before = self._over[path] = replace(seen, observed=last)
            self._rows.pop(path, None)
        return before

    def _see(self, state: RunState, now: float) -> prometheus.Seen:
        run = RunDir(Path(state.path))
        try:
            rows = self._rows.setdefault(run.path, FollowedRows(run.metrics))
            observed = observe(state, now, {verb: invocation(verb, run) for verb in _VERBS}, rows)
        except (OSError, ConfigError) as error:
            # What is read when it is in the midst of a change, or of a folder that went away.
            observed = ObservedRun(state.name, now, RunPhase.unreadable, cause=str(error))
        return prometheus.Seen(state, observed, look(observed, self.limits))

    def _of_run(self, state: RunState, now: float) -> OneLook:
        run = RunDir(Path(state.path))
        if not _has_records(run):
            away = "its records are not there, and its file system may not be mounted"
            return self._unseen("ended_badly", state.name, RunPhase.unreadable, away)
        seen = self._see(state, now)
        observed, findings = seen.observed, seen.findings
        self.seen[run.path] = seen
        if observed.state is RunPhase.unreadable:
            # What was wrong may still be.
            return self._unseen("ended_badly", state.name, observed.state, observed.cause or "unreadable")
        outlets = list(self.outlets)
        if self.to_wandb:
            mode = None if observed.config is None else observed.config.wandb.mode
            outlets.append(WandbAlert(mode, trains=observed.training is not None))
        self._say(run, state.name, findings, now, observed.events, outlets)
        return OneLook(state.name, str(state.state), findings)

    def _unseen(self, detector: str, name: str, state: str, why: str | OSError) -> OneLook:
        """Note once why something cannot be seen, and return it as what a look at it found."""
        words = why if isinstance(why, str) else why.strerror or str(why)
        self._note(f"{name} cannot be seen: {words}" if detector != "prometheus" else f"{name}: {words}")
        return OneLook(name, state, Findings(unseen=[CannotSee(detector, name, words)]))

    def _note(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            print(printable(f"note: {text}"), file=sys.stderr)

    def _say(
        self,
        run: RunDir,
        name: str,
        findings: Findings,
        now: float,
        recorded: Sequence[Record],
        outlets: Sequence[Outlet],
    ) -> None:
        """Tell each outlet what it does not know, and keep in the run's events what it was told."""
        events = [*recorded, *self._remembered.get(run.path, ())]
        self._record(run)
        known = open_alerts(sorted(events, key=lambda event: event["time"]), name)
        shown = self._shown.setdefault(run.path, {})
        for key, alert in shown.items():
            # Another watch may have recorded its end.
            each = known.get(key, OpenAlert(alert, frozenset(), ended=now))
            known[key] = replace(each, told=each.told | {TERMINAL})
        for change in news(findings, known, [outlet.name for outlet in outlets], now):
            told = self._tell(outlets, change, name)
            if TERMINAL in told:
                # Another terminal has not shown it.
                told.remove(TERMINAL)
                if change.ended is None:
                    shown[change.alert.key] = change.alert
                else:
                    shown.pop(change.alert.key, None)
            if change.is_recorded and not told:
                continue
            word, evidence = event_of(change, told)
            # Another watch's clock may be ahead: what is said of an alert follows what was said before.
            said = (event["time"] for event in events if event.get("key") == evidence["key"])
            after = math.nextafter(max(said, default=0.0), math.inf)
            stamp = {"event": word, "time": max(time.time(), after), "attempt": last_attempt(events) or 0}
            self._remembered.setdefault(run.path, []).append({**stamp, **evidence})
        self._record(run)

    def _tell(self, outlets: Sequence[Outlet], change: News, name: str) -> list[str]:
        """Return the names of the outlets that were told."""
        told = []
        for outlet in outlets:
            if outlet.name not in change.outlets:
                continue
            try:
                outlet.tell(change)
                told.append(outlet.name)
            except UndeliveredError as error:
                words = f"note: {name}: {change.alert.key} was not told: {error}"
                print(printable(words), file=sys.stderr)
        return told

    def _record(self, run: RunDir) -> None:
        """Write what is remembered into the run's events; what cannot be written stays for the next look."""
        remembered = self._remembered.get(run.path)
        # A run that waits in the queue has no folder for events yet: it is its own to make.
        waits = run.record.exists() and not run.events.exists()
        if self.is_dry or not remembered or waits:
            return
        try:
            # No file stays open: a sweep has thousands of runs.
            with (
                open_as_folder(run.events),
                contextlib.closing(EventWriter(run, self._name, 0)) as writer,
            ):
                while remembered:
                    writer.write(**remembered[0])
                    remembered.pop(0)
        except OSError as error:
            self._note(f"{run.path}: alerts cannot be recorded: {error.strerror}")


def _has_records(run: RunDir) -> bool:
    """Whether a run's records are there; where that cannot be seen reading them tells why."""
    try:
        return run.has_records()
    except OSError:
        return True


def _print_whole(looks: Sequence[OneLook], arguments: Namespace) -> None:
    """Print all that is wrong now, and what could not be seen."""
    if arguments.json:
        answer = [
            {
                "name": each.name,
                "state": each.state,
                "alerts": [record_of(News(alert, frozenset())) for alert in each.findings.alerts],
                "cannot_see": [
                    {"detector": blind.detector, "why": blind.why} for blind in each.findings.unseen
                ],
            }
            for each in looks
        ]
        print(json.dumps(answer, indent=2))
        return
    printed = Printed(sys.stdout)
    for each in looks:
        for alert in each.findings.alerts:
            printed.tell(News(alert, frozenset()))
        for blind in each.findings.unseen:
            print(printable(f"cannot see {each.name}: {blind.detector}: {blind.why}"))
        if not each.findings.alerts:
            seen = "nothing fires" if each.findings.unseen else "all was seen, nothing fires"
            print(printable(f"{each.name}: {each.state}; {seen}"))
