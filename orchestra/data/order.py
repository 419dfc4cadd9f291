"""The order of samples: a keyed permutation of each epoch, computed where it is needed; and its record.

Position p of the endless sequence of samples lies in epoch p // N at index p % N, and the index goes
through a permutation of 0 … N−1 keyed by (seed, epoch). Any position is found in O(1) time and memory,
every sample comes exactly once per epoch, and neither the world size nor the batch size plays a part.

The permutation is a balanced Feistel network over the smallest even number of bits that holds N, with cycle
walking for the values above N (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
There is no index array.
"""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import numpy.typing as npt

from orchestra.run.files import JsonLinesWriter, Record, read_json_lines
from orchestra.run.paths import RunDir
from orchestra.run.run_lineage import read_lineage

Int64 = npt.NDArray[np.int64]
_UInt64 = npt.NDArray[np.uint64]

# Few bits per half need more rounds than the four of theory to look random; this many pass the tests down
# to N = 2.
_ROUNDS = 8


def sample_ids(position: int, count: int, *, num_samples: int, seed: int) -> Int64:
    """Return the ids (int64, in 0 … num_samples − 1) at positions [position, position + count).

    Raises ValueError for an empty source or a negative position.
    """
    if num_samples < 1 or position < 0:
        raise ValueError(f"num_samples={num_samples} and position={position}: need at least one and zero")
    parts = []
    while count > 0:
        epoch, index = divmod(position, num_samples)
        taken = min(count, num_samples - index)
        indices = np.arange(index, index + taken, dtype=np.uint64)
        parts.append(permuted(indices, num_samples, _round_keys(seed, epoch)))
        position, count = position + taken, count - taken
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)


def permuted(indices: _UInt64, size: int, keys: _UInt64) -> _UInt64:
    """Return the images of `indices` (uint64) under the permutation of 0 … size − 1 that the keys name."""
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    out = _feistel(indices, half, keys)
    outside = np.flatnonzero(out >= np.uint64(size))
    while outside.size:
        out[outside] = _feistel(out[outside], half, keys)
        outside = outside[out[outside] >= np.uint64(size)]
    return out


def _feistel(values: _UInt64, half: np.uint64, keys: _UInt64) -> _UInt64:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right, key) & mask)
    return (left << half) | right


def _mixed(values: _UInt64, key: np.uint64) -> _UInt64:
    """splitmix64's finaliser after a keyed offset (Steele, Lea and Flood, OOPSLA 2014)."""
    out = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    out ^= out >> np.uint64(30)
    out *= np.uint64(0xBF58476D1CE4E5B9)
    out ^= out >> np.uint64(27)
    out *= np.uint64(0x94D049BB133111EB)
    out ^= out >> np.uint64(31)
    return out


def _round_keys(seed: int, epoch: int) -> _UInt64:
    digest = hashlib.shake_256(f"orchestra order\x00{seed}\x00{epoch}".encode()).digest(8 * _ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


# The record of which samples each step trained on (`data.ledger=true`), to prove exactly-once.


class Ledger:
    """Appends one rank's sample ids to <run>/samples/rank-00000.jsonl, a line for each step."""

    def __init__(self, run: RunDir, rank: int, attempt: int) -> None:
        self._file = JsonLinesWriter(run.samples / f"rank-{rank:05d}.jsonl")
        self._attempt = attempt

    def write(self, step: int, sample_ids: Int64) -> None:
        """Record the ids [A, B] that this rank trained on in `step`."""
        record = {"step": step, "attempt": self._attempt, "sample_ids": sample_ids.tolist()}
        self._file.write_or_keep(record)


def read_ledger(run: RunDir) -> dict[int, list[int]]:
    """Return the ids of each step that counts, over all ranks.

    Those count that are on the run's line. A later attempt makes void what earlier ones recorded from its
    first step on, on whatever ranks: the run was rolled back to before that step, and may have gone on with
    fewer.
    """
    lineage = read_lineage(run)
    by_attempt: dict[int, list[Record]] = {}
    for file in sorted(run.samples.glob("rank-*.jsonl")):
        for record in read_json_lines(file):
            if lineage.is_on_line(record["step"], record["attempt"]):
                by_attempt.setdefault(record["attempt"], []).append(record)
    samples: dict[int, list[int]] = {}
    first_void: float = math.inf
    for _, records in sorted(by_attempt.items(), reverse=True):
        for record in records:
            if record["step"] < first_void:
                samples.setdefault(record["step"], []).extend(itertools.chain(*record["sample_ids"]))
        first_void = min(first_void, *(record["step"] for record in records))
    return dict(sorted(samples.items()))
