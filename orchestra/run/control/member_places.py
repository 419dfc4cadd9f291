"""Which job trains a member of a sweep that shares its node with others: files in the member's control/.

The jobs of an array with `cluster.members_per_node` take members from one list. Who takes a member makes the
next file array-000.place-0.json as one act (link), so that each has one holder; how that ended stands in
array-000.place-0.end. A member whose place ended with "goes on" may be taken again, by any of the jobs, and
so may one whose holder is a start of a job that Slurm says is over. Who cancels a member that waits takes it,
too. Standard library only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from orchestra.run.files import make_once, names_in, read_json
from orchestra.run.paths import RunDir

# RunDir.place
_NAME = re.compile(r"array-(\d+)\.place-(\d+)\.json")
# In the environment of a member that shares its GPUs with others: how many have each.
MEMBERS_VARIABLE = "ORCHESTRA_MEMBERS_ON_DEVICE"
_GOES_ON, _OVER = "goes on", "over"


@dataclass(frozen=True)
class MemberPlace:
    """A member's newest place: its number, the job that has it and which start of that (None: nobody's, of a
    member that was cancelled), and how it ended (None: it has not).
    """

    number: int
    job: str | None
    start: int
    end: str | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the member waits to be taken again."""
        return self.end == _GOES_ON


def newest_place(run: RunDir, array: int) -> MemberPlace | None:
    """Return a member's newest place in the jobs of an array; None where nobody has taken it. Raises OSError
    where the folder is there and cannot be read.
    """
    matches = [match for name in names_in(run.control) if (match := _NAME.fullmatch(name))]
    number = max((int(match[2]) for match in matches if int(match[1]) == array), default=None)
    if number is None:
        return None
    holder = read_json(run.place(array, number)) or {}
    job, start = holder.get("job"), holder.get("start")
    end = (read_json(run.place_end(array, number)) or {}).get("end")
    return MemberPlace(
        number, job if isinstance(job, str) else None, start if isinstance(start, int) else 0, end
    )


def take_place(run: RunDir, array: int, number: int, job: str | None, start: int = 0) -> bool:
    """Take a member as its `number`-th place; return False when somebody else did. Raises OSError."""
    run.control.mkdir(exist_ok=True)
    return make_once(run.place(array, number), json.dumps({"job": job, "start": start}) + "\n")


def end_place(run: RunDir, array: int, number: int, *, goes_on: bool) -> None:
    """Say that nothing of the member runs in this place any more. Raises OSError."""
    end = {"end": _GOES_ON if goes_on else _OVER}
    make_once(run.place_end(array, number), json.dumps(end) + "\n")
