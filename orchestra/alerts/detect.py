"""Asks all detectors about a run, or about a sweep: the list of what is looked for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestra.alerts.loss_detectors import divergence, loss_spikes
from orchestra.alerts.observed import Alert, CannotSee, Detector, Finding, Limits, ObservedRun
from orchestra.alerts.pace_detectors import ended_badly, silence, slow_rank, stall, throughput
from orchestra.alerts.upkeep_detectors import checkpoint_age, disk, goodput, restart_storm

DETECTORS: dict[str, Detector] = {
    "ended_badly": ended_badly,
    "stall": stall,
    "silence": silence,
    "throughput": throughput,
    "slow_rank": slow_rank,
    "divergence": divergence,
    "loss_spikes": loss_spikes,
    "restart_storm": restart_storm,
    "goodput": goodput,
    "checkpoint": checkpoint_age,
    "disk": disk,
}


@dataclass(frozen=True)
class Findings:
    """All that was found at one look."""

    alerts: Sequence[Alert] = ()
    unseen: Sequence[CannotSee] = ()

    @staticmethod
    def of(found: Iterable[Finding]) -> Findings:
        """Tell apart what is wrong and what could not be seen."""
        both = list(found)
        alerts = [each for each in both if isinstance(each, Alert)]
        return Findings(alerts, [each for each in both if isinstance(each, CannotSee)])

    @property
    def blind(self) -> frozenset[str]:
        """The detectors that could not see: an alert of theirs is not over for being absent."""
        return frozenset(each.detector for each in self.unseen)


def look(run: ObservedRun, limits: Limits) -> Findings:
    """Ask every detector about a run."""
    return Findings.of(each for detector in DETECTORS.values() for each in detector(run, limits))
