"""What counts as progress between the failures of a run, and which of them are charged to it.

Progress is only what outlived a failure: a newly committed checkpoint, or copies in memory from which the
next attempt began. Steps that were trained and lost again are none, however many: a run that saves every
1,000 steps and fails around step 500 would count as getting ahead each time that it comes a little further,
and never save. Both marks only ever rise, so that a run has no more progress to make than it has steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestra.recovery.incidents import Incident, Kind

# Fewer steps than that, restored from memory, are no progress: a run that fails three steps behind each start
# would creep on for days.
FEWEST_STEPS_OF_PROGRESS = 10
_NOT_CHARGED = (Kind.stopped, Kind.preempted, Kind.time_limit, Kind.node_lost, Kind.lost)


def since_started_by_hand(incidents: Sequence[Incident]) -> Sequence[Incident]:
    """Return the incidents since a person started or resumed the run: who does that has seen the others."""
    begin = max((index for index, it in enumerate(incidents) if it.by_hand), default=0)
    return incidents[begin:]


def without_progress(series: Sequence[Incident]) -> Sequence[Incident]:
    """Return the last incidents of a series between which nothing was kept."""
    begin = 0
    # High-water marks: a rollback behind them, and the way back up, is no progress.
    committed = began = -1
    for index, it in enumerate(series):
        if it.committed > committed >= 0 or (began >= 0 and it.began >= began + FEWEST_STEPS_OF_PROGRESS):
            begin = index
        committed, began = max(committed, it.committed), max(began, it.began)
    return series[begin:]


def is_charged(incident: Incident) -> bool:
    """Tell whether an incident counts against recovery.max_restarts."""
    return incident.kind not in _NOT_CHARGED and not incident.excluded
