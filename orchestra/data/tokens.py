"""Opens token files: memory-mapped where they lie on this machine, copied to it first where they do not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orchestra.data.cache import local_copy
from orchestra.data.index import TokenIndex, check_size, local_prefix, read_index, token_file_prefix
from orchestra.data.source import Tokens
from orchestra.errors import DataError


@dataclass(frozen=True)
class TokenFile:
    """An open token file: the tokens [num_tokens] as a read-only view of the mapped file."""

    name: str
    index: TokenIndex
    tokens: Tokens


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
    return TokenFile(f"{prefix}.bin", index, mapped.view(np.ndarray))
