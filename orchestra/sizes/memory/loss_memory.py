"""What the loss takes, in chunks of logits."""

from __future__ import annotations

import math

from conf.schema import PrecisionName, Scaling
from orchestra.sizes.training_shape import TrainingShape, widths

_FP32 = 4
# Bytes of logits in one chunk of the loss when the configuration gives no size: on a GPU 8,192 tokens of
# 128,000 words in 16 bits, so that the output matrix's gradient is summed over few chunks. On CPU 16 MiB of
# fp32, but at least 256 tokens, below which the products lose speed (measured with 8,192 and 32,000 words:
# chunks of 64 tokens took 1.35 times as long as chunks of 512, and whole logits at once 2 times).
_CHUNK_BYTES_CPU = 16 << 20
_CHUNK_BYTES_GPU = 2 << 30
_MIN_CHUNK_TOKENS = 256
# Rows that a product on a GPU takes at a time, or a part of them.
_TILE_TOKENS = 128
# Words whose gradients an output product in fp8 adds to earlier ones at a time.
FP8_WORDS = 1 << 14


def chunk_tokens(num_tokens: int, vocab_size: int, bytes_each: int, *, on_gpu: bool) -> int:
    """Return how many tokens' logits, of `bytes_each`, exist at once where the configuration does not say.

    At least 1. On a GPU chunks are as equal as tiles of products allow.
    """
    if not on_gpu:
        # As for fp32, whatever they take: no precision gives other chunks.
        return max(1, min(num_tokens, max(_MIN_CHUNK_TOKENS, _CHUNK_BYTES_CPU // (_FP32 * vocab_size))))
    limit = max(_MIN_CHUNK_TOKENS, _CHUNK_BYTES_GPU // (bytes_each * vocab_size))
    tiles = math.ceil(num_tokens / math.ceil(num_tokens / limit) / _TILE_TOKENS)
    return min(num_tokens, tiles * _TILE_TOKENS)


def logit_bytes(width: int, is_compiled: bool) -> int:
    """Return what a logit takes while the loss is computed, for products whose results have `width` bytes:
    their memory and, eager, a copy in fp32.
    """
    return width if is_compiled or width >= _FP32 else width + _FP32


def loss_chunk_tokens(shape: TrainingShape) -> int:
    """Return how many tokens' logits exist at once."""
    tokens, words = round(shape.tokens.count), math.ceil(shape.model.vocab_size / shape.layout.tp)
    if shape.options.loss_chunk_tokens is not None:
        return min(tokens, shape.options.loss_chunk_tokens)
    bytes_each = logit_bytes(shape.tokens.width_bytes, shape.options.is_compiled)
    return chunk_tokens(tokens, words, bytes_each, on_gpu=shape.options.is_gpu)


def loss_bytes(shape: TrainingShape) -> float:
    """Return what the chunked loss adds: chunks of logits in the products' type and, eager, in fp32, the
    hidden states' gradient, and where gradients are kept in 16 bits the output matrix' in fp32, unless one
    chunk is all.

    One chunk's gradient is still alive when the next one's logits are made. Over cut vocabularies two chunks
    are under way.
    """
    tokens, width = shape.tokens.count, shape.tokens.width_bytes
    words, hidden = math.ceil(shape.model.vocab_size / shape.layout.tp), shape.model.hidden_size
    chunk = loss_chunk_tokens(shape)
    # The second chunk, which is short where it is the last one.
    second = max(0, min(chunk, tokens - chunk))
    wide = width if shape.options.is_compiled else _FP32
    narrow = 0 if width == wide else width
    if shape.layout.tp > 1:
        making = chunk * wide + second * (wide + narrow) if second else chunk * (wide + narrow)
        using = (chunk + second) * wide + chunk * narrow
        kept = 0.0
    else:
        making = (chunk + second) * wide if narrow else 0.0
        using = chunk * (wide + narrow) if narrow else 0.0
        # The products' own memory serves all chunks; in fp32 or compiled it is the only one.
        kept = chunk * (narrow or wide)
    made_in = gradient_width(shape)
    is_direct = made_in == _FP32 or chunk >= tokens
    matrix = 0.0 if is_direct else words * hidden * _FP32
    product = words * hidden * width if width < _FP32 and (made_in == _FP32 or not is_direct) else 0.0
    whole = tokens * hidden * width
    gathered = 2 * whole if shape.tokens.outer > 1 else 0.0
    if shape.precision is PrecisionName.fp8 and shape.options.fp8_output:
        # The gradient by rows and by columns stands where one in 16 bits did, if that had memory of its own.
        using += chunk * (2 - narrow)
        is_row = shape.options.fp8_scaling is Scaling.row
        product = min(words, FP8_WORDS) * hidden * (width if is_row else _FP32)
        if chunk >= tokens and shape.accumulation == 1:
            product = 0.0
        if is_row:
            # The hidden states of a chunk are rounded by columns: their copy and two in fp32.
            product = max(product, (width + 2 * _FP32) * chunk * hidden)
        whole += (tokens + chunk) * hidden
        if shape.zero == 3 and shape.num_shards > 1:
            # By words and by inputs; by words it was gathered, but for a table that is looked up.
            is_gathered = shape.gathers_fp8 and not shape.model.tie_word_embeddings
            whole += (1 if is_gathered else 2) * words * hidden
    return kept * words + max(making * words, using * words + product) + matrix + whole + gathered


def gradient_width(shape: TrainingShape) -> int:
    """Return the bytes of an element of the output matrix' gradients as a micro-batch makes them."""
    gradient = widths(shape.precision).gradients
    is_whole = shape.zero < 2 or shape.num_shards == 1 or shape.has_table_apart
    return gradient if is_whole else shape.options.reduce_bytes or gradient
