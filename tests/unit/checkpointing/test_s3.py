"""S3 over real HTTP: uploads in parts, missing buckets, endpoints, answers of a service in trouble."""

from __future__ import annotations

import base64
import contextlib
import gc
import os
import threading
import uuid
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import boto3
import fsspec
import pytest
import s3fs.core
import torch
from sample_checkpoint import send

from checkpointing import catalog
from checkpointing.checkpoint_errors import StorageError
from checkpointing.checkpointer import Checkpointer
from checkpointing.options import Options
from checkpointing.outages import is_passing
from checkpointing.peers import Peers
from checkpointing.shards import whole
from checkpointing.storage import open_storage
from checkpointing.storage.remote import RemoteStorage, Retries
from checkpointing.verify import verify

MIB = 1 << 20
AT_ONCE = Retries(num_tries=3, first_delay_s=0.0)


def uploads(bucket: str) -> list[Any]:
    """Return the uploads in parts that were begun and neither finished nor given up."""
    return boto3.client("s3").list_multipart_uploads(Bucket=bucket).get("Uploads", [])


def test_a_discarded_upload_leaves_nothing_in_the_bucket(bucket: str, small_parts: None) -> None:
    storage = open_storage(f"s3://{bucket}/checkpoints")
    file = storage.create("a", 14 * MIB)
    content = memoryview(bytes(7 * MIB))
    file.write(content)
    file.write(content)
    assert len(uploads(bucket)) == 1
    file.discard()
    file.discard()
    del file
    gc.collect()
    assert uploads(bucket) == []
    assert storage.names() == []


def test_a_part_that_fails_sends_the_file_again(
    bucket: str, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = RemoteStorage(f"s3://{bucket}/checkpoints", AT_ONCE)
    failures: list[Exception] = [ConnectionResetError(), TimeoutError()]
    upload = s3fs.core.S3File._upload_chunk

    def flaky(self: Any, final: bool = False) -> Any:
        if self.parts and failures:
            raise failures.pop()
        return upload(self, final)

    monkeypatch.setattr(s3fs.core.S3File, "_upload_chunk", flaky)
    content = os.urandom(16 * MIB)
    send(storage, "a", content)
    assert failures == []
    assert storage.get("a") == content
    assert uploads(bucket) == []


def test_a_bucket_that_is_not_there_is_an_error_and_no_empty_place(endpoint: str) -> None:
    storage = open_storage(f"s3://absent-{uuid.uuid4()}/checkpoints")
    for act in (storage.names, lambda: storage.size("a"), lambda: storage.put("a", b"1")):
        with pytest.raises(StorageError, match="bucket does not exist"):
            act()
    assert not any("absent" in made["Name"] for made in boto3.client("s3").list_buckets()["Buckets"])


def test_the_endpoint_may_come_from_fsspecs_configuration(
    bucket: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": endpoint})
    storage = open_storage(f"s3://{bucket}/checkpoints")
    storage.put("a", b"1")
    assert storage.names() == ["a"]


def test_a_state_is_saved_to_a_bucket_and_restored_from_it(bucket: str) -> None:
    place = f"s3://{bucket}/runs/one"
    values = torch.randn(37, 13, generator=torch.Generator().manual_seed(0))
    checkpointer = Checkpointer(place, Peers.alone(), Options(keep_last=2, when_busy="wait"))
    for step in (1, 2, 3):
        assert checkpointer.save(step, [whole("w", values + step)], {"samples": step})
    checkpointer.wait()
    storage = open_storage(place)
    assert storage.names() == ["step-00000002", "step-00000003"]
    again = Checkpointer(place, Peers.alone(), Options(generation=1))
    assert again.save(3, [whole("w", values + 3)], {"samples": 3})
    again.wait()
    assert catalog.read_manifest(storage, 3).generation == 1
    report = verify(storage, 3)
    assert (report.damages, report.strays) == ((), ())
    found = torch.zeros(37, 13)
    restored = Checkpointer(place, Peers.alone(), Options()).restore(lambda _: [whole("w", found)])
    assert restored is not None
    assert (restored.step, restored.state) == (3, {"samples": 3})
    assert torch.equal(found, values + 3)


class Service(ThreadingHTTPServer):
    """An S3 service that answers the first requests with a failure, and the others with success."""

    def __init__(self, status: int, code: str, num_failures: int) -> None:
        self.status, self.code = status, code
        self.num_failures = num_failures
        self.num_requests = 0
        super().__init__(("127.0.0.1", 0), Answers)


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Service

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.num_requests += 1
        fails = self.server.num_requests <= self.server.num_failures
        body = f"<Error><Code>{self.server.code}</Code><Message>no</Message></Error>" if fails else ""
        self.send_response(self.server.status if fails else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()

    def do_GET(self) -> None:
        """Give five bytes, at first with the checksum of others."""
        self.server.num_requests += 1
        fails = self.server.num_requests <= self.server.num_failures
        self.send_response(200)
        self.send_header("Content-Length", "5")
        crc = zlib.crc32(b"other" if fails else b"bytes").to_bytes(4, "big")
        self.send_header("x-amz-checksum-crc32", base64.b64encode(crc).decode())
        self.end_headers()
        self.wfile.write(b"bytes")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("status", "code", "num_failures", "num_requests"),
    [
        (500, "InternalError", 2, 3),
        (503, "SlowDown", 2, 3),
        (500, "InternalError", 9, 3),
        # Once more by a client that has read its credentials anew.
        (403, "AccessDenied", 9, 2),
    ],
)
@pytest.mark.usefixtures("endpoint")
def test_answers_of_a_service_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, status: int, code: str, num_failures: int, num_requests: int
) -> None:
    service = Service(status, code, num_failures)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{service.server_port}")
    # The client itself would try again for half a minute.
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    is_refused = pytest.raises(StorageError, match="s3://bucket/checkpoints/a: no")
    try:
        with is_refused if num_failures >= num_requests else contextlib.nullcontext():
            RemoteStorage("s3://bucket/checkpoints", AT_ONCE).put("a", b"1")
    finally:
        service.shutdown()
        service.server_close()
    assert service.num_requests == num_requests


@pytest.mark.usefixtures("endpoint")
def test_bytes_that_the_client_finds_changed_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(200, "", num_failures=2)
    threading.Thread(target=service.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{service.server_port}")
    storage = RemoteStorage("s3://bucket/checkpoints", AT_ONCE)
    try:
        assert storage.get("a") == b"bytes"
        assert service.num_requests == 3
        service.num_failures = 99
        with pytest.raises(StorageError, match="checksum") as caught:
            storage.get("a")
        # It may be so in the store: an older checkpoint is taken, and nothing is waited for.
        assert not is_passing(caught.value)
    finally:
        service.shutdown()
        service.server_close()
