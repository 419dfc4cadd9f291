"""What was said already: alerts as events of the run, so that each is said once, and its end too.

Every change is one event of the run, `alert_raised` or `alert_ended`, in a file of the watch that saw it:
a watch that is started again, another one on another host, or `--once` every minute from cron go on from
there, and the run's history shows its alerts. `told` are the outlets that just got it: one that failed is
tried again at the next look. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from orchestra.alerts.detect import Findings
from orchestra.alerts.observed import Alert
from orchestra.run.events import is_number
from orchestra.run.files import Record

RAISED, ENDED = "alert_raised", "alert_ended"


@dataclass(frozen=True)
class OpenAlert:
    """An alert that was raised and has not ended: since when, and which outlets were told of it."""

    alert: Alert
    told: frozenset[str]


@dataclass(frozen=True)
class News:
    """A change that `outlets` have yet to be told of; none where only the run's record lacks it.

    `ended`: when an alert was over, in Unix seconds; None where it begins.
    """

    alert: Alert
    outlets: frozenset[str]
    ended: float | None = None


def open_alerts(events: Iterable[Record], subject: str) -> dict[str, OpenAlert]:
    """Return the alerts about a run that its events leave open, by key."""
    found: dict[str, OpenAlert] = {}
    for event in events:
        key, told = event.get("key"), event.get("told")
        if not isinstance(key, str):
            continue
        if event.get("event") == ENDED:
            found.pop(key, None)
        elif event.get("event") == RAISED:
            before = found[key].told if key in found else frozenset[str]()
            names = frozenset(map(str, told)) if isinstance(told, list) else frozenset[str]()
            found[key] = OpenAlert(_from_event(event, key, subject), before | names)
    return found


def _from_event(event: Record, key: str, subject: str) -> Alert:
    detector, _, detail = key.partition(":")
    since = event.get("since")
    began = float(since) if is_number(since) else float(event["time"])
    texts = [str(event.get(name, "")) for name in ("message", "advice")]
    return Alert(detector, subject, texts[0], began, texts[1], detail)


def news(found: Findings, known: dict[str, OpenAlert], outlets: Collection[str], now: float) -> list[News]:
    """Return what is to be said: alerts that not every outlet knows of, and those that are over.

    An alert goes on while its detector cannot see. Since when it has been stands fixed from its first look.
    """
    changes = []
    for alert in found.alerts:
        before = known.get(alert.key)
        told = frozenset[str]() if before is None else before.told
        missing = frozenset(outlets) - told
        if missing or before is None:
            changes.append(News(alert, missing))
    current = {alert.key for alert in found.alerts}
    for key, each in known.items():
        if key not in current and each.alert.detector not in found.blind:
            changes.append(News(each.alert, frozenset(outlets), ended=now))
    return changes


def event_of(change: News, told: Sequence[str]) -> tuple[str, Record]:
    """Return the name and the evidence of the event that keeps a change."""
    alert = change.alert
    if change.ended is not None:
        return ENDED, {"key": alert.key, "since": alert.since, "told": list(told)}
    words = {"message": alert.evidence, "advice": alert.advice}
    return RAISED, {"key": alert.key, "since": alert.since, **words, "told": list(told)}
