"""What somebody asks to be packed. Values only; `orchestra.data.pack` checks and does it."""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.data.tokenizer import BYTES


@dataclass(frozen=True)
class PackRequest:
    """What to pack, and where to."""

    # Files, folders, patterns or fsspec URLs: .txt, .md, .rst, .jsonl (also .gz, .zst) or .parquet.
    inputs: list[str]
    # PREFIX of the token file: writes PREFIX.bin and PREFIX.json; any fsspec URL.
    output: str
    # `bytes`, or the path of a Hugging Face tokenizer.json.
    tokenizer: str = BYTES
    # Name of the token that ends a document; None: the tokenizer's own end of text.
    separator: str | None = None
    # Field of JSON lines, or column of Parquet files, that holds the text.
    field: str = "text"
    # Processes that encode; 1 encodes in this process.
    num_workers: int = 1
