"""Token files mixed by weight: which file a position reads is computed, and each file keeps its own order.

A binary tree halves the list of parts. Of the first p positions at a node, round(p · left weight ÷ weight
of both) belong to its left side, so that both sides see a contiguous range of positions of their own, down
to the parts. A position is resolved in O(1) without state, shares are right to one sample for each level of
the tree at every moment, and each part runs through its own epochs: every sample of it exactly once per
epoch of that part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from conf.schema import BlendPart, DataConfig
from orchestra.data.order import Int64, sample_ids
from orchestra.data.source import SampleSource, TokenSamples
from orchestra.data.tokens import TokenFile, open_tokens
from orchestra.errors import DataError

# Weights become whole numbers of about this sum: their products with the positions of a batch fit in int64.
_RESOLUTION = 1 << 30


class Blend:
    """Samples of several sources. Ids are unambiguous: those of part k follow those of part k − 1.

    `weights` are positive and need not sum to 1; a share below 1e-9 of the whole counts as that much.
    """

    def __init__(self, parts: Sequence[TokenSamples], weights: Sequence[float]) -> None:
        self._parts = list(parts)
        self._weights = [max(1, round(weight / sum(weights) * _RESOLUTION)) for weight in weights]
        self._offsets = np.cumsum([0] + [part.num_samples for part in parts])
        self.vocab_size = max(part.vocab_size for part in parts)

    def ids_at(self, position: int, count: int, seed: int) -> Int64:
        ids = np.empty(count, dtype=np.int64)
        self._fill(ids, np.arange(count), position, (0, len(self._parts)), seed)
        return ids

    def read(self, sample_id: int, out: Int64) -> None:
        number = int(np.searchsorted(self._offsets, sample_id, side="right")) - 1
        self._parts[number].read(sample_id - int(self._offsets[number]), out)

    def _fill(
        self, ids: Int64, places: npt.NDArray[np.intp], position: int, among: tuple[int, int], seed: int
    ) -> None:
        """Fill ids[places], the positions from `position` on of the parts `among` (first, end)."""
        first, end = among
        if places.size == 0:
            return
        if end - first == 1:
            size, own_seed = self._parts[first].num_samples, _seed_of(seed, first)
            own = sample_ids(position, places.size, num_samples=size, seed=own_seed)
            ids[places] = self._offsets[first] + own
            return
        middle = (first + end) // 2
        left, whole = sum(self._weights[first:middle]), sum(self._weights[first:end])
        before, is_left = _split(position, places.size, left, whole)
        self._fill(ids, places[is_left], before, (first, middle), seed)
        self._fill(ids, places[~is_left], position - before, (middle, end), seed)


def open_blend(data: DataConfig, seq_len: int) -> SampleSource:
    """Open data.path, or the parts of data.blend. Raises DataError for files that cannot be read together."""
    parts = list(data.blend) or [BlendPart(path=str(data.path))]
    files = [open_tokens(part.path, data.cache_dir) for part in parts]
    _check_one_tokenizer(files)
    samples = [TokenSamples(file.tokens, seq_len, file.index.vocab_size, file.name) for file in files]
    if len(samples) == 1:
        return samples[0]
    return Blend(samples, [part.weight for part in parts])


def _split(position: int, count: int, left: int, whole: int) -> tuple[int, npt.NDArray[np.bool_]]:
    """Return how many positions before `position` go left, and which [count] of those from it on do."""
    # Whole numbers of Python: positions × weights may pass 64 bits; inside the batch they cannot.
    before, rest = divmod(position * left + whole // 2, whole)
    return before, np.diff((rest + np.arange(count + 1, dtype=np.int64) * left) // whole) > 0


def _seed_of(seed: int, number: int) -> int:
    """Parts of the same size must not go through their samples in the same order."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest())


def _check_one_tokenizer(files: Sequence[TokenFile]) -> None:
    """A token must mean the same in every part."""
    first = files[0]
    for file in files[1:]:
        if _tokenizer(file) != _tokenizer(first):
            raise DataError(
                f"data.blend: {first.name} was packed with {_tokenizer(first)}, {file.name} with "
                f"{_tokenizer(file)}; pack them with the same one"
            )


def _tokenizer(file: TokenFile) -> str:
    index = file.index
    sha256 = f"sha256 {index.tokenizer_sha256[:16]}, " if index.tokenizer_sha256 else ""
    return f"{'tokenizer.json' if sha256 else index.tokenizer} ({sha256}separator {index.separator_id})"
