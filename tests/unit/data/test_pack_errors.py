"""Bad inputs: each is named by its file and the line, row or offset where it goes wrong, in workers too."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from orchestra.data.pack import command, inputs
from orchestra.data.pack.command import PackRequest, pack, plan_pack
from orchestra.errors import DataError

LINE = json.dumps({"text": "some text"}).encode() + b"\n"


def message_of(path: Path, *, workers: int = 1, field: str = "text") -> str:
    """Return what packing `path` complains about."""
    request = PackRequest([str(path)], str(path.with_name("out")), num_workers=workers, field=field)
    with pytest.raises(DataError) as caught:
        pack(plan_pack(request))
    message = str(caught.value)
    assert str(path) in message
    return message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"text": "no end', "line 4: not JSON"),
        (b"[" * 200_000, "line 4: not JSON"),
        (b'["text"]', "line 4: no field 'text', found an array"),
        (b'{"body": "x", "id": 1}', "line 4: no field 'text', found body, id; give --field"),
        (b'{"text": null}', "line 4, field 'text': null, expected a string"),
        (b'{"text": 17}', "line 4, field 'text': a number, expected a string"),
        (b'{"text": "\xff"}', "line 4, byte 10: not UTF-8"),
        (b'{"text": "a\\ud800"}', "line 4, field 'text': half a surrogate pair at character 1"),
    ],
)
def test_bad_line_is_named_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, expected: str
) -> None:
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 40)
    monkeypatch.setattr(inputs, "_READ_BYTES", 30)
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE + b"\n" + LINE + line + b"\n" + LINE)
    assert expected in message_of(path)


def test_error_in_a_worker_process_arrives_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE * 3 + b"{\n")
    assert "line 4: not JSON" in message_of(path, workers=2)


def test_killed_worker_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE)
    # The environment of the workers makes them die while they start, as for want of memory.
    monkeypatch.setattr(command, "_start_worker", os.abort)
    request = PackRequest([str(path)], str(tmp_path / "out"), num_workers=2)
    with pytest.raises(DataError, match="worker that encodes was killed"):
        pack(plan_pack(request))


def test_text_that_is_not_utf8_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(inputs, "_READ_BYTES", 32)
    path = tmp_path / "a.txt"
    path.write_bytes(b"fine line\n" * 30 + b"gr\xfc\xdfe")
    assert "byte 0xfc at offset 302 is not UTF-8" in message_of(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst"])
def test_compressed_file_that_breaks_off_is_named(tmp_path: Path, name: str) -> None:
    compress = gzip.compress if name.endswith("gz") else zstandard.compress
    whole = compress(b"".join(json.dumps({"text": str(n**9)}).encode() + b"\n" for n in range(3000)))
    path = tmp_path / name
    path.write_bytes(whole[: len(whole) // 2])
    assert f"breaks off at offset {len(whole) // 2}" in message_of(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_damaged_compressed_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"this is not compressed at all" * 10)
    assert "damaged" in message_of(path)


def test_parquet_that_breaks_off_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert f"not a whole Parquet file of {len(whole) - 9} bytes" in message_of(path)


def test_damage_inside_a_parquet_file_is_named_by_its_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": [str(number**5) for number in range(4000)]})
    pyarrow.parquet.write_table(table, path, row_group_size=1000, compression="zstd", use_dictionary=False)
    start = pyarrow.parquet.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[start + 30 : start + 900] = bytes(870)
    path.write_bytes(content)
    assert "damaged in row group 2, after row 2000" in message_of(path)


def test_parquet_column_and_row_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["a", "b", None, "d"], "id": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    assert "row 2, column 'text': null, expected a string" in message_of(path)
    assert "no column 'body', found text, id; give --field" in message_of(path, field="body")
    assert "row 0, column 'id': a number, expected a string" in message_of(path, field="id")


def test_inputs_without_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n\n")
    assert "no text in 1 files; nothing written" in message_of(path)


def test_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "file").write_text("")
    request = PackRequest([str(tmp_path / "a.txt")], str(tmp_path / "file" / "out"))
    with pytest.raises(DataError, match=r"file/out: cannot be written"):
        pack(plan_pack(request))
