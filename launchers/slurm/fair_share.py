"""What a job costs an account in Slurm's own terms, and how an account stands: `sshare`, and what a partition
says of time limits and weights. Asked by the commands that submit; nothing that is missing here keeps a job
back.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from launchers.slurm.commands import output_of

# Nobody is to wait for what is only good to know.
_TIMEOUT_S = 5.0
_FIELD = re.compile(r"(\w+)=(\S*)")
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([KMGTP]?)")
# Weights of memory are for a megabyte unless they say another unit.
_MEGABYTES = {"": 1.0, "K": 1.0 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


@dataclass(frozen=True)
class Standing:
    """How a user stands in an account: shares of 1 beside the others below it, what it used of what they used
    (1: all), decayed as the site says, and the factor from 0 (the last) to 1 that its jobs' priority has.
    """

    account: str
    shares: float
    used: float
    factor: float


def standings() -> list[Standing]:
    """Return how this user stands in each of its accounts; none where the site keeps no accounts or does not
    schedule by them. Raises LauncherError.
    """
    return parsed_standings(output_of(("sshare", "-P", "-U"), timeout_s=_TIMEOUT_S))


def parsed_standings(text: str) -> list[Standing]:
    """Return the standings in what sshare printed. Without priority/multifactor it has no NormShares, and a
    FairShare of 0 that means nothing.
    """
    header, *lines = [line.split("|") for line in text.splitlines()] or [[]]
    found = []
    for line in lines:
        row = {name: value.strip() for name, value in zip(header, line, strict=False)}
        numbers = [_number(row.get(name, "")) for name in ("NormShares", "EffectvUsage", "FairShare")]
        shares, used, factor = numbers
        if row.get("User") and shares is not None and used is not None and factor is not None:
            found.append(Standing(row.get("Account", ""), shares, used, factor))
    return found


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class PartitionTerms:
    """What a partition says of jobs: the limit of those that name none and the longest one, as Slurm writes
    them, and what a unit of each resource bills (`cpu`, `mem` in megabytes, `gres/gpu`, `node`), empty where
    the site says nothing.
    """

    time_limit: str | None = None
    longest: str | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    # As the site wrote them.
    words: str = ""


def partition_terms(name: str) -> PartitionTerms:
    """Return the terms of a partition. Raises LauncherError."""
    words = ("scontrol", "--oneliner", "show", "partition", name)
    return parsed_terms(output_of(words, timeout_s=_TIMEOUT_S))


def parsed_terms(text: str) -> PartitionTerms:
    """Return the terms in what scontrol printed of one partition."""
    fields = dict(_FIELD.findall(text))
    default, longest = (
        None if limit == "NONE" else limit
        for limit in (fields.get(name, "NONE") for name in ("DefaultTime", "MaxTime"))
    )
    words = fields.get("TRESBillingWeights", "")
    pairs = [pair.partition("=") for pair in words.split(",") if "=" in pair]
    weights = {name.lower(): _weight(name.lower(), value) for name, _, value in pairs}
    known = {name: each for name, each in weights.items() if each is not None}
    return PartitionTerms(default or longest, longest, known, words)


def _weight(name: str, text: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    return float(match[1]) / (_MEGABYTES[match[2]] if name == "mem" else 1.0)


class Counted(enum.Enum):
    """Which of a job's resources a site bills (PriorityFlags)."""

    all = ""
    # The one that bills most.
    most = "MAX_TRES"
    # The one that bills most, and all generic resources such as GPUs.
    most_and_gres = "MAX_TRES_GRES"


def counted(priority_flags: str) -> Counted:
    """Return what a site bills by what scontrol says of its PriorityFlags."""
    flags = priority_flags.split(",")
    return next((way for way in (Counted.most_and_gres, Counted.most) if way.value in flags), Counted.all)


def billing(
    weights: Mapping[str, float], amounts: Mapping[str, float], counts: Counted = Counted.all
) -> float:
    """Return what a job with these amounts of resources bills."""
    parts = {name: weight * amounts[name] for name, weight in weights.items() if name in amounts}
    if counts is Counted.all:
        return sum(parts.values())
    is_added = counts is Counted.most_and_gres
    added = {name: part for name, part in parts.items() if is_added and name.startswith("gres/")}
    return sum(added.values()) + max((parts[name] for name in parts if name not in added), default=0.0)
