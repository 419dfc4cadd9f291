"""A source of data of somebody else's (`data.source=package.module:name`): samples by their index.

The order in which a run reads them is orchestra's own, and so a run that goes on needs no state of the
source. Called by `orchestra.data.source`, and by the process that looks at plug-ins before anything starts.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from conf.schema import DataConfig
from orchestra.data.order import Int64, sample_ids
from orchestra.errors import ConfigError, DamagedDataError, DataError
from orchestra.plugins import Plugin, loaded, one_line, other_source, source_plugin
from orchestra.run.metrics_file import DATA


class Samples(Protocol):
    """What a plug-in returns. A sample is seq_len + 1 tokens, 0 to vocab_size - 1, of any kind of integers;
    the same ones whenever its index is asked for. It may name the token that ends each document as
    `separator_id`.
    """

    num_samples: int
    vocab_size: int
    # Which data these are, in words: other words are other data.
    identity: str

    def sample(self, index: int) -> Any:
        """Return the tokens of the sample `index`, 0 to num_samples - 1. Called by one thread at a time."""


class PluggedSamples:
    """The samples of a plug-in, each checked when it is read."""

    def __init__(self, source: Samples, seq_len: int, said: str) -> None:
        """`said`: how the configuration names the plug-in. Raises ConfigError where it is no source."""
        for name in ("num_samples", "vocab_size", "identity", "sample"):
            if not hasattr(source, name):
                raise ConfigError(
                    f"{said} returned a {type(source).__name__} without {name}; a source has num_samples, "
                    "vocab_size, identity and sample(index)"
                )
        for name in ("num_samples", "vocab_size"):
            number = getattr(source, name)
            if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
                raise ConfigError(f"{said}: {name}={number!r}; expected a whole number, 1 or more")
        if not isinstance(source.identity, str) or not source.identity.strip():
            raise ConfigError(f"{said}: identity={source.identity!r}; expected words that name the data")
        self._source, self._seq_len, self._said = source, seq_len, said
        self.num_samples, self.vocab_size = int(source.num_samples), int(source.vocab_size)
        # The token that ends each document; None: the source names none.
        self.separator_id = self._separator_id(getattr(source, "separator_id", None))

    def _separator_id(self, named: Any) -> int | None:
        if named is None:
            return None
        is_number = isinstance(named, int | np.integer) and not isinstance(named, bool)
        if not is_number or not 0 <= named < self.vocab_size:
            raise ConfigError(
                f"{self._said}: separator_id={named!r}; expected a token from 0 to {self.vocab_size - 1}, "
                "or None"
            )
        return int(named)

    @property
    def identity(self) -> str:
        """Which samples these are, in words."""
        return f"{self._source.identity}, {self.num_samples} samples of {self.vocab_size} words"

    def ids_at(self, position: int, count: int, seed: int) -> Int64:
        return sample_ids(position, count, num_samples=self.num_samples, seed=seed)

    def epochs_at(self, position: int) -> dict[str, float]:
        return {DATA: position / self.num_samples}

    def read(self, sample_id: int, out: Int64) -> None:
        said = f"{self._said}: sample({sample_id})"
        try:
            tokens = np.asarray(self._source.sample(sample_id))
        except Exception as error:
            raise DataError(f"{said} failed: {one_line(error)}") from error
        if tokens.shape != (self._seq_len + 1,) or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{said} returned {list(tokens.shape)} of {tokens.dtype}; return train.seq_len + 1 = "
                f"{self._seq_len + 1} integers"
            )
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= self.vocab_size:
            raise DataError(
                f"{said} has the token {least if least < 0 else most}; its vocab_size={self.vocab_size} "
                f"allows 0 to {self.vocab_size - 1}"
            )
        out[:] = tokens


def open_plugged(data: DataConfig, seq_len: int) -> PluggedSamples:
    """Open the plug-in that a section of the configuration names. Raises ConfigError where it is none,
    DamagedDataError where it has other data than the run began with.
    """
    samples = samples_of(source_plugin(data.source, data.source_options, "data"), seq_len)
    if data.source_identity not in (None, samples.identity):
        raise DamagedDataError(other_source(data, samples.identity))
    return samples


def samples_of(plugin: Plugin, seq_len: int) -> PluggedSamples:
    """Make a plug-in's source. Raises ConfigError where that fails, or it is none."""
    said = f"{plugin.key}={plugin.target}"
    make = loaded(plugin)
    try:
        source = make(seq_len=seq_len)
    except Exception as error:
        raise ConfigError(f"{said}: making it failed: {one_line(error)}") from error
    return PluggedSamples(source, seq_len, said)
