"""A whole run under a umask that hides nothing: of all that it leaves, others can write nothing."""

from __future__ import annotations

import stat
from pathlib import Path

from commands import TINY, start_run


def test_others_can_write_nothing_of_a_run_whatever_the_umask_is(folder: Path) -> None:
    steps = ("train.steps=3", "checkpoint.every_steps=2", "data.ledger=true", "cluster.gpus_per_node=2")
    # Another attempt too: by the same agent, its ranks forked from what it started first.
    fault = "recovery.inject=[{at_step: 2, rank: 1}]"
    bare = ("sh", "-c", 'umask 000; exec "$@"', "sh")
    started = start_run(folder, "bare", *TINY, *steps, fault, through=bare)
    started.end(0)
    paths = [path for path in (started.run.path, *started.run.path.rglob("*")) if not path.is_symlink()]
    assert {"checkpoints", "control", "events", "logs", "samples"} <= {path.name for path in paths}
    assert [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o022] == []
