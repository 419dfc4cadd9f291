"""An S3 service on this machine, for the tests of storages: moto's server, over real HTTP."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from checkpointing.storage import Storage, remote

MIB = 1 << 20


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Start an S3 service on a free port of this machine, and point the client's own variables at it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }.items():
            patch.setenv(name, value)
        yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str) -> str:
    name = f"bucket-{uuid.uuid4()}"
    boto3.client("s3").create_bucket(Bucket=name)
    return name


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send files in the smallest parts that S3 takes."""
    monkeypatch.setattr(remote, "_PART_BYTES", 5 * MIB)


@pytest.fixture
def send() -> Callable[[Storage, str, bytes], None]:
    """Return what writes a large file, a block at a time."""
    return _send


def _send(storage: Storage, path: str, content: bytes, block_bytes: int = 3 * MIB) -> None:
    file = storage.create(path, len(content))
    for begin in range(0, len(content), block_bytes):
        file.write(memoryview(content)[begin : begin + block_bytes])
    file.commit()
