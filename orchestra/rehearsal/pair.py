"""The two runs of a rehearsal on disk: which undisturbed run one that was hurt is compared with."""

from __future__ import annotations

import json
from dataclasses import dataclass

from orchestra.errors import ConfigError
from orchestra.rundir import RunDir


@dataclass(frozen=True)
class Pair:
    """A rehearsal's runs, and the name of the run that they are short copies of."""

    of: str
    undisturbed: RunDir
    hurt: RunDir


def write_pair(pair: Pair) -> None:
    """Let the hurt run's directory say what it is compared with. Raises OSError."""
    record = {"of": pair.of, "undisturbed": pair.undisturbed.name}
    pair.hurt.rehearsal.write_text(json.dumps(record) + "\n")


def read_pair(hurt: RunDir) -> Pair | None:
    """Return the rehearsal that `hurt` is the hurt run of; None for any other run. Raises ConfigError where
    the record is damaged, or the undisturbed run was removed.
    """
    try:
        record = json.loads(hurt.rehearsal.read_text())
        pair = Pair(str(record["of"]), RunDir(hurt.path.parent / str(record["undisturbed"])), hurt)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{hurt.rehearsal}: cannot be read: {error}; rehearse again") from error
    if not pair.undisturbed.config.is_file():
        raise ConfigError(f"{hurt.name}: {pair.undisturbed.path} is gone, and nothing left to compare with")
    return pair
