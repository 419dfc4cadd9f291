"""What the loader asks of a source of samples. It imports no torch.

A sample is `seq_len + 1` consecutive tokens: sample i of a token array starts at token i · seq_len, so that
each token is a target exactly once; what is left at the end is dropped.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from orchestra.data.order import Int64, sample_ids
from orchestra.errors import DataError

Tokens = npt.NDArray[np.generic]


class SampleSource(Protocol):
    """Samples by id, and the ids by position of the endless training order."""

    vocab_size: int

    def ids_at(self, position: int, count: int, seed: int) -> Int64:
        """Return the sample ids at positions [position, position + count): a pure function."""

    def read(self, sample_id: int, out: Int64) -> None:
        """Write the sample's seq_len + 1 tokens into `out`. Raises DataError for a token that cannot be."""


class TokenSamples:
    """The samples of one array of tokens, in memory or mapped from a file."""

    def __init__(self, tokens: Tokens, seq_len: int, vocab_size: int, name: str) -> None:
        self._tokens = tokens
        self._seq_len = seq_len
        self._name = name
        self.vocab_size = vocab_size
        self.num_samples = (len(tokens) - 1) // seq_len
        if self.num_samples < 1:
            raise DataError(
                f"{name}: {len(tokens)} tokens hold no sample of train.seq_len={seq_len} tokens and one "
                "target; give it more text or lower train.seq_len"
            )

    def ids_at(self, position: int, count: int, seed: int) -> Int64:
        return sample_ids(position, count, num_samples=self.num_samples, seed=seed)

    def read(self, sample_id: int, out: Int64) -> None:
        start = sample_id * self._seq_len
        out[:] = self._tokens[start : start + self._seq_len + 1]
        # A token beyond the vocabulary would index past the embedding: on a GPU an error without a place.
        if out.max() >= self.vocab_size:
            offset = start + int(np.flatnonzero(out >= self.vocab_size)[0])
            found = f"token {int(self._tokens[offset])} at offset {offset * self._tokens.itemsize}"
            raise DataError(
                f"{self._name}: {found} (token {offset}) is outside the vocabulary of {self.vocab_size}; the "
                "file is damaged or its index belongs to another file: pack it again"
            )
