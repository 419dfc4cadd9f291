"""What `orchestra watch` would have said of a run while it trained, from its records as they stood then."""

from __future__ import annotations

import time

from orchestra.alerts.detect import look
from orchestra.alerts.observe import observe
from orchestra.alerts.observed import Limits, ObservedRun
from orchestra.recovery.accounting import account
from orchestra.report.run_state import read_state
from orchestra.run.config_file import read_config
from orchestra.run.events import read_events
from orchestra.run.files import read_json_lines
from orchestra.run.metrics_file import rows_that_count
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.run.run_lineage import lineage_of

# What a busy machine may truly do to a run that nobody disturbs: be slow, for a while or on one rank.
_OF_THE_MACHINE = ("stall", "throughput", "slow_rank")
_MOMENTS = 40
# How full the disk is here is no matter.
_LIMITS = Limits(disk_free_bytes=0.0)


def false_alarms(run: RunDir) -> list[str]:
    """Return what detectors say of a run that nobody disturbed: at moments of its life, and at its end."""
    events, rows = read_events(run), list(read_json_lines(run.metrics))
    config = read_config(run.config)
    alerts = []
    for row in rows[:: max(1, len(rows) // _MOMENTS)]:
        now = row["time"]
        known = [event for event in events if event["time"] <= now]
        read = [each for each in rows if each["time"] <= now]
        seen = ObservedRun(
            name=run.name,
            now=now,
            state=RunPhase.running,
            rows=rows_that_count(read, lineage_of(known)),
            events=known,
            accounts=account(known, read, now=now),
            config=config,
        )
        assert seen.training is not None
        alerts += [alert for alert in look(seen, _LIMITS).alerts if alert.detector not in _OF_THE_MACHINE]
    now = time.time()
    alerts += look(observe(read_state(run, now), now, {}), _LIMITS).alerts
    return [f"{alert.key}: {alert.evidence}" for alert in alerts]
