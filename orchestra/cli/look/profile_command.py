"""`orchestra profile RUN`: ask a run that trains for a trace of its next steps; show where the time goes.

It writes a request into the run's `control/`; the ranks agree on the steps, trace them and go on. Each traced
rank leaves a Chrome trace, a table, and on a GPU the allocator's history, in the run's `profile/`.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from orchestra.cli.text.describe import invocation, shown
from orchestra.cli.text.resolve import add_directory_option, resolve
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from orchestra.recovery.history import Attempt, newest_attempt
from orchestra.report.run_state import read_state
from orchestra.run.control.profile_requests import MOST_RANKS, MOST_STEPS, ProfileRequest, write_request
from orchestra.run.events import is_whole, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.sizes.step_shares import read_shares

_POLL_S = 0.5
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
    """Ask, wait for the trace, and return 0; 1 where the run ended before it was traced."""
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
    asked = write_request(chosen, attempt.number, arguments.steps, ranks)
    if arguments.no_wait:
        print(f"asked {who}; the traces will lie in {shown(chosen.profile)}")
        return EXIT_DONE
    wanted = set(ranks) or set(range(sizes[-1] if is_whole(sizes[-1]) else 1))
    while len(traced := _traced(chosen, asked)) < len(wanted):
        if read_state(chosen, time.time()).state is not RunPhase.running:
            print(f"{chosen.name} ended before it was traced; `{invocation('why', chosen)}` tells why")
            return EXIT_FAILED
        time.sleep(_POLL_S)
    _tell(chosen, traced, arguments)
    return EXIT_DONE


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


def _traced(run: RunDir, asked: ProfileRequest) -> list[Record]:
    """Return what the ranks wrote when their traces of the attempt were there, since the request."""
    return [
        event
        for event in read_events(run, ("profiled",))
        if event["event"] == "profiled" and event["attempt"] == asked.attempt and event["time"] >= asked.time
    ]


def _tell(run: RunDir, traced: Sequence[Record], arguments: Namespace) -> None:
    stems = [
        f"rank-{event['rank']:05d}-steps-{event.get('first_step')}-{event.get('step')}"
        for event in sorted(traced, key=lambda event: int(event["rank"]))
    ]
    files = sorted(path for stem in stems for path in run.profile.glob(f"{stem}*"))
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
