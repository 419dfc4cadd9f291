"""Opens the source of samples that a configuration names."""

from __future__ import annotations

from conf.schema import DataConfig, Source
from orchestra.data.blend import open_blend
from orchestra.data.source import SampleSource, TokenSamples
from orchestra.data.stdlib import VOCAB_SIZE, stdlib_tokens


def open_source(data: DataConfig, seq_len: int) -> SampleSource:
    """Open the source that a checked configuration names. Raises DataError where it cannot be read."""
    if data.source is Source.stdlib:
        return TokenSamples(stdlib_tokens(), seq_len, VOCAB_SIZE, "data.source=stdlib")
    return open_blend(data, seq_len)
