"""Sources of token samples: token files, blends of them, the standard library as text, and plug-ins.

A sample is `seq_len + 1` consecutive tokens: sample i of a token array starts at token i · seq_len, so that
each token is a target exactly once; what is left at the end is dropped.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from conf.schema import BlendPart, DataConfig, Source
from orchestra.data.block_checks import BlockChecks
from orchestra.data.order import Int64, sample_ids
from orchestra.data.plugged_source import open_plugged
from orchestra.data.token_files import (
    BYTES_SEPARATOR,
    TokenIndex,
    check_separator,
    check_size,
    index_of,
    local_copy,
    local_prefix,
    names_of_parts,
    read_index,
    token_file_prefix,
    unlike_parts,
)
from orchestra.errors import DataError
from orchestra.plugins import is_plugin, no_separator
from orchestra.run.metrics_file import DATA

Tokens = npt.NDArray[np.generic]


class SampleSource(Protocol):
    """Samples by id, and the ids by position of the endless training order."""

    vocab_size: int
    # Ids are 0 … num_samples − 1.
    num_samples: int

    def ids_at(self, position: int, count: int, seed: int) -> Int64:
        """Return the sample ids at positions [position, position + count): a pure function."""

    def epochs_at(self, position: int) -> dict[str, float]:
        """Return how often the order has gone through each part of the source before `position`, by the
        part's name; a source that is no blend is one part, called DATA.
        """

    def read(self, sample_id: int, out: Int64) -> None:
        """Write the sample's seq_len + 1 tokens into `out`. Raises DataError for a token that cannot be, and
        for a damaged file.
        """


class TokenSamples:
    """The samples of one array of tokens, in memory or mapped from a file."""

    def __init__(
        self, tokens: Tokens, seq_len: int, vocab_size: int, name: str, checks: BlockChecks | None = None
    ) -> None:
        """`checks` are those of the file that the tokens are mapped from."""
        self._tokens = tokens
        self._checks = checks
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

    def epochs_at(self, position: int) -> dict[str, float]:
        return {DATA: position / self.num_samples}

    def read(self, sample_id: int, out: Int64) -> None:
        start = sample_id * self._seq_len
        stop = start + self._seq_len + 1
        if self._checks is not None:
            self._checks.require(start * self._tokens.itemsize, stop * self._tokens.itemsize)
        out[:] = self._tokens[start:stop]
        # A token beyond the vocabulary would index past the embedding: on a GPU an error without a place.
        if out.max() >= self.vocab_size:
            offset = start + int(np.flatnonzero(out >= self.vocab_size)[0])
            where = f"token {int(self._tokens[offset])} at offset {offset * self._tokens.itemsize}"
            raise DataError(
                f"{self._name}: {where} (token {offset}) is outside the vocabulary of {self.vocab_size}; the "
                "file is damaged or its index belongs to another file: pack it again"
            )


@dataclass(frozen=True)
class TokenFile:
    """An open token file: the tokens [num_tokens] as a read-only view of the mapped file, and the checks of
    its blocks, which come before they are read.
    """

    name: str
    index: TokenIndex
    tokens: Tokens
    checks: BlockChecks


def open_tokens(path: str, cache_dir: str | None = None) -> TokenFile:
    """Open the token file at `path`: PREFIX, PREFIX.bin, or any fsspec URL of one.

    A remote file is copied once per node into `cache_dir` (null: the user's cache folder) and checked on
    the way; ranks that need the same file wait for that copy. Raises DataError that names the file and,
    where there is one, the offset.
    """
    prefix = token_file_prefix(path)
    local = local_prefix(prefix)
    if local is None:
        local = local_copy(prefix, cache_dir)
    index = read_index(Path(f"{local}.json"))
    binary = Path(f"{local}.bin")
    try:
        check_size(binary.stat().st_size, index, str(binary))
        if index.num_tokens == 0:
            raise DataError(f"{binary}: holds no tokens; pack it again")
        mapped = np.memmap(binary, dtype=np.dtype(index.dtype).newbyteorder("<"), mode="r")
    except FileNotFoundError as error:
        raise DataError(f"{binary}: no such file beside its index; copy it again or pack again") from error
    except OSError as error:
        raise DataError(f"{binary}: cannot be opened ({error.strerror or error})") from error
    # Slices of a memmap carry Python attributes along; those of a plain view of it cost a third.
    name = f"{prefix}.bin"
    return TokenFile(name, index, mapped.view(np.ndarray), BlockChecks(binary, name, index))


# Token files mixed by weight: which file a position reads is computed, and each file keeps its own order.
#
# A binary tree halves the list of parts. Of the first p positions at a node, round(p · left weight ÷ weight
# of both) belong to its left side, so that both sides see a contiguous range of positions of their own, down
# to the parts. A position is resolved in O(1) without state, shares are right to one sample for each level of
# the tree at every moment, and each part runs through its own epochs: every sample of it exactly once per
# epoch of that part.


# Weights become whole numbers of about this sum: their products with the positions of a batch fit in int64.
_RESOLUTION = 1 << 30


class Blend:
    """Samples of several sources. Ids are unambiguous: those of part k follow those of part k − 1.

    `weights` are positive and need not sum to 1; a share below 1e-9 of the whole counts as that much.
    """

    def __init__(
        self, parts: Sequence[TokenSamples], weights: Sequence[float], names: Sequence[str] = ()
    ) -> None:
        """`names` are the parts' own; without them they are numbers."""
        self._parts = list(parts)
        self.names = list(names) or [str(number) for number in range(len(parts))]
        self._weights = [max(1, round(weight / sum(weights) * _RESOLUTION)) for weight in weights]
        self._offsets = np.cumsum([0] + [part.num_samples for part in parts])
        self.num_samples = int(self._offsets[-1])
        self.vocab_size = max(part.vocab_size for part in parts)

    def ids_at(self, position: int, count: int, seed: int) -> Int64:
        ids = np.empty(count, dtype=np.int64)
        self._fill(ids, np.arange(count), position, (0, len(self._parts)), seed)
        return ids

    def epochs_at(self, position: int) -> dict[str, float]:
        parts = zip(self.names, self._weights, self._parts, strict=True)
        whole = sum(self._weights)
        return {name: position * weight / whole / part.num_samples for name, weight, part in parts}

    def read(self, sample_id: int, out: Int64) -> None:
        number = int(self.parts_of(sample_id))
        self._parts[number].read(sample_id - int(self._offsets[number]), out)

    def parts_of(self, ids: Int64 | int) -> npt.NDArray[np.intp]:
        """Return the number of the part that each sample is of, in the shape of `ids`."""
        return np.searchsorted(self._offsets, ids, side="right") - 1

    def _fill(
        self, ids: Int64, places: npt.NDArray[np.intp], position: int, among: tuple[int, int], seed: int
    ) -> None:
        """Fill ids[places], the positions from `position` on of the parts `among` (first, end)."""
        first, end = among
        if places.size == 0:
            return
        if end - first == 1:
            # Parts of the same size must not go through their samples in the same order.
            digest = hashlib.blake2b(f"{seed}/{first}".encode(), digest_size=8).digest()
            size, own_seed = self._parts[first].num_samples, int.from_bytes(digest)
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
    parts = _parts(data)
    files = [open_tokens(part.path, data.cache_dir) for part in parts]
    if problem := unlike_parts([(file.name, file.index) for file in files]):
        raise DataError(problem)
    samples = [
        TokenSamples(file.tokens, seq_len, file.index.vocab_size, file.name, file.checks) for file in files
    ]
    if len(samples) == 1:
        return samples[0]
    return Blend(samples, [part.weight for part in parts], names_of_parts(parts))


def _parts(data: DataConfig) -> list[BlendPart]:
    return list(data.blend) or [BlendPart(path=str(data.path))]


def _split(position: int, count: int, left: int, whole: int) -> tuple[int, npt.NDArray[np.bool_]]:
    """Return how many positions before `position` go left, and which [count] of those from it on do."""
    # Whole numbers of Python: positions × weights may pass 64 bits; inside the batch they cannot.
    before, rest = divmod(position * left + whole // 2, whole)
    return before, np.diff((rest + np.arange(count + 1, dtype=np.int64) * left) // whole) > 0


# The running interpreter's own library as text: real prose and code on every machine, nothing to download.
#
# All *.py files of the standard library in the order of their names, as bytes, BYTES_SEPARATOR after each.
# Tests, site-packages and IDLE are left out. The text depends on the version of Python, so a run resumed
# under another one would see other samples. One file in twenty, chosen by its name alone, is held out: no run
# trains on it, whether it evaluates or not.


VOCAB_SIZE = 257

_LEFT_OUT = {"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages", "__pycache__"}


# Of so many files one is held out.
_HELD_OUT_OF = 20


def is_held_out(name: str) -> bool:
    """Whether the file of this path below the library is kept from training, on every machine alike."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % _HELD_OUT_OF == 0


def stdlib_files(*, held_out: bool = False) -> list[Path]:
    """Return the library's source files, or those of it that are held out, sorted by their path below the
    library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, children, names in os.walk(root):
        children[:] = [child for child in children if child not in _LEFT_OUT]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    by_name = {path.relative_to(root).as_posix(): path for path in files}
    return [by_name[name] for name in sorted(by_name) if is_held_out(name) is held_out]


def num_stdlib_tokens() -> int:
    """Return how many tokens `stdlib_tokens` makes for training, by the sizes of the files."""
    return sum(path.stat().st_size + 1 for path in stdlib_files())


def stdlib_tokens(*, held_out: bool = False) -> npt.NDArray[np.uint16]:
    """Return the text as tokens (uint16): bytes, with BYTES_SEPARATOR after each file. About 11 million, and
    half a million that are held out.

    Raises DataError where the library cannot be read.
    """
    parts = []
    separator = np.array([BYTES_SEPARATOR], dtype=np.uint16)
    try:
        for path in stdlib_files(held_out=held_out):
            parts += [np.frombuffer(path.read_bytes(), dtype=np.uint8).astype(np.uint16), separator]
    except OSError as error:
        raise DataError(f"data.source=stdlib: cannot read {error.filename} ({error.strerror})") from error
    if not parts:
        folder = sysconfig.get_path("stdlib")
        raise DataError(f"data.source=stdlib: this Python has no *.py files in {folder}; use data=tokens")
    return np.concatenate(parts)


def open_source(data: DataConfig, seq_len: int, *, held_out: bool = False) -> SampleSource:
    """Open the source that a checked configuration names; of the standard library the files to train on, or
    those that are `held_out`. Raises DataError where it cannot be read.
    """
    if data.source == Source.stdlib:
        tokens = stdlib_tokens(held_out=held_out)
        return TokenSamples(tokens, seq_len, VOCAB_SIZE, "data.source=stdlib")
    if is_plugin(data.source):
        return open_plugged(data, seq_len)
    return open_blend(data, seq_len)


def separator_of(data: DataConfig, seq_len: int) -> int:
    """Return the token that ends each document. Reads an index and no tokens: parts that differ are refused
    when the source is opened; a plug-in is made to be asked. Raises DataError where no token can be it,
    ConfigError where the plug-in cannot be had.
    """
    if data.source == Source.stdlib:
        return BYTES_SEPARATOR
    if is_plugin(data.source):
        named = open_plugged(data, seq_len).separator_id
        if named is None:
            raise DataError(no_separator(data.source))
        return named
    path = _parts(data)[0].path
    index = index_of(path)
    check_separator(index, path)
    return index.separator_id
