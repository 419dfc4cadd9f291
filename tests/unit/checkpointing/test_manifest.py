"""Manifests: what is written is read back, and whatever else is read is refused as damaged, and only so.

ORCHESTRA_FUZZ_EXAMPLES sets how many mutated manifests are tried (2,000).
"""

from __future__ import annotations

import copy
import json
import math
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sample_checkpoint import write

from checkpointing.box import overlapping
from checkpointing.checkpoint_errors import DamagedError
from checkpointing.integrity import checksums
from checkpointing.manifest import MANIFEST, Manifest, decode, encode
from checkpointing.storage.local import LocalStorage

NUM_EXAMPLES = int(os.environ.get("ORCHESTRA_FUZZ_EXAMPLES", "1000"))
FUZZED = settings(
    max_examples=max(1, NUM_EXAMPLES // 2),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
# pyproject's limit for a test is meant for the usual number.
LIMIT_S = max(120, NUM_EXAMPLES // 20)
# A small manifest must not ask for much, whatever it says; hypothesis itself keeps more and more.
MAX_GROWTH_BYTES = 32 << 20

Document = dict[str, Any]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a manifest as a save writes it."""
    storage = LocalStorage(tmp_path_factory.mktemp("checkpoints"))
    write(storage, 100, state={"samples": 1600, "score": 2.5, "metrics": {"tokens": [1, 2]}})
    return storage.get(f"step-00000100/{MANIFEST}")


def peak_bytes() -> int:
    """Return the most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def sealed(document: Document) -> bytes:
    """Return a document as it is written, with the checksum of what it says now."""
    document = {key: value for key, value in document.items() if key != "checksum"}
    plain = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**document, "checksum": checksums.of_file(plain)}).encode()


def check_sound(manifest: Manifest) -> None:
    """Check what readers rely on, whatever the manifest says."""
    for tensor in manifest.tensors.values():
        boxes = [chunk.box for chunk in tensor.chunks]
        assert all(box.is_inside(tensor.shape) for box in boxes)
        assert sum(box.num_elements for box in boxes) == math.prod(tensor.shape)
        assert overlapping(boxes) is None
        for chunk in tensor.chunks:
            assert Path(chunk.file).name == chunk.file
            assert 0 <= chunk.begin <= chunk.begin + chunk.num_bytes <= manifest.files[chunk.file].num_bytes
    assert decode(encode(manifest)) == manifest


def refused_or_sound(content: bytes) -> None:
    refusal: DamagedError | None = None
    before = peak_bytes()
    try:
        manifest = decode(content)
    except DamagedError as error:
        refusal = error
    assert peak_bytes() - before < MAX_GROWTH_BYTES
    if refusal is None:
        check_sound(manifest)
    else:
        assert refusal.file == MANIFEST


def test_a_manifest_comes_back_as_it_was_written(written: bytes) -> None:
    manifest = decode(written)
    assert encode(manifest) == written
    assert manifest.num_bytes == sum(file.num_bytes for file in manifest.files.values())
    check_sound(manifest)


def test_every_flipped_byte_is_found(written: bytes) -> None:
    document = json.loads(written)
    for position in range(0, len(written), 7):
        content = bytearray(written)
        content[position] ^= 0x01
        try:
            changed = json.loads(content)
        except ValueError:
            changed = None
        if changed != document:
            with pytest.raises(DamagedError):
                decode(bytes(content))


def rows(document: Document) -> Document:
    tensor: Document = document["tensors"]["model.rows"]
    return tensor


EDITS: list[tuple[str, Callable[[Document], object]]] = [
    ("schema_version is 2", lambda doc: doc.update(schema_version=2)),
    ("schema_version is True", lambda doc: doc.update(schema_version=True)),
    ("expected .*safetensors", lambda doc: rows(doc)["chunks"][0].update(file="../../etc/passwd")),
    ("expected .*safetensors", lambda doc: rows(doc)["chunks"][0].update(file="manifest.json")),
    ("expected .*safetensors", lambda doc: doc["files"].update({"a/b.safetensors": {}})),
    ("expected .*safetensors", lambda doc: doc["files"].update({"x.safetensors\n": {}})),
    ("outside the files", lambda doc: rows(doc)["chunks"][0].update(file="other.safetensors")),
    ("outside the files", lambda doc: rows(doc)["chunks"][0].update(begin=10**9)),
    ("at least 0", lambda doc: rows(doc)["chunks"][0].update(begin=-4)),
    ("outside the shape", lambda doc: rows(doc)["chunks"][0]["offsets"].__setitem__(0, 30)),
    ("each element", lambda doc: rows(doc)["chunks"].pop()),
    ("each element", lambda doc: rows(doc)["shape"].__setitem__(0, 38)),
    ("each element", lambda doc: rows(doc)["chunks"].__setitem__(1, rows(doc)["chunks"][0])),
    ("differ in length", lambda doc: rows(doc)["chunks"][0]["offsets"].append(0)),
    ("not its size", lambda doc: rows(doc).update(dtype="BF16")),
    ("dtype is 'pickle'", lambda doc: rows(doc).update(dtype="pickle")),
    ("share bytes", lambda doc: doc["tensors"].update(copy=rows(doc))),
    ("state_digest", lambda doc: rows(doc).update(digest="0" * 16)),
    ("digest of 'model.rows'", lambda doc: rows(doc).update(digest="0")),
    ("checksum of a chunk", lambda doc: rows(doc)["chunks"][0].update(checksum="")),
    ("not JSON", lambda doc: doc.update(created=math.nan)),
    ("not JSON", lambda doc: doc["state"].update(score=math.inf)),
    ("not JSON", lambda doc: doc["layout"].update(dp=[-math.inf])),
    ("created", lambda doc: doc.update(created=True)),
    ("step is -1", lambda doc: doc.update(step=-1)),
    ("step is 1.0", lambda doc: doc.update(step=1.0)),
    ("state is list", lambda doc: doc.update(state=[])),
    ("tensors is NoneType", lambda doc: doc.pop("tensors")),
    ("expected an object", lambda doc: doc["tensors"].update({"model.rows": 3})),
]


@pytest.mark.parametrize(("words", "edit"), EDITS)
def test_an_edit_with_a_new_checksum_is_refused_by_what_it_says(
    written: bytes, words: str, edit: Callable[[Document], object]
) -> None:
    document = json.loads(written)
    edit(document)
    with pytest.raises(DamagedError, match=words) as caught:
        decode(sealed(document))
    assert caught.value.file == MANIFEST


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04\x95",
        b"null",
        b"[]",
        b'{"schema_version": 1}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"schema_version": ' + b"9" * 10_000 + b"}",
        b"\xff\xfe{\x00}\x00",
        b'{"schema_version": 1, "state": {"a": "\\ud800"}}',
        b"\0" * 4096,
    ],
)
def test_what_is_no_manifest_is_damage(content: bytes) -> None:
    with pytest.raises(DamagedError):
        decode(content)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@FUZZED
@given(data=st.data())
def test_mutated_bytes_are_refused_and_nothing_else_happens(written: bytes, data: st.DataObject) -> None:
    content = bytearray(written)
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(content)))
        longest = data.draw(st.sampled_from([1, 8, 4000]))
        end = data.draw(st.integers(begin, min(len(content), begin + longest)))
        content[begin:end] = data.draw(st.binary(max_size=12) | st.sampled_from(TOKENS))
    refused_or_sound(bytes(content))


TOKENS = [b"", b"{", b"]", b'"', b",", b"NaN", b"-1", b"1e999", b"\\u0000", b"\\ud800", b"[[[[", b"null"]
HUGE = [2**31, 2**53, 2**62, 2**63, 2**64, 10**40, -1, 0, 1]
JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(HUGE)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "F32", "U8", "BOOL", "0" * 16, "00000-00.safetensors", "..", "/", "model.rows"]),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=50,
)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of everything in a document."""
    keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in list(keys):
        yield node, key
        yield from places(node[key])


def mutate(document: Document, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
    """Change one thing somewhere in a document."""
    found = list(places(document))
    if not found:
        return
    node, key = found[draw(st.integers(0, len(found) - 1))]
    kind = draw(st.sampled_from(["replace", "remove", "nudge", "swap", "repeat"]))
    value = node[key]
    if kind == "remove":
        del node[key]
    elif kind == "nudge" and type(value) is int:
        node[key] = value + draw(st.sampled_from([-4, -1, 1, 4, 2**32]))
    elif kind == "swap":
        other, other_key = found[draw(st.integers(0, len(found) - 1))]
        # Copies: a node must not come to hold itself.
        node[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(value)
    elif kind == "repeat" and isinstance(node, list):
        node.insert(key, copy.deepcopy(value))
    else:
        node[key] = draw(JUNK)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@FUZZED
@given(data=st.data())
def test_mutated_documents_with_a_right_checksum_are_refused_or_sound(
    written: bytes, data: st.DataObject
) -> None:
    document = json.loads(written)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(document, data.draw)
    refused_or_sound(sealed(document))
