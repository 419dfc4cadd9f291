"""Token files that tests write by hand, so that they do not depend on the packer."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orchestra.data.token_files import TokenIndex, index_text

WriteTokens = Callable[..., str]


@pytest.fixture
def write_tokens(tmp_path: Path) -> WriteTokens:
    """Return `write(name, tokens, vocab_size=…)`, which writes a token file and returns its prefix."""

    def write(
        name: str,
        tokens: np.ndarray,
        *,
        vocab_size: int = 257,
        separator_id: int | None = None,
        tokenizer_sha256: str = "",
    ) -> str:
        prefix = str(tmp_path / name)
        content = tokens.tobytes()
        block_bytes = 1000
        blocks = [content[start : start + block_bytes] for start in range(0, len(content), block_bytes)]
        index = TokenIndex(
            dtype=str(tokens.dtype),
            num_tokens=len(tokens),
            num_documents=1,
            vocab_size=vocab_size,
            separator_id=vocab_size - 1 if separator_id is None else separator_id,
            tokenizer="bytes",
            tokenizer_sha256=tokenizer_sha256,
            block_bytes=block_bytes,
            block_crc32=[zlib.crc32(block) for block in blocks],
        )
        Path(f"{prefix}.bin").write_bytes(content)
        Path(f"{prefix}.json").write_text(index_text(index))
        return prefix

    return write
