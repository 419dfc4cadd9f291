"""The checksums of a checkpoint: xxHash's XXH3, 64 bits for a chunk and 128 for a file, as lower-case hex.

They find accidents, not forgers. `xxhsum -H128 FILE` prints the checksum of a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import xxhash

Buffer: TypeAlias = "bytes | bytearray | memoryview"


# Fed while the bytes pass: `update` takes the next ones, `hexdigest` is the checksum of what passed so far.
ChunkChecksum = xxhash.xxh3_64
FileChecksum = xxhash.xxh3_128


def of_chunk(content: Buffer) -> str:
    """Return the checksum of a chunk's bytes."""
    return xxhash.xxh3_64_hexdigest(content)


def of_file(content: Buffer) -> str:
    """Return the checksum of a file's whole content."""
    return xxhash.xxh3_128_hexdigest(content)


# The digest of a whole tensor does not depend on how it was cut: it is the sum of its parts' digests.
#
# Each element's bits, as an unsigned number whose high bits are folded into the low ones, are multiplied by a
# weight that follows from its place in the whole tensor, and summed modulo 2^32; two lanes with different
# weights make 64 bits. The weight is a product of odd pseudo-random numbers for each dim, so a sum over a box
# factors into one pass over its memory, and any change of a single element changes the digest for certain (an
# odd number times a difference is never 0 modulo 2^32). Without the folding two swapped elements that differ
# in their sign alone would go unseen. Elements of 8 bytes count as two of 4 along the last dim. It proves
# that two layouts hold the same bits; it does not withstand forgery.
#
# `shard_digest` does the sums; it alone loads numpy, so that commands that only compare do not.


def combined(digests: Iterable[int]) -> int:
    """Return the digest of the tensor that parts with these digests make up."""
    high = low = 0
    for digest in digests:
        high = (high + (digest >> 32)) & 0xFFFFFFFF
        low = (low + digest) & 0xFFFFFFFF
    return high << 32 | low


def written(digest: int) -> str:
    """Return a digest as 16 hex digits."""
    return f"{digest:016x}"


def state_digest(tensors: Iterable[tuple[str, str, Sequence[int], str]]) -> str:
    """Return the digest of a state: over (name, dtype, shape, digest) of its tensors, in order of their
    names.
    """
    lines = (f"{name}\t{dtype}\t{tuple(shape)}\t{digest}\n" for name, dtype, shape, digest in sorted(tensors))
    return of_chunk("".join(lines).encode())
