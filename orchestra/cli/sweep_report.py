"""What `orchestra submit -m` and `resume SWEEP` print: what would be submitted, and what became of it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from orchestra.cli import cluster, describe
from orchestra.errors import EXIT_DONE, EXIT_FAILED
from orchestra.sweepdir import SweepDir, read_sweep

if TYPE_CHECKING:
    from orchestra.submit.sweeps.course import Course
    from orchestra.submit.sweeps.sending import Outcome


def print_course(course: Course, start: str | None, *, as_json: bool) -> None:
    """Print the scripts and the members that would be submitted."""
    scripts = [it.script() for it in course.arrays]
    rows = _members(course)
    if as_json:
        facts = {"name": course.sweep.name, "path": str(course.sweep.path), "is_new": course.is_new}
        told = [
            {"number": it.array.number, "members": list(it.array.members), "script": text}
            for it, text in zip(course.arrays, scripts, strict=True)
        ]
        print(json.dumps({**facts, "members": rows, "arrays": told, "estimated_start": start}, indent=2))
        return
    print("\n".join(scripts), end="")
    for row in rows:
        what = f"array {row['array']}" if row["array"] is not None else f"{row['state']}, left alone"
        cluster.note(f"{row['index']:03d}  {' '.join(row['overrides'])}  ({what})")
    if start is not None:
        cluster.note(f"Slurm would take the jobs and expects the first one to start at {start}")


def _members(course: Course) -> list[dict[str, Any]]:
    """Return what would become of each member."""
    arrays = {index: it.array.number for it in course.arrays for index in it.array.members}
    members = (
        [it.record for it in course.plan.members]
        if course.plan is not None
        else list(read_sweep(course.sweep).members)
    )
    states = _kept_states(course)
    return [
        {
            "index": it.index,
            "overrides": list(it.overrides),
            "array": arrays.get(it.index),
            "state": states.get(it.index),
            "adopted": it.adopted,
        }
        for it in members
    ]


def _kept_states(course: Course) -> dict[int, str]:
    if course.plan is None:
        return {it.member.index: it.state.state for it in course.kept}
    by_path = {str(it.run.path): it.state.state for it in course.kept}
    return {it.index: by_path[it.adopted] for it in course.plan.members if it.adopted is not None}


def tell(
    course: Course,
    sweep: SweepDir,
    outcome: Outcome,
    start: str | None,
    *,
    as_json: bool,
    stream: TextIO | None = None,
) -> int:
    """Print what became of a sweep; return 0, or 1 where a limit kept members out."""
    if as_json:
        print(json.dumps(_facts(course, sweep, outcome, start)), file=stream)
    else:
        print("\n".join(_lines(course, sweep, outcome, start)), file=stream, flush=True)
    if outcome.limit is None:
        return EXIT_DONE
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {limited(sweep, outcome)}\n")
    return EXIT_FAILED


def limited(sweep: SweepDir, outcome: Outcome) -> str:
    """Return how many members a limit kept out, and what to do."""
    return (
        f"{outcome.num_refused} of {len(outcome.record.members)} members were not submitted, for a limit on "
        f"how many jobs there may be ({outcome.limit}); `orchestra resume {sweep.name}` submits them once "
        f"others have ended"
    )


def _facts(course: Course, sweep: SweepDir, outcome: Outcome, start: str | None) -> dict[str, Any]:
    states = _kept_states(course)
    members = [
        {
            "index": it.index,
            "overrides": list(it.overrides),
            "path": str(outcome.record.run(sweep, it).path),
            "adopted": it.adopted,
            "state": states.get(it.index),
        }
        for it in outcome.record.members
    ]
    arrays: list[dict[str, Any]] = [
        {"id": it.id, "members": list(it.members), "nodes": nodes}
        for it, nodes in zip(outcome.accepted, _nodes(course, outcome), strict=True)
    ]
    return {
        "name": sweep.name,
        "path": str(sweep.path),
        "is_new": course.is_new,
        "arrays": arrays,
        "num_submitted": sum(len(it.tasks) for it in outcome.accepted),
        "num_not_submitted": outcome.num_refused,
        "limit": outcome.limit,
        "estimated_start": start,
        "members": members,
    }


def _nodes(course: Course, outcome: Outcome) -> list[int | None]:
    """Return the nodes of each array's jobs, from its script."""
    from orchestra.submit.sweeps.arrays import num_nodes

    templates = {index: it.template for it in course.arrays for index in it.array.members}
    return [num_nodes(templates[array.members[0]]) for array in outcome.accepted]


def _lines(course: Course, sweep: SweepDir, outcome: Outcome, start: str | None) -> Iterator[str]:
    from orchestra.submit.sweeps.standing import counted

    total = len(outcome.record.members)
    is_same = "" if course.is_new else ", submitted before"
    yield f"sweep   {sweep.name}: {_count(total, 'member')}{is_same}"
    for array, nodes in zip(outcome.accepted, _nodes(course, outcome), strict=True):
        yield f"array   {array.id}: {_count(len(array.tasks), 'job')} of {_count(nodes or 1, 'node')}"
    if course.kept and course.is_new:
        num_members = sum(it.adopted is not None for it in outcome.record.members)
        sweeps = sorted({it.run.path.parent.name for it in course.kept})
        yield (
            f"adopted {_count(num_members, 'member')} from {_listed(sweeps)}: {counted(course.kept)} "
            f"(--force trains them anew)"
        )
    elif course.kept:
        yield f"kept    {_count(len(course.kept), 'member')} as they are: {counted(course.kept)}"
        owners = sorted({it.run.path.parent.name for it in course.kept if it.needs_job})
        yield from (
            f"        `orchestra resume {name}` goes on with those that are its own" for name in owners
        )
    if not outcome.accepted and outcome.limit is None:
        yield "nothing is missing: nothing was submitted"
    if start is not None and outcome.accepted:
        yield f"starts  {start}, as Slurm expects of the first one"
    yield f"next    `{describe.invocation('status', sweep)}`, `{describe.invocation('resume', sweep)}`"


def _listed(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
