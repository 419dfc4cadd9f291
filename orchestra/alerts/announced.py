"""What was said already: alerts as events of the run, so that each is said once, and its end too.

Every change is one event of the run, `alert_raised` or `alert_ended`, in a file of the watch that saw it:
a watch that is started again, another one on another host, or `--once` every minute from cron go on from
there, and the run's history shows its alerts. `told` are the outlets that just got it: one that failed is
tried again at the next look. An alert that is over stays open for the outlets that know of it and were not
told so: each watch tells its own. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from orchestra.alerts.detect import Findings
from orchestra.alerts.observed import Alert
from orchestra.run.events import is_number
from orchestra.run.files import Record

RAISED, ENDED = "alert_raised", "alert_ended"


@dataclass(frozen=True)
class OpenAlert:
    """An alert that not everybody was told the end of: since when, and which outlets know of it.

    `ended`: when it was over, in Unix seconds; `told` are then those that have yet to be told so.
    """

    alert: Alert
    told: frozenset[str]
    ended: float | None = None


@dataclass(frozen=True)
class News:
    """A change that `outlets` have yet to be told of; none where only the run's record lacks it.

    `ended`: when an alert was over, in Unix seconds; None where it begins.
    """

    alert: Alert
    outlets: frozenset[str]
    ended: float | None = None
    is_recorded: bool = False


def open_alerts(events: Iterable[Record], subject: str) -> dict[str, OpenAlert]:
    """Return the alerts about a run that its events, ordered by time, leave open, by key."""
    found: dict[str, OpenAlert] = {}
    for event in events:
        key, told = event.get("key"), event.get("told")
        if not isinstance(key, str):
            continue
        names = frozenset(map(str, told)) if isinstance(told, list) else frozenset[str]()
        before = found.get(key)
        if event.get("event") == RAISED:
            known = before.told if before is not None and before.ended is None else frozenset[str]()
            found[key] = OpenAlert(_from_event(event, key, subject), known | names)
        elif event.get("event") == ENDED and before is not None:
            ended = float(event["time"]) if before.ended is None else before.ended
            found[key] = replace(before, told=before.told - names, ended=ended)
            if not found[key].told:
                del found[key]
    return found


def _from_event(event: Record, key: str, subject: str) -> Alert:
    detector, _, detail = key.partition(":")
    since = event.get("since")
    began = float(since) if is_number(since) else float(event["time"])
    texts = [str(event.get(name, "")) for name in ("message", "advice")]
    return Alert(detector, subject, texts[0], began, texts[1], detail)


def news(found: Findings, known: dict[str, OpenAlert], outlets: Collection[str], now: float) -> list[News]:
    """Return what is to be said: alerts that not every outlet knows of, and to those that do, what is over.

    An alert goes on while its detector cannot see. Since when it has been stands fixed from its first look.
    """
    changes = []
    for alert in found.alerts:
        before = known.get(alert.key)
        if before is None or before.ended is not None:
            changes.append(News(alert, frozenset(outlets)))
        elif missing := frozenset(outlets) - before.told:
            since_first = replace(alert, since=before.alert.since)
            changes.append(News(since_first, missing, is_recorded=True))
    current = {alert.key for alert in found.alerts}
    for key, each in known.items():
        if key in current or (each.ended is None and each.alert.detector in found.blind):
            continue
        is_recorded = each.ended is not None
        if (waiting := each.told & frozenset(outlets)) or not is_recorded:
            changes.append(News(each.alert, waiting, now if each.ended is None else each.ended, is_recorded))
    return changes


def event_of(change: News, told: Sequence[str]) -> tuple[str, Record]:
    """Return the name and the evidence of the event that keeps a change."""
    alert = change.alert
    if change.ended is not None:
        return ENDED, {"key": alert.key, "since": alert.since, "told": list(told)}
    words = {"message": alert.evidence, "advice": alert.advice}
    return RAISED, {"key": alert.key, "since": alert.since, **words, "told": list(told)}
