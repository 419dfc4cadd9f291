"""`orchestra profile RUN`: ask a run that trains for a trace of its next steps; show where the time goes.

It writes a request into the run's `control/`; the ranks agree on the steps, trace them and go on. Each traced
rank leaves a Chrome trace, a table, and on a GPU the allocator's history, in the run's `profile/`.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from orchestra.cli.text.describe import invocation, shown
from orchestra.cli.text.resolve import add_directory_option, resolve
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from orchestra.recovery.history import Attempt, newest_attempt
from orchestra.report.run_state import name_of, read_state
from orchestra.run.control.profile_requests import MOST_RANKS, MOST_STEPS, ProfileRequest, write_request
from orchestra.run.events import is_whole, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.permissions import who_may_write
from orchestra.run.record import RunPhase
from orchestra.sizes.step_shares import read_shares

_POLL_S = 0.5
# Longer than nearly any few steps take; a rank whose disk is full leaves no word of its trace.
_WAIT_S = 600.0
_EXPLAINED = """\
  orchestra profile first                     three steps of rank 0
  orchestra profile first --steps 5 --ranks 0,13
  orchestra profile first --ranks all --no-wait

Open the .json.gz in ui.perfetto.dev, and a GPU's -memory.pickle in pytorch.org/memory_viz. The steps that are
traced are slower, the others are not.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name, unique start of one, path, or SWEEP/3")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps to trace (%(default)s)")
    parser.add_argument("--ranks", default="0", metavar="R", help="such as 0,13, or all (%(default)s)")
    parser.add_argument("--no-wait", action="store_true", help="ask, and do not wait for the trace")
    parser.add_argument("--dry-run", action="store_true", help="say what would be asked; ask nothing")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_directory_option(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Ask, wait for the trace, and return 0; 1 where the attempt or ten minutes end before it is there, or
    where a rank could not write its own.
    """
    chosen = resolve(arguments.run, arguments.dir)
    attempt = _training(chosen)
    sizes = [event.get("world_size") for event in attempt.named("training_started")]
    ranks = _ranks(arguments.ranks, sizes[-1] if is_whole(sizes[-1]) else None)
    if not 1 <= arguments.steps <= MOST_STEPS:
        raise ConfigError(f"--steps {arguments.steps}: expected 1 to {MOST_STEPS}")
    who = "all ranks" if not ranks else f"ranks {', '.join(map(str, ranks))}"
    if arguments.dry_run:
        print(f"{chosen.name}: would ask {who} of attempt {attempt.number} to trace {arguments.steps} steps")
        return EXIT_DONE
    try:
        asked = write_request(chosen, attempt.number, arguments.steps, ranks)
    except PermissionError as error:
        words = f"{chosen.name} could not be asked for traces: {chosen.control}: {error.strerror}"
        raise ConfigError(f"{words}; {who_may_write(chosen.path)}") from error
    if arguments.no_wait:
        print(f"asked {who}; the traces will lie in {shown(chosen.profile)}")
        return EXIT_DONE
    wanted = set(ranks) or set(range(sizes[-1] if is_whole(sizes[-1]) else 1))
    deadline = time.monotonic() + _WAIT_S
    while True:
        traced = _traced(chosen, asked)
        if wanted <= {event["rank"] for event in traced}:
            break
        if (problem := _problem(chosen, asked, deadline)) is not None:
            print(problem)
            return EXIT_FAILED
        time.sleep(_POLL_S)
    unwritten = [event for event in traced if event.get("problem")]
    for event in unwritten:
        words = f"rank {event['rank']} could not write its trace: {event['problem']}"
        print(f"{words}; make room there, and ask again", file=sys.stderr)
    if len(unwritten) == len(traced):
        return EXIT_FAILED
    _tell(chosen, [event for event in traced if event not in unwritten], arguments)
    return EXIT_FAILED if unwritten else EXIT_DONE


def _training(run: RunDir) -> Attempt:
    """Return the attempt that trains. Raises ConfigError where none does."""
    state = read_state(run, time.time())
    attempt = newest_attempt(read_events(run))
    if state.state is not RunPhase.running or attempt is None:
        raise ConfigError(
            f"{state.name} is {state.state}: only a run that trains can be traced; before it starts, "
            "train.profile.enabled=true traces the steps train.profile.steps"
        )
    if attempt.training_started is None:
        raise ConfigError(f"{state.name} has not begun to train in attempt {attempt.number}; try again then")
    return attempt


def _ranks(text: str, world_size: int | None) -> tuple[int, ...]:
    """Return the ranks that --ranks means; none: all. Raises ConfigError."""
    if text == "all":
        return ()
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words) or len(words) > MOST_RANKS:
        raise ConfigError(f"--ranks {text}: expected up to {MOST_RANKS} ranks such as 0,13, or all")
    ranks = tuple(sorted({int(word) for word in words}))
    if world_size is not None and ranks[-1] >= world_size:
        raise ConfigError(f"--ranks {text}: the run has the ranks 0 to {world_size - 1}")
    return ranks


def _problem(run: RunDir, asked: ProfileRequest, deadline: float) -> str | None:
    """Return why it is no longer waited for; None while it is."""
    newest = newest_attempt(read_events(run, ("attempt_started",)))
    if read_state(run, time.time()).state is not RunPhase.running:
        return f"{name_of(run)} ended before it was traced; `{invocation('why', run)}` tells why"
    if newest is not None and newest.number != asked.attempt:
        return f"attempt {asked.attempt} ended before it was traced, and {newest.number} trains; ask again"
    if time.monotonic() > deadline:
        return f"no trace after {_WAIT_S / 60:.0f} minutes; what comes later will lie in {shown(run.profile)}"
    return None


def _traced(run: RunDir, asked: ProfileRequest) -> list[Record]:
    """Return what the ranks wrote when the traces that were asked for were there."""
    events = read_events(run, ("profiled",), asked.attempt)
    return [event for event in events if event["event"] == "profiled" and event.get("token") == asked.token]


def _tell(run: RunDir, traced: Sequence[Record], arguments: Namespace) -> None:
    stems = [
        f"rank-{event['rank']:05d}-steps-{event.get('first_step')}-{event.get('step')}"
        for event in sorted(traced, key=lambda event: int(event["rank"]))
    ]
    patterns = [stem + ending for stem in stems for ending in (".*", "-memory*")]
    files = sorted(path for pattern in patterns for path in run.profile.glob(pattern))
    shares = read_shares(run.profile)
    if arguments.json:
        record = None if shares is None else shares.record()
        print(
            json.dumps({"name": run.name, "files": [str(path) for path in files], "shares": record}, indent=2)
        )
        return
    if shares is not None:
        print("\n".join(shares.table()))
    for path in files:
        print(shown(path))
