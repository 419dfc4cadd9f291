"""The verbs of `orchestra checkpoint` on real checkpoints: what they print, refuse and return."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llamas import save, small, transformer

from checkpointing.storage import open_storage
from conf.schema import CheckpointConfig, Config, DataConfig, Family, RunConfig, Source
from orchestra.cli import main
from orchestra.cli.checkpoint.export_command import tokenizer_of
from orchestra.cli.checkpoint.ls_command import layout_text
from orchestra.data.pack.command import PackRequest, pack, plan_pack
from orchestra.huggingface.folder import open_folder
from orchestra.run.config_file import write_config
from orchestra.run.paths import RunDir

MODEL = small(vocab_size=257)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with checkpoints of the steps 10 and 20, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    made = RunDir(tmp_path / "runs" / "llama-1")
    made.path.mkdir(parents=True)
    write_config(made.config, config_of(made))
    for step in (10, 20):
        save(made.checkpoints, transformer(MODEL, seed=step), step, score=3.0 - step / 100)
    return made


def config_of(run: RunDir, **changes: Any) -> Config:
    config = Config(model=MODEL, run=RunConfig(run.name, str(run.path.parent)))
    return replace(config, **changes)


def flip(run: RunDir, step: int, tensor: str = "model.norm.weight") -> None:
    """Change one bit of a tensor."""
    from checkpointing.catalog import file_path, read_manifest

    manifest = read_manifest(open_storage(run.checkpoints), step)
    chunk = manifest.tensors[tensor].chunks[0]
    file = run.checkpoints / file_path(step, chunk.file)
    content = bytearray(file.read_bytes())
    content[chunk.begin + 5] ^= 1
    file.write_bytes(content)


def cut(run: RunDir, step: int) -> None:
    file = run.checkpoints / f"step-{step:08d}" / "00000-00.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    found = main(["checkpoint", *words])
    out, err = capsys.readouterr()
    assert found == code, out + err
    return out, err


def test_ls_lists_every_checkpoint_within_80_columns(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = printed(capsys, "ls", "lla")
    header, *rows = out.splitlines()
    assert header.split() == ["STEP", "SIZE", "AGE", "LAYOUT", "LOSS", "CHECKED"]
    assert [row.split()[0] for row in rows[:2]] == ["10", "20"]
    assert rows[1].split()[-2:] == ["2.8000", "sizes"]
    assert "checkpoint verify llama-1" in out
    assert max(len(line) for line in out.splitlines() if not line.startswith("in ")) <= 80


def test_ls_tells_what_is_damaged_and_what_it_did_not_read(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run, 10)
    cut(run, 20)
    (run.checkpoints / "step-00000030").mkdir()
    (run.checkpoints / "step-00000030" / "manifest.json").write_text("{}")
    records = json.loads(printed(capsys, "ls", "llama-1", "--json")[0])
    assert [(it["step"], it["checked"]) for it in records] == [
        (10, "sizes"),
        (20, "damaged"),
        (30, "damaged"),
    ]
    assert "00000-00.safetensors: it has" in records[1]["damage"]
    assert "manifest.json" in records[2]["damage"]
    out, _ = printed(capsys, "ls", "llama-1")
    assert "step 20 is damaged" in out
    assert "sizes were checked" in out


def test_ls_of_a_run_without_checkpoints_says_why(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(run.config, config_of(run, checkpoint=CheckpointConfig(dir=str(run.path / "elsewhere"))))
    assert "one is due every 1000 steps" in printed(capsys, "ls", "llama-1")[0]
    write_config(run.config, config_of(run, checkpoint=CheckpointConfig(None, dir=str(run.path / "x"))))
    assert "checkpoint.every_steps=null" in printed(capsys, "ls", "llama-1")[0]
    assert "has no checkpoint in" in printed(capsys, "verify", "llama-1", code=1)[1]


def test_checkpoints_at_a_url_are_found(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"file://{run.path}/elsewhere"
    run.checkpoints.rename(run.path / "elsewhere")
    write_config(run.config, config_of(run, checkpoint=CheckpointConfig(dir=place)))
    assert len(json.loads(printed(capsys, "ls", "llama-1", "--json")[0])) == 2
    write_config(run.config, config_of(run, checkpoint=CheckpointConfig(dir="nosuch://bucket/x")))
    assert "nosuch" in printed(capsys, "ls", "llama-1", code=1)[1]


def test_verify_reads_all_and_names_file_and_tensor(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = printed(capsys, "verify", "llama-1")
    assert [line.split(",")[0] for line in out.splitlines()] == ["step 10: intact", "step 20: intact"]
    flip(run, 20, "model.layers.1.mlp.up_proj.weight")
    out, _ = printed(capsys, "verify", "llama-1", code=1)
    assert "step 20: DAMAGED\n  00000-00.safetensors: model.layers.1.mlp.up_proj.weight: " in out
    assert max(map(len, out.splitlines())) <= 80
    printed(capsys, "verify", "llama-1", "10")
    (record,) = json.loads(printed(capsys, "verify", "llama-1", "20", "--json", code=1)[0])
    (damage,) = record["damages"]
    assert (damage["file"], damage["tensor"]) == ("00000-00.safetensors", "model.layers.1.mlp.up_proj.weight")


def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in (("verify", "llama-1", "15"), ("export", "llama-1", "15", "--to", "x")):
        assert "there are 10, 20" in printed(capsys, *words, code=2)[1]
    assert "'ten' is no step" in printed(capsys, "verify", "llama-1", "ten", code=2)[1]


def test_export_takes_the_newest_that_is_intact(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(run.path.rglob("*"))
    plan = json.loads(printed(capsys, "export", "llama-1", "--to", "out", "--dry-run", "--json")[0])
    assert (plan["step"], plan["written"], Path("out").exists()) == (20, False, False)
    flip(run, 20)
    out, err = printed(capsys, "export", "llama-1", "--to", "out", "--format", "hf")
    assert err.startswith("passed over step 20: 00000-00.safetensors: model.norm.weight: ")
    assert "step 10 of llama-1" in out
    assert "no tokenizer is written: this model reads bytes" in out
    assert open_folder("out").dtypes == ["F32"]
    assert sorted(run.path.rglob("*")) == before
    err = printed(capsys, "export", "llama-1", "20", "--to", "out2", code=1)[1]
    assert "step 20 is damaged" in err
    cut(run, 10)
    assert "none of llama-1's 2 checkpoints" in printed(capsys, "export", "llama-1", "--to", "o", code=1)[1]
    assert not Path("out2").exists()


def test_export_refuses_what_it_cannot_write(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("export", "llama-1", "--to")
    assert "copy it to its place" in printed(capsys, *words, "s3://bucket/x", code=2)[1]
    assert "exists already" in printed(capsys, *words, "runs", code=2)[1]
    assert "no size" in printed(capsys, *words, "x", "--max-shard-size", "5 apples", code=2)[1]
    write_config(run.config, config_of(run, model=replace(MODEL, family=Family.gpt)))
    assert "model.family=gpt has no Hugging Face form" in printed(capsys, *words, "x", code=1)[1]


def test_import_prints_a_command_that_composes(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    from orchestra.config.compose import compose

    printed(capsys, "export", "llama-1", "--to", "my model", "--max-shard-size", "50KB", "--dtype", "bf16")
    out, _ = printed(capsys, "import", "my model")
    assert "BF16" in out
    assert max(len(line) for line in out.splitlines() if str(run.path.parents[1]) not in line) <= 80
    command = shlex.split(out[out.index("  orchestra run") :].replace("\\\n", " "))
    assert command[:2] == ["orchestra", "run"]
    assert compose(command[2:]).config.model.hidden_size == 48
    record = json.loads(printed(capsys, "import", "my model", "--json")[0])
    assert record["overrides"] == command[2:]
    assert record["model"]["family"] == "llama"
    (Path("my model") / "tokenizer.json").write_text("{}")
    assert "data pack TEXT" in printed(capsys, "import", "my model")[0]
    (Path("my model") / "config.json").write_text('{"model_type": "gpt_neox"}')
    assert "another architecture" in printed(capsys, "import", "my model", code=1)[1]


def test_the_token_that_ends_a_document_comes_from_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    request = PackRequest([str(tmp_path / "a.txt")], str(tmp_path / "packed"), "bytes", None, "text", 1)
    pack(plan_pack(request))
    for path in ("packed", "packed.bin"):
        data = DataConfig(source=Source.tokens, path=str(tmp_path / path))
        assert tokenizer_of(data).end_of_text == 256
    assert tokenizer_of(DataConfig(source=Source.tokens, path="/gone")).name is None
    assert tokenizer_of(DataConfig(source=Source.tokens, path="s3://bucket/x")).end_of_text is None


@pytest.mark.parametrize(
    ("layout", "text"),
    [({"dp": 2, "tp": 1}, "dp2"), ({"dp": 4, "tp": 2, "zero": 3}, "dp4 tp2 zero3"), ({"dp": 1}, "1 rank")],
)
def test_layouts_are_short(layout: dict[str, int], text: str) -> None:
    assert layout_text(layout) == text
