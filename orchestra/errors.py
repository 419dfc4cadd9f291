"""The exceptions that end a command, and the exit code of each. Standard library only.

OrchestraError            1   anything below; catch this to catch all
├── ConfigError           2   a configuration or a command line is wrong; nothing was started
├── LaunchError           1   processes could not be started or kept
│   └── RivalError       93   another job trains the run, or is to train it
├── DataError             1   a data file cannot be read as what it claims to be
│   ├── DataOutageError   1   the storage of a data file does not answer
│   └── DamagedDataError 93   bytes of a data file are not those that were packed
├── TrainingError         1   training cannot go on
│   ├── OutOfMemoryError  1   a rank's memory did not suffice; 93 where no step had gone well
│   ├── NonFiniteError   93   the loss or gradient stays non-finite: starting again would not help
│   ├── LossSpikeError   93   the loss rose far above the last ones, and the policy is to stop
│   ├── RollBackError     1   training is to go on from an earlier step: bad losses, or a broken device
│   ├── UnsavedError      1   the last step was trained, and its checkpoint could not be written anywhere
│   ├── StorageOutageError 1  storage did not answer for as long as an attempt's begin waits for it
│   └── UnusableCheckpointError   93   what lies in the run's place of checkpoints is not the run's own
└── StopRequested        75   stopped on request; to be continued
"""

from __future__ import annotations

from collections.abc import Sequence

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
# Of `orchestra watch`: an alert fires; none does, but not all could be seen.
EXIT_ALERT = 3
EXIT_UNSEEN = 4
EXIT_STOPPED = 75
EXIT_DO_NOT_RESTART = 93
EXIT_INTERRUPTED = 130


class OrchestraError(Exception):
    """Any failure that orchestra explains: the message says what was found, what was expected and
    what to do.
    """

    exit_code = EXIT_FAILED


class ConfigError(OrchestraError):
    """Raised before anything is started; carries every violation found, not only the first."""

    exit_code = EXIT_USAGE

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class LaunchError(OrchestraError):
    """Raised when processes cannot be started or kept on a machine."""


class RivalError(LaunchError):
    """Raised in a job that must not train its run because another one does, or is to."""

    exit_code = EXIT_DO_NOT_RESTART


class DataError(OrchestraError):
    """Raised when a data file is missing, torn or not what its index says; names the file and the offset."""


class DataOutageError(DataError):
    """Raised when the storage of a data file does not answer, which says nothing of the file."""


class DamagedDataError(DataError):
    """Raised when a block of a token file has another checksum than its index says, as it would again."""

    exit_code = EXIT_DO_NOT_RESTART


class TrainingError(OrchestraError):
    """Raised in a worker when training cannot go on."""


class NonFiniteError(TrainingError):
    """Raised when the loss or gradient is non-finite and the policy is to stop, or skipping did not help."""

    exit_code = EXIT_DO_NOT_RESTART


class LossSpikeError(TrainingError):
    """Raised when the loss rises far above the last ones and the policy is to stop."""

    exit_code = EXIT_DO_NOT_RESTART


class RollBackError(TrainingError):
    """Raised when training is to go on from an earlier step; the next attempt does, if the policy lets it."""


class UnsavedError(TrainingError):
    """Raised when the last state of an attempt could be written nowhere."""


class StorageOutageError(TrainingError):
    """Raised when an attempt cannot begin because storage does not answer. Nothing says that a checkpoint is
    damaged, or that the code is wrong: the next attempt may find it there again.
    """


class UnusableCheckpointError(TrainingError):
    """Raised when a run finds checkpoints it must not take, or misses those it must continue from."""

    exit_code = EXIT_DO_NOT_RESTART


class StopRequested(OrchestraError):  # noqa: N818  a request, not an error
    """Raised in a worker that stopped because it was asked to; the run is to be continued."""

    exit_code = EXIT_STOPPED
