"""Text to tokens: as bytes, or by any Hugging Face tokenizer.json."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from orchestra.errors import ConfigError

BYTES = "bytes"
Encoded = npt.NDArray[np.uint32] | npt.NDArray[np.uint8]

# Names that the usual tokenizers give their end of text, tried in this order.
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "[EOS]")
# A tokenizer keeps about 100 bytes for each token it makes: longer text goes through it in parts, cut
# between lines.
_PART_CHARACTERS = 1 << 20
_LINE_END = re.compile(r"\n(?=\S)")


class Tokenizer(Protocol):
    """Encodes pieces of text. All tokens are below vocab_size."""

    name: str
    sha256: str
    vocab_size: int
    separator_id: int

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Return the tokens of each text, without any that mark its beginning or end."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens; what is no character yet becomes U+FFFD."""


class ByteTokenizer:
    """The 256 byte values of UTF-8, and the separator after them."""

    name = BYTES
    sha256 = ""
    vocab_size = 257
    separator_id = 256

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < self.separator_id).decode(errors="replace")


class HuggingFaceTokenizer:
    """A tokenizer.json, with what it would add, cut off or fill up switched off.

    Text that spells a special token is encoded as the text it is, so that no document holds a separator.
    """

    def __init__(self, path: Path, separator: str | int | None) -> None:
        """`separator`: the token that ends a document, or its id where that is known."""
        content = _read(path)
        self.name = path.name
        self.sha256 = hashlib.sha256(content).hexdigest()
        self._tokenizer = _parsed(content, path)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        if not vocabulary:
            raise ConfigError(f"--tokenizer {path}: has no tokens; train it first, or give another one")
        self.vocab_size = max(vocabulary.values()) + 1
        self.separator_id: int = (
            separator if isinstance(separator, int) else _separator_id(vocabulary, separator, path)
        )
        name = self._tokenizer.id_to_token(self.separator_id)
        if name is not None:
            # Added tokens that nobody called special are found in any text.
            self._tokenizer.add_special_tokens([name])

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        parts_of_texts = [_parts(text) for text in texts]
        flat = list(itertools.chain(*parts_of_texts))
        encodings = iter(self._tokenizer.encode_batch_fast(flat, add_special_tokens=False))
        return [_joined(next(encodings).ids for _ in parts) for parts in parts_of_texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


def open_tokenizer(name: str, separator: str | None = None) -> Tokenizer:
    """Open `bytes`, or the tokenizer.json at a path (or in a folder).

    `separator` names the token that ends a document; None: the eos_token of a tokenizer_config.json beside
    it, or one of the usual names. Raises ConfigError.
    """
    if name == BYTES:
        if separator is not None:
            raise ConfigError(f"--separator {separator}: the byte tokenizer has its own (256); leave it out")
        return ByteTokenizer()
    path = Path(name).expanduser()
    return HuggingFaceTokenizer(path / "tokenizer.json" if path.is_dir() else path, separator)


def name_of_token(path: Path, token: int) -> str | None:
    """Return what a tokenizer.json calls a token; None where it has none of that id. Raises ConfigError."""
    name: str | None = _parsed(_read(path), path).id_to_token(token)
    return name


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"--tokenizer {path}: cannot be read ({error.strerror}); give {BYTES} or a tokenizer.json"
        ) from error


def _parsed(content: bytes, path: Path) -> Any:
    from tokenizers import Tokenizer as Parsed

    try:
        return Parsed.from_str(content.decode())
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"--tokenizer {path}: not a tokenizer.json ({error})") from error


def _separator_id(vocabulary: dict[str, int], separator: str | None, path: Path) -> int:
    names = [separator] if separator is not None else [*_configured(path), *_END_OF_TEXT]
    for name in names:
        if name in vocabulary:
            return vocabulary[name]
    missing = "end-of-text token of a usual name" if separator is None else f"token {separator!r}"
    special = [name for name in vocabulary if re.fullmatch(r"[<\[].+[>\]]", name)][:20]
    raise ConfigError(
        f"--tokenizer {path}: has no {missing}; give --separator one of {', '.join(special) or 'its tokens'}"
    )


def _configured(path: Path) -> list[str]:
    """Return the eos_token that the folder of the tokenizer names, if it does."""
    try:
        token = json.loads(path.with_name("tokenizer_config.json").read_text())["eos_token"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    token = token.get("content") if isinstance(token, dict) else token
    return [token] if isinstance(token, str) else []


def _parts(text: str) -> list[str]:
    """Cut text at the first line end after each _PART_CHARACTERS; without one it stays whole."""
    parts, start = [], 0
    while len(text) - start > _PART_CHARACTERS:
        end = _LINE_END.search(text, start + _PART_CHARACTERS)
        if end is None:
            break
        parts.append(text[start : end.start() + 1])
        start = end.start() + 1
    return [*parts, text[start:]]


def _joined(parts: Iterable[list[int]]) -> Encoded:
    arrays = [np.array(part, dtype=np.uint32) for part in parts]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
