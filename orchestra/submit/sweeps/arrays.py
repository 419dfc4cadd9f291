"""Which runs of a submission go into which Slurm job, and each job's script: pure functions.

Members of a sweep whose batch scripts are equal share an array; the job of a single run is an array of one,
without a task number. A template is such a script without what differs from array to array: its tasks, its
token and the index of its first member.

Slurm's throttle (`--array=0-9%4`) is that of one array. Where a sweep has several, they are put into lanes
(`_lanes`): the lanes' throttles add up to the sweep's, and the arrays of a lane run one after another.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from conf.schema import Config
from launchers.slurm.batch_script import rendered
from orchestra.run.control.stop_requests import user_name
from orchestra.run.paths import RunDir, SweepArray, SweepDir
from orchestra.submit.fair.predecessors import Following, refuse_cycle
from orchestra.submit.job import NODE_MODULE, PACK_MODULE, Share, array_job, batch_job, new_token, packed_job
from orchestra.submit.new_run import planned_run
from orchestra.submit.submission import Submission

_TASKS = re.compile(r"^#SBATCH --array=.*$", re.MULTILINE)
_COMMENT = re.compile(r"^#SBATCH --comment=.*$", re.MULTILINE)
_NODES = re.compile(r"^#SBATCH --nodes=(\d+)$", re.MULTILINE)
# On the line of srun, and on that of what is done where it failed.
_FIRST = re.compile(rf"({re.escape(NODE_MODULE)}(?:\.\w+)? .*--first )\d+(?= |$)", re.MULTILINE)
_ARRAY = re.compile(rf"({re.escape(NODE_MODULE)}\.\w+ .*--array )\d+(?= |$)", re.MULTILINE)
_AT_ONCE = re.compile(rf"{re.escape(PACK_MODULE)} .*--at-once (\d+) ")


class Templates:
    """Renders templates for one sweep, each kind of job once."""

    def __init__(self, sweep: SweepDir) -> None:
        self._sweep = sweep
        self._rendered: dict[str, str] = {}

    def of(self, config: Config, share: Share) -> str:
        """Return the template of the member with this configuration."""
        is_packed = int(config.cluster.members_per_node) > 1
        job = (
            packed_job(config, self._sweep, share)
            if is_packed
            else array_job(config, self._sweep, "", 0, "0", share)
        )
        key = repr(job)
        if key not in self._rendered:
            self._rendered[key] = template_of(rendered(job))
        return self._rendered[key]


def template_of(script: str) -> str:
    """Return an array's script without its tasks, its token and its first member."""
    return _filled(script, SweepArray(0, "", 0, (0,), "", "", 0.0), "0")


def with_code(template: str, sweep: SweepDir, code: Path) -> str:
    """Return a template whose jobs import the packages from another of the sweep's snapshots."""
    folder = re.escape(str(sweep.path))
    return re.sub(rf"{folder}/code(\.array-\d+)?(?![\w.-])", lambda _: str(code), template)


def _filled(script: str, array: SweepArray, tasks: str) -> str:
    script = _TASKS.sub(f"#SBATCH --array={tasks}", script, count=1)
    script = _COMMENT.sub(f"#SBATCH --comment={array.token}", script, count=1)
    return _ARRAY.sub(rf"\g<1>{array.number}", _FIRST.sub(rf"\g<1>{array.first}", script))


def members_at_once(script: str) -> int | None:
    """Return how many members share the node of each of a script's jobs; None where each has its own."""
    match = _AT_ONCE.search(script)
    return None if match is None else int(match[1])


@dataclass(frozen=True)
class PlannedArray:
    """An array that is to be submitted, and what its script is made of."""

    array: SweepArray
    template: str
    # How many of its tasks may run at a time.
    throttle: int | None = None
    # It begins when the array before it in the same lane is over, in the first place when the jobs in `after`
    # are; None: at once.
    lane: int | None = None
    after: tuple[str, ...] = ()

    def script(self) -> str:
        """Return its batch script, word for word."""
        limit = "" if self.throttle is None else f"%{self.throttle}"
        tasks = f"{task_ranges(self.array.tasks)}{limit}"
        return _filled(self.template, self.array, tasks)

    def split(self, num_tasks: int, number: int) -> tuple[PlannedArray, PlannedArray]:
        """Return the array with its first tasks alone, and a new one of this number with the others."""
        tasks, packed = self.array.tasks, self.array.packed
        cut = len(packed) * num_tasks // len(tasks)
        head = replace(self.array, tasks=tasks[:num_tasks], packed=packed[:cut])
        rest = replace(
            self.array, number=number, token=new_token(), tasks=tasks[num_tasks:], packed=packed[cut:]
        )
        return replace(self, array=head), replace(self, array=rest)


@dataclass(frozen=True)
class Numbering:
    """What is the same for all jobs that one command submits."""

    name: str
    user: str
    # Unix seconds.
    now: float
    # Tasks that one array may hold.
    array_size: int = 1
    # Jobs of the sweep that may run at a time.
    throttle: int | None = None
    # Of these the jobs that it has already, waiting or running, one for each member.
    living: tuple[str, ...] = ()
    # What a single run begins after.
    following: Following = field(default_factory=Following)


def planned_arrays(
    templates: Mapping[int, str], numbering: Numbering, numbers: Iterator[int]
) -> list[PlannedArray]:
    """Return the arrays that train members, given the template of each by the member's index.

    Equal templates go to one array; one that would be too large is split. `numbers` are the arrays' own.
    """
    groups: dict[str, list[int]] = {}
    for index in sorted(templates):
        groups.setdefault(templates[index], []).append(index)
    parts = [part for template, members in groups.items() for part in _parts(template, members, numbering)]
    shared: list[_Share] = [_Share(None, None)] * len(parts)
    after: tuple[str, ...] = ()
    if numbering.throttle is not None:
        free = numbering.throttle - len(numbering.living)
        if free < 1:
            # Those that live have all that may run: of an array's tasks (12_3) the whole array is waited for.
            after = tuple(dict.fromkeys(job.partition("_")[0] for job in numbering.living))
        shared = _lanes([len(part.tasks) for part in parts], free if free >= 1 else numbering.throttle)
    return [
        PlannedArray(
            SweepArray(
                number=next(numbers),
                token=new_token(),
                first=part.members[0],
                tasks=part.tasks,
                name=numbering.name,
                user=numbering.user,
                submitted=numbering.now,
                packed=part.members if part.is_packed else (),
            ),
            part.template,
            share.throttle,
            share.lane,
            after,
        )
        for part, share in zip(parts, shared, strict=True)
    ]


@dataclass(frozen=True)
class _Share:
    """What an array gets of the sweep's throttle."""

    throttle: int | None
    lane: int | None


def _lanes(sizes: Sequence[int], throttle: int) -> list[_Share]:
    """Return each array's share of a throttle, by the arrays' numbers of tasks.

    Of all numbers of lanes the one with the fewest rounds, where a round is the time of one task; of equals
    the most lanes, since a late task keeps nothing but its own lane waiting. Two arrays of 500 with 4 at a
    time are two lanes of 2; one of 1,000 and one of 10 with 2 at a time are one lane: 505 rounds, not 1,000.
    """
    throttle = min(throttle, sum(sizes))
    plans = [_in_lanes(sizes, throttle, count) for count in range(1, min(len(sizes), throttle) + 1)]
    fewest = min((rounds for rounds, _ in plans), default=0)
    return next((shares for rounds, shares in reversed(plans) if rounds == fewest), [])


def _in_lanes(sizes: Sequence[int], throttle: int, count: int) -> tuple[int, list[_Share]]:
    """Return the rounds and the shares with so many lanes: the largest arrays first, each into the lane with
    the fewest tasks, and each job that may run to the lane with the most rounds.
    """
    lanes: list[list[int]] = [[] for _ in range(count)]
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        min(lanes, key=lambda lane: sum(sizes[place] for place in lane)).append(place)
    throttles = [1] * count

    def rounds(lane: int) -> int:
        return sum(math.ceil(sizes[place] / throttles[lane]) for place in lanes[lane])

    for _ in range(throttle - count):
        throttles[max(range(count), key=rounds)] += 1
    lane_of = {place: lane for lane, places in enumerate(lanes) for place in places}
    shares = [_Share(throttles[lane_of[place]], lane_of[place]) for place in range(len(sizes))]
    return max(map(rounds, range(count))), shares


@dataclass(frozen=True)
class _ArrayPart:
    """Members that go into one array."""

    template: str
    members: tuple[int, ...]
    tasks: tuple[int, ...]
    is_packed: bool = False


def _parts(template: str, members: Sequence[int], numbering: Numbering) -> Iterator[_ArrayPart]:
    """Cut members into pieces whose task numbers, counted from a piece's first member, stay below the site's
    size. Of members that share nodes, as many tasks as they fill, and no more than may run at a time: each
    goes on with the next ones.
    """
    if (at_once := members_at_once(template)) is not None:
        size = at_once * numbering.array_size
        for begin in range(0, len(members), size):
            some = tuple(members[begin : begin + size])
            num_tasks = min(math.ceil(len(some) / at_once), numbering.throttle or numbering.array_size)
            yield _ArrayPart(template, some, tuple(range(num_tasks)), is_packed=True)
        return
    part: list[int] = []
    for index in [*members, None]:
        if part and (index is None or index - part[0] >= numbering.array_size):
            yield _ArrayPart(template, tuple(part), tuple(one - part[0] for one in part))
            part = []
        if index is not None:
            part.append(index)


def task_ranges(tasks: Sequence[int]) -> str:
    """Return ascending task numbers as sbatch takes them: 0-3,7 or 0-8:2."""
    words = []
    position = 0
    while position < len(tasks):
        end = _end_of_run(tasks, position)
        first, last = tasks[position], tasks[end]
        step = tasks[position + 1] - first if end > position else 1
        words.append(str(first) if end == position else f"{first}-{last}" + (f":{step}" if step > 1 else ""))
        position = end + 1
    return ",".join(words)


def _end_of_run(tasks: Sequence[int], begin: int) -> int:
    """Return the place of the last number that follows in equal steps; two with a gap are no run."""
    if begin + 1 >= len(tasks):
        return begin
    step = tasks[begin + 1] - tasks[begin]
    end = begin + 1
    while end + 1 < len(tasks) and tasks[end + 1] - tasks[end] == step:
        end += 1
    return end if step == 1 or end - begin > 1 else begin


def num_nodes(script: str) -> int | None:
    """Return the nodes that each of a script's jobs gets; None where it does not say."""
    match = _NODES.search(script)
    return None if match is None else int(match[1])


def job_of_run(config: Config, run: RunDir, share: Share, numbering: Numbering) -> PlannedArray:
    """Return the job that trains a single run."""
    following = numbering.following
    template = rendered(batch_job(config, run, "", share, follows=bool(following.awaited)))
    (job,) = planned_arrays({0: template}, numbering, itertools.count())
    return replace(job, after=following.jobs)


def arrays_of(submission: Submission, place: RunDir | SweepDir, numbering: Numbering) -> list[PlannedArray]:
    """Return the jobs that train the members which the submission does not adopt; none on this machine."""
    if submission.is_here:
        return []
    if isinstance(place, RunDir):
        (member,) = submission.members
        if not member.alternatives:
            return [job_of_run(member.config, place, member.share, numbering)]
        jobs: list[PlannedArray] = []
        for number, (config, share) in enumerate(member.alternatives):
            template = rendered(batch_job(config, place, "", share, alternative=number))
            jobs += planned_arrays({0: template}, numbering, itertools.count(number))
        return jobs
    templates = Templates(place)
    wanted = {
        member.index: templates.of(member.config, member.share)
        for member in submission.members
        if member.adopted is None
    }
    return planned_arrays(wanted, numbering, itertools.count())


@dataclass(frozen=True)
class PlacedSubmission:
    """A submission, the directory that it would get, and what its jobs have in common."""

    submission: Submission
    place: RunDir | SweepDir
    numbering: Numbering

    def arrays(self) -> list[PlannedArray]:
        """Return the jobs that it would be submitted as; each call makes new tokens."""
        return arrays_of(self.submission, self.place, self.numbering)


def placed_run(submission: Submission, now: float, following: Following | None = None) -> PlacedSubmission:
    """Return the submission of a single run in its place. Raises ConfigError where its name is taken, or
    where it would wait for itself.
    """
    run = planned_run(submission.members[0].request(submission.command), now)
    following = following or Following()
    refuse_cycle(run, following.predecessors)
    return PlacedSubmission(submission, run, Numbering(run.name, user_name(), now, following=following))
