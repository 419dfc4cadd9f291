"""Token files mixed by weight: a fixed pattern says which file a position reads, each file keeps its order.

A pattern of SLOTS slots repeats for ever. Every part owns a number of them in proportion to its weight,
spread as evenly as they go, so that every batch has the right mixture and a position is resolved in O(1)
without state. Each part runs through its own epochs: every sample of it exactly once per epoch of that
part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from conf.schema import BlendPart, DataConfig
from orchestra.data.order import Int64, sample_ids
from orchestra.data.source import SampleSource, TokenSamples
from orchestra.data.tokens import TokenFile, open_tokens
from orchestra.errors import DataError

# 2⁴ · 3² · 5⁴: weights with up to four decimals, and thirds, get their share exactly.
SLOTS = 90_000


@dataclass(frozen=True)
class Pattern:
    """Which part each slot belongs to."""

    # int64 [SLOTS]: the part of each slot, and the number of earlier slots of the same part.
    part: Int64
    rank: Int64
    # int64 [parts]: slots of each part.
    counts: Int64


class Blend:
    """Samples of several sources. Ids are unambiguous: those of part k follow those of part k − 1."""

    def __init__(self, parts: Sequence[TokenSamples], weights: Sequence[float]) -> None:
        self._parts = list(parts)
        self._pattern = blend_pattern(weights)
        self._offsets = np.cumsum([0] + [part.num_samples for part in parts])
        self.vocab_size = max(part.vocab_size for part in parts)

    def ids_at(self, position: int, count: int, seed: int) -> Int64:
        pattern = self._pattern
        slots = (position % SLOTS + np.arange(count)) % SLOTS
        of_slot = pattern.part[slots]
        out = np.empty(count, dtype=np.int64)
        for number, part in enumerate(self._parts):
            places = np.flatnonzero(of_slot == number)
            if places.size == 0:
                continue
            block, slot = divmod(position + int(places[0]), SLOTS)
            own_position = block * int(pattern.counts[number]) + int(pattern.rank[slot])
            # A key of its own for each part: files of one size would else be read in the same order.
            own_seed = seed * len(self._parts) + number
            out[places] = self._offsets[number] + sample_ids(
                own_position, places.size, num_samples=part.num_samples, seed=own_seed
            )
        return out

    def read(self, sample_id: int, out: Int64) -> None:
        number = int(np.searchsorted(self._offsets, sample_id, side="right")) - 1
        self._parts[number].read(sample_id - int(self._offsets[number]), out)


def open_blend(data: DataConfig, seq_len: int) -> SampleSource:
    """Open data.path, or the parts of data.blend. Raises DataError for files that cannot be read together."""
    parts = list(data.blend) or [BlendPart(path=str(data.path))]
    files = [open_tokens(part.path, data.cache_dir) for part in parts]
    _check_one_tokenizer(files)
    samples = [TokenSamples(file.tokens, seq_len, file.index.vocab_size, file.name) for file in files]
    if len(samples) == 1:
        return samples[0]
    return Blend(samples, [part.weight for part in parts])


def blend_pattern(weights: Sequence[float]) -> Pattern:
    """Return the pattern of these positive weights; even the smallest gets one slot."""
    counts = _slot_counts(np.asarray(weights, dtype=np.float64))
    part = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    # Slot j of a part with c slots is due at (j + ½) / c of the pattern.
    order = np.argsort((rank + 0.5) / counts[part], kind="stable")
    return Pattern(part[order], rank[order], counts)


def _tokenizer(file: TokenFile) -> str:
    sha256 = file.index.tokenizer_sha256
    return file.index.tokenizer + (f" (sha256 {sha256[:12]}…)" if sha256 else "")


def _slot_counts(weights: npt.NDArray[np.float64]) -> Int64:
    """Share SLOTS out by the largest remainder."""
    exact = weights / weights.sum() * SLOTS
    counts: Int64 = np.maximum(1, np.floor(exact).astype(np.int64))
    missing = SLOTS - int(counts.sum())
    if missing > 0:
        counts[np.argsort(counts - exact, kind="stable")[:missing]] += 1
    else:
        counts[np.argmax(counts)] += missing
    return counts


def _check_one_tokenizer(files: Sequence[TokenFile]) -> None:
    first = files[0]
    for file in files[1:]:
        if file.index.tokenizer_sha256 != first.index.tokenizer_sha256:
            raise DataError(
                f"data.blend: {first.name} was packed with {_tokenizer(first)}, {file.name} with "
                f"{_tokenizer(file)}; pack them with the same one"
            )
