"""The same verbs on checkpoints and weights in an object store, spoken to over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs
from llamas import save, small, transformer
from moto.server import ThreadedMotoServer

from checkpointing.catalog import read_manifest
from checkpointing.storage.local import LocalStorage
from conf.schema import CheckpointConfig, Config, RunConfig
from orchestra.cli import main
from orchestra.huggingface.folder import from_json, open_folder, to_json
from orchestra.run.config_file import write_config
from orchestra.run.paths import RunDir

MODEL = small(vocab_size=257)


@pytest.fixture(scope="module")
def bucket() -> Iterator[s3fs.S3FileSystem]:
    """A bucket `weights` on an S3 server of this process's own, for whoever uses s3:// as users do."""
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        client = s3fs.S3FileSystem()
        client.mkdir("weights")
        yield client
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def run(bucket: s3fs.S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose checkpoint lies in the bucket."""
    monkeypatch.chdir(tmp_path)
    made = RunDir(tmp_path / "runs" / "remote")
    made.path.mkdir(parents=True)
    place = f"s3://weights/{tmp_path.name}"
    config = Config(MODEL, checkpoint=CheckpointConfig(dir=place), run=RunConfig("remote", str(tmp_path)))
    write_config(made.config, config)
    save(tmp_path / "local", transformer(MODEL), 10)
    bucket.put(f"{tmp_path}/local/step-00000010", f"weights/{tmp_path.name}/step-00000010", recursive=True)
    return made


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    found = main(["checkpoint", *words, "--json"])
    out, err = capsys.readouterr()
    assert found == code, out + err
    return json.loads(out)


@pytest.mark.slow
def test_checkpoints_in_a_bucket_are_listed_verified_exported_and_started_from(
    run: RunDir, bucket: s3fs.S3FileSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    (record,) = printed(capsys, "ls", "remote")
    assert (record["step"], record["checked"]) == (10, "sizes")
    (report,) = printed(capsys, "verify", "remote")
    assert report["intact"]
    written = printed(capsys, "export", "remote", "--to", "out", "--max-shard-size", "100KB")
    assert written["num_parameters"] == sum(it.numel() for it in transformer(MODEL).parameters())

    bucket.put("out", "weights/published/llama", recursive=True)
    found = printed(capsys, "import", "s3://weights/published/llama")
    assert found["overrides"][0] == "model.init_from=s3://weights/published/llama"
    folder = open_folder("s3://weights/published/llama")
    storage, name, manifest = from_json(json.loads(json.dumps(to_json(folder))))
    (chunk,) = manifest.tensors["model.norm.weight"].chunks
    content = bytearray(chunk.num_bytes)
    storage.read_into(f"{name}/{chunk.file}", chunk.begin, memoryview(content))
    norm = transformer(MODEL).norm.weight.detach()
    assert bytes(content) == norm.numpy().tobytes()


def test_damage_in_a_bucket_is_found(
    run: RunDir, bucket: s3fs.S3FileSystem, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"weights/{tmp_path.name}/step-00000010/00000-00.safetensors"
    manifest = read_manifest(LocalStorage(tmp_path / "local"), 10)
    content = bytearray(bucket.cat_file(path))
    content[manifest.tensors["model.norm.weight"].chunks[0].begin] ^= 4
    bucket.pipe_file(path, bytes(content))
    (report,) = printed(capsys, "verify", "remote", code=1)
    assert report["damages"][0]["tensor"] == "model.norm.weight"
    assert main(["checkpoint", "export", "remote", "--to", "out"]) == 1
    assert not Path("out").exists()
    assert "passed over step 10" in capsys.readouterr().err
    bucket.rm(path)
    bucket.invalidate_cache()
    (record,) = printed(capsys, "ls", "remote")
    assert record["damage"] == "00000-00.safetensors: it is missing"
