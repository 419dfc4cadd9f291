"""The verbs of `orchestra checkpoint` on real checkpoints: what they print, refuse and return."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from llamas import flip, save, transformer
from support.command_line import CommandLine
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.trainers import BpeTrainer

from checkpointing.catalog import file_path, read_manifest
from checkpointing.checkpoint_errors import StorageError
from checkpointing.lineage import Base
from checkpointing.manifest import MANIFEST, decode, encode
from checkpointing.storage import Storage, open_storage
from checkpointing.storage.local import LocalStorage
from conf.schema import CheckpointConfig, Config, DataConfig, Family, RunConfig, Source, TrainConfig
from orchestra.cli.checkpoint import checkpoint_process
from orchestra.cli.checkpoint.checkpoint_export_command import _size, tokenizer_of
from orchestra.cli.checkpoint.checkpoint_ls_command import layout_text, open_place
from orchestra.config.compose import compose
from orchestra.data.pack import PackRequest, pack, plan_pack
from orchestra.errors import OrchestraError
from orchestra.huggingface.folder import from_json, open_folder, to_json
from orchestra.run.config_file import write_config
from orchestra.run.events import EventWriter
from orchestra.run.paths import RunDir
from orchestra.run.record import fallback_place
from tests.support.reference_llama import small
from tests.support.s3_service import bucket, endpoint

__all__ = ["bucket", "endpoint"]
MODEL = small(vocab_size=257)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run with checkpoints of the steps 10 and 20, in a working directory of its own."""
    monkeypatch.chdir(tmp_path)
    made = RunDir(tmp_path / "runs" / "llama-1")
    made.path.mkdir(parents=True)
    configure(made)
    for step in (10, 20):
        save(made.checkpoints, transformer(MODEL, seed=step), step, score=3.0 - step / 100)
    return made


def configure(run: RunDir, **changes: Any) -> None:
    config = Config(model=MODEL, run=RunConfig(run.name, str(run.path.parent)))
    write_config(run.config, replace(config, **changes))


def test_what_the_run_removes_while_it_is_read_is_followed_by_its_newest_checkpoint(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[int] = []

    def process(request: dict[str, Any], _: str) -> subprocess.CompletedProcess[str]:
        step = request["checkpoint"]["step"]
        read.append(step)
        if step == 40:
            return subprocess.CompletedProcess([], 0, '{"losses": {}}\n', "")
        # It saves and removes faster than this reads.
        shutil.rmtree(run.checkpoints / f"step-{step:08d}")
        save(run.checkpoints, transformer(MODEL, seed=step), step + 10)
        return subprocess.CompletedProcess([], 1, "", "manifest.json: No such file or directory")

    monkeypatch.setattr(checkpoint_process, "_run", process)
    place = open_place("llama-1", run.path.parent)
    assert checkpoint_process.ask(place, None, "eval", {}) == (40, {"losses": {}})
    assert read == [20, 30, 40]
    assert "step 20 was removed meanwhile: the newest one is taken" in capsys.readouterr().err
    with pytest.raises(OrchestraError, match="step 10 could not be used: manifest"):
        checkpoint_process.ask(place, 10, "eval", {})


def test_what_lies_in_the_fallback_is_listed_verified_and_exported(
    run: RunDir, orchestra: CommandLine, tmp_path: Path
) -> None:
    configure(run, checkpoint=CheckpointConfig(fallback_dir=str(tmp_path / "second")))
    second = fallback_place(run, str(tmp_path / "second"))
    assert second is not None
    assert len(json.loads(orchestra("checkpoint", "ls", "llama-1", "--json").out)) == 2
    # A newer one there, and a replica of one that lies in the run's own place: it is listed once, and kept.
    for step in (20, 30):
        save(second, transformer(MODEL, seed=step), step)
    rows = json.loads(orchestra("checkpoint", "ls", "llama-1", "--json").out)
    found = [(row["step"], row["place"], row["on_line"]) for row in rows]
    own = str(run.checkpoints)
    assert found == [(10, own, True), (20, own, True), (30, second, True)]
    assert f"step 30 is in {second}" in " ".join(orchestra("checkpoint", "ls", "llama-1").out.split())
    assert "step 30: intact" in orchestra("checkpoint", "verify", "llama-1", "30").out
    exported = json.loads(orchestra("checkpoint", "export", "llama-1", "--to", "hf", "--json").out)
    assert exported["step"] == 30
    assert "removed" not in orchestra("checkpoint", "ls", "llama-1", "--prune").err
    assert len(list(Path(second).glob("step-*"))) == len(list(run.checkpoints.glob("step-*"))) == 2
    flip(second, 30)
    assert "step 30: DAMAGED" in orchestra("checkpoint", "verify", "llama-1", "30", code=1).out


def cut(run: RunDir, step: int) -> None:
    file = run.checkpoints / f"step-{step:08d}" / "00000-00.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def test_ls_lists_every_checkpoint_within_80_columns(run: RunDir, orchestra: CommandLine) -> None:
    out = orchestra("checkpoint", "ls", "lla").out
    header, *rows = out.splitlines()
    assert header.split() == ["STEP", "SIZE", "AGE", "LAYOUT", "LOSS", "CHECKED"]
    assert [row.split()[0] for row in rows[:2]] == ["10", "20"]
    assert rows[1].split()[-2:] == ["2.8000", "sizes"]
    assert "orchestra checkpoint verify llama-1` reads" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines() if not line.startswith("in ")) <= 80


def test_ls_tells_what_is_damaged_and_what_it_did_not_read(run: RunDir, orchestra: CommandLine) -> None:
    flip(run.checkpoints, 10)
    cut(run, 20)
    (run.checkpoints / "step-00000030").mkdir()
    (run.checkpoints / "step-00000030" / "manifest.json").write_text("{}")
    intact, short, empty = orchestra.json("checkpoint", "ls", "llama-1")
    assert (intact["step"], intact["checked"]) == (10, "sizes")
    assert (short["step"], short["checked"]) == (20, "damaged")
    assert (empty["step"], empty["checked"]) == (30, "damaged")
    assert "00000-00.safetensors: it has" in short["damage"]
    assert "manifest.json" in empty["damage"]
    out = orchestra("checkpoint", "ls", "llama-1").out
    assert "step 20 is damaged" in out
    assert "sizes were checked" in out


def test_what_is_off_the_line_is_named_left_out_and_removed_when_asked_for(
    run: RunDir, orchestra: CommandLine
) -> None:
    storage = open_storage(run.checkpoints)
    for step in (10, 20):
        document = json.loads(storage.get(file_path(step, MANIFEST)))
        written = replace(decode(json.dumps(document).encode()), attempt=0, base=Base(0))
        storage.put(file_path(step, MANIFEST), encode(written))
    late = "written by attempt 0 after attempt 1 had begun at step 10"
    EventWriter(run, "rank", 1).write("restored", step=10, generation=0, later_checkpoints=[])
    on, off = orchestra.json("checkpoint", "ls", "llama-1")
    assert (on["step"], on["on_line"], on["attempt"]) == (10, True, 0)
    assert on["base"] == {"step": 0, "attempt": None}
    assert (off["step"], off["on_line"], off["off_line"]) == (20, False, late)
    assert off["checked"] == "off line"
    told = " ".join(orchestra("checkpoint", "ls", "llama-1").out.split())
    assert f"step 20 is off the line: {late}" in told
    assert [each["step"] for each in orchestra.json("checkpoint", "verify", "llama-1")] == [10]
    refused = " ".join(orchestra("checkpoint", "verify", "llama-1", "20", code=2).err.split())
    assert late in refused
    exported = orchestra.json("checkpoint", "export", "llama-1", "--to", "out")
    assert exported["step"] == 10
    answer = orchestra("checkpoint", "ls", "llama-1", "--prune")
    assert f"removed step 20: {late}" in answer.err
    assert [each["step"] for each in orchestra.json("checkpoint", "ls", "llama-1")] == [10]
    assert storage.names() == ["step-00000010"]


def test_ls_of_a_run_without_checkpoints_says_why(run: RunDir, orchestra: CommandLine) -> None:
    configure(run, checkpoint=CheckpointConfig(dir=str(run.path / "elsewhere")))
    assert "one is due every 1000 steps" in orchestra("checkpoint", "ls", "llama-1").out
    configure(run, checkpoint=CheckpointConfig(None, dir=str(run.path / "x")))
    assert "checkpoint.every_steps=null" in orchestra("checkpoint", "ls", "llama-1").out
    assert "has no checkpoint in" in orchestra("checkpoint", "verify", "llama-1", code=1).err


def test_checkpoints_at_a_url_are_found(run: RunDir, orchestra: CommandLine) -> None:
    run.checkpoints.rename(run.path / "elsewhere")
    configure(run, checkpoint=CheckpointConfig(dir=f"file://{run.path}/elsewhere"))
    assert len(orchestra.json("checkpoint", "ls", "llama-1")) == 2
    configure(run, checkpoint=CheckpointConfig(dir="nosuch://bucket/x"))
    assert "nosuch" in orchestra("checkpoint", "ls", "llama-1", code=1).err


def test_verify_reads_all_and_names_file_and_tensor(run: RunDir, orchestra: CommandLine) -> None:
    out = orchestra("checkpoint", "verify", "llama-1").out
    assert [line.split(",")[0] for line in out.splitlines()] == ["step 10: intact", "step 20: intact"]
    flip(run.checkpoints, 20, "model.layers.1.mlp.up_proj.weight")
    out = orchestra("checkpoint", "verify", "llama-1", code=1).out
    assert "step 20: DAMAGED\n  00000-00.safetensors: model.layers.1.mlp.up_proj.weight: " in out
    assert max(map(len, out.splitlines())) <= 80
    orchestra("checkpoint", "verify", "llama-1", "10")
    (record,) = orchestra.json("checkpoint", "verify", "llama-1", "20", code=1)
    (damage,) = record["damages"]
    assert (damage["file"], damage["tensor"]) == ("00000-00.safetensors", "model.layers.1.mlp.up_proj.weight")


def test_a_step_that_is_not_there_is_refused_with_those_that_are(run: RunDir, orchestra: CommandLine) -> None:
    for words in (("verify", "llama-1", "15"), ("export", "llama-1", "15", "--to", "x")):
        assert "there are 10, 20" in orchestra("checkpoint", *words, code=2).err
    assert "'ten' is no step" in orchestra("checkpoint", "verify", "llama-1", "ten", code=2).err


def test_export_takes_the_newest_that_is_intact(run: RunDir, orchestra: CommandLine) -> None:
    export = ("checkpoint", "export", "llama-1")
    before = sorted(run.path.rglob("*"))
    plan = orchestra.json(*export, "--to", "out", "--dry-run")
    assert (plan["step"], plan["written"], Path("out").exists()) == (20, False, False)
    flip(run.checkpoints, 20)
    done = orchestra(*export, "--to", "out", "--format", "hf")
    assert done.err.startswith("passed over step 20: 00000-00.safetensors: model.norm.weight: ")
    assert "step 10 of llama-1" in done.out
    assert "no tokenizer is written: this model reads bytes" in done.out
    assert open_folder("out").dtypes == ["F32"]
    assert sorted(run.path.rglob("*")) == before
    assert "step 20 is damaged" in orchestra(*export, "20", "--to", "no", code=1).err
    cut(run, 10)
    assert "none of llama-1's 2 checkpoints" in orchestra(*export, "--to", "no", code=1).err
    assert not Path("no").exists()


def test_what_a_newer_version_wrote_is_not_passed_over(run: RunDir, orchestra: CommandLine) -> None:
    """An older step is another model."""
    manifest = run.checkpoints / "step-00000020" / "manifest.json"
    document = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**document, "schema_version": document["schema_version"] + 1}))
    rows = orchestra.json("checkpoint", "ls", "llama-1")
    assert [(row["step"], row["checked"]) for row in rows] == [(10, "sizes"), (20, "newer")]
    assert "step 20 cannot be told here" in orchestra("checkpoint", "ls", "llama-1").out
    for words in (("checkpoint", "export", "llama-1", "--to", "out"), ("generate", "llama-1", "x")):
        refused = " ".join(orchestra(*words, code=1).err.split())
        assert "the checkpoint of step 20 cannot be told here" in refused
        assert "or say which older step to take" in refused
    assert orchestra.json("checkpoint", "export", "llama-1", "10", "--to", "out")["step"] == 10


def test_what_the_storage_does_not_give_now_is_neither_damaged_nor_passed_over(
    run: RunDir, orchestra: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = LocalStorage.get

    def get(self: LocalStorage, path: str) -> bytes:
        if path.startswith("step-00000020/"):
            raise StorageError(f"{path}: Forbidden") from PermissionError()
        return read(self, path)

    monkeypatch.setattr(LocalStorage, "get", get)
    rows = orchestra.json("checkpoint", "ls", "llama-1")
    assert [(row["step"], row["checked"]) for row in rows] == [(10, "sizes"), (20, "unread")]
    assert "step 20 cannot be read now: " in orchestra("checkpoint", "ls", "llama-1").out
    for words in (("checkpoint", "export", "llama-1", "--to", "out"), ("generate", "llama-1", "x")):
        refused = " ".join(orchestra(*words, code=1).err.split())
        assert "the checkpoint of step 20 cannot be read now: " in refused
        assert "try again, or say which other step to take" in refused
    assert orchestra.json("checkpoint", "export", "llama-1", "10", "--to", "out")["step"] == 10


def test_export_takes_the_tokenizer_of_the_data_along(run: RunDir, orchestra: CommandLine) -> None:
    file, export = Path("tokenizer.json"), ("checkpoint", "export", "llama-1", "--to")
    tokenizer = Tokenizer(WordLevel({"<|endoftext|>": 0, "a": 1, "b": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(file))
    Path("a.txt").write_text("a b\n" * 100)
    pack(plan_pack(PackRequest(["a.txt"], "packed", str(file), None, "text", 1)))
    configure(run, data=DataConfig(source=Source.tokens, path=str(Path("packed").absolute())))
    assert "with tokenizer.json, which packed the data" in orchestra(*export, "out").out
    assert Path("out/tokenizer.json").read_bytes() == file.read_bytes()
    assert json.loads(Path("out/generation_config.json").read_text())["eos_token_id"] == 0
    planned = orchestra.json(*export, "dry", "--dry-run")["files"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(planned)
    Path("moved.json").write_bytes(file.read_bytes())
    file.write_text("{}")
    # One that did not pack the data is not taken for it.
    assert "name it with --tokenizer FILE" in " ".join(orchestra(*export, "without").out.split())
    assert not list(Path("without").glob("tokenizer*"))
    assert "is not the file that packed" in orchestra(*export, "x", "--tokenizer", str(file), code=2).err
    orchestra(*export, "named", "--tokenizer", "moved.json")
    assert Path("named/tokenizer.json").read_bytes() == Path("moved.json").read_bytes()


def test_transformers_encodes_text_by_an_exported_tokenizer_as_it_was_packed(
    run: RunDir, orchestra: CommandLine
) -> None:
    made = Tokenizer(BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = Metaspace(), MetaspaceDecoder()
    made.train_from_iterator(["some text of words"], BpeTrainer(special_tokens=["<unk>", "<fin>"]))
    Path("own").mkdir()
    made.save("own/tokenizer.json")
    Path("a.txt").write_text("some text of words\n" * 100)
    pack(plan_pack(PackRequest(["a.txt"], "packed", "own", "<fin>", "text", 1)))
    # transformers' own class of Qwen3's tokenizers splits text its own way.
    model = replace(MODEL, qk_norm=True)
    save(run.checkpoints, transformer(model), 30)
    data = DataConfig(source=Source.tokens, path=str(Path("packed").absolute()))
    configure(run, model=model, data=data)
    orchestra("checkpoint", "export", "llama-1", "--to", "out")
    theirs: Any = transformers.AutoTokenizer.from_pretrained("out", local_files_only=True)
    words = "some words of text"
    assert theirs(words)["input_ids"] == made.encode(words, add_special_tokens=False).ids
    assert (theirs.eos_token, theirs.eos_token_id) == ("<fin>", made.token_to_id("<fin>"))


def test_an_exported_model_has_all_places_that_it_was_trained_on(run: RunDir, orchestra: CommandLine) -> None:
    for seq_len, expected in ((16, MODEL.max_position_embeddings), (100_000, 100_000)):
        configure(run, train=TrainConfig(seq_len=seq_len))
        orchestra("checkpoint", "export", "llama-1", "--to", f"out-{seq_len}")
        document = json.loads(Path(f"out-{seq_len}/config.json").read_text())
        assert document["max_position_embeddings"] == expected


def test_export_refuses_what_it_cannot_write(run: RunDir, orchestra: CommandLine) -> None:
    export = ("checkpoint", "export", "llama-1", "--to")
    assert "copy it to its place" in orchestra(*export, "s3://bucket/x", code=2).err
    assert "exists already" in orchestra(*export, "runs", code=2).err
    Path("file").write_text("")
    assert f"--to {Path('file/x').absolute()}: cannot be written" in orchestra(*export, "file/x", code=2).err
    assert "no size" in orchestra(*export, "x", "--max-shard-size", "5 apples", code=2).err
    configure(run, model=replace(MODEL, family=Family.gpt))
    assert "model.family=gpt has no Hugging Face form" in orchestra(*export, "x", code=1).err


def test_import_prints_a_command_that_composes(run: RunDir, orchestra: CommandLine) -> None:
    sizes = ("--max-shard-size", "50KB", "--dtype", "bf16")
    orchestra("checkpoint", "export", "llama-1", "--to", "my model", *sizes)
    out = orchestra("checkpoint", "import", "my model").out
    assert "BF16" in out
    assert max(len(line) for line in out.splitlines() if str(run.path.parents[1]) not in line) <= 80
    command = shlex.split(out[out.index("  orchestra run") :].replace("\\\n", " "))
    assert command[:2] == ["orchestra", "run"]
    assert compose(command[2:]).config.model.hidden_size == 48
    record = orchestra.json("checkpoint", "import", "my model")
    assert record["overrides"] == command[2:]
    assert record["model"]["family"] == "llama"
    (Path("my model") / "tokenizer.json").write_text("{}")
    assert "data pack TEXT" in orchestra("checkpoint", "import", "my model").out
    (Path("my model") / "config.json").write_text('{"model_type": "gpt_neox"}')
    assert "another architecture" in orchestra("checkpoint", "import", "my model", code=1).err


# The same on checkpoints and weights in an object store, spoken to over HTTP.


@pytest.fixture
def remote(run: RunDir, bucket: str) -> Storage:
    """The place of a checkpoint of the run, of step 10, in a bucket."""
    place = f"s3://{bucket}/checkpoints"
    configure(run, checkpoint=CheckpointConfig(dir=place))
    save(place, transformer(MODEL), 10)
    return open_storage(place)


@pytest.mark.slow
def test_checkpoints_in_a_bucket_are_listed_verified_exported_and_started_from(
    remote: Storage, orchestra: CommandLine
) -> None:
    (record,) = orchestra.json("checkpoint", "ls", "llama-1")
    assert (record["step"], record["checked"]) == (10, "sizes")
    (report,) = orchestra.json("checkpoint", "verify", "llama-1")
    assert report["intact"]
    size = ("--max-shard-size", "100KB")
    written = orchestra.json("checkpoint", "export", "llama-1", "--to", "out", *size)
    model = transformer(MODEL)
    assert written["num_parameters"] == sum(parameter.numel() for parameter in model.parameters())

    for file in Path("out").iterdir():
        remote.put(f"published/llama/{file.name}", file.read_bytes())
    place = f"{remote.place}/published/llama"
    assert orchestra.json("checkpoint", "import", place)["overrides"][0] == f"model.init_from={place}"
    # As one rank tells the others where the weights lie.
    storage, name, manifest = from_json(json.loads(json.dumps(to_json(open_folder(place)))))
    (chunk,) = manifest.tensors["model.norm.weight"].chunks
    content = bytearray(chunk.num_bytes)
    storage.read_into(f"{name}/{chunk.file}", chunk.begin, memoryview(content))
    assert bytes(content) == model.norm.weight.detach().numpy().tobytes()


def test_damage_in_a_bucket_is_found(remote: Storage, orchestra: CommandLine) -> None:
    flip(remote.place, 10)
    (report,) = orchestra.json("checkpoint", "verify", "llama-1", code=1)
    assert report["damages"][0]["tensor"] == "model.norm.weight"
    assert "passed over step 10" in orchestra("checkpoint", "export", "llama-1", "--to", "out", code=1).err
    assert not Path("out").exists()
    (file,) = read_manifest(remote, 10).files
    remote.remove(file_path(10, file))
    (record,) = orchestra.json("checkpoint", "ls", "llama-1")
    assert record["damage"] == f"{file}: it is missing"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("300", 300), ("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), ("2k", 2000), ("1Ti", 1 << 40)],
)
def test_sizes_are_decimal_or_binary_as_they_are_written(text: str, num_bytes: int) -> None:
    assert _size(text) == num_bytes


def test_the_token_that_ends_a_document_comes_from_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    request = PackRequest([str(tmp_path / "a.txt")], str(tmp_path / "packed"), "bytes", None, "text", 1)
    pack(plan_pack(request))
    for path in ("packed", "packed.bin"):
        data = DataConfig(source=Source.tokens, path=str(tmp_path / path))
        assert tokenizer_of(data).end_of_text == 256
    assert tokenizer_of(DataConfig(source=Source.tokens, path="/gone")).name is None
    assert tokenizer_of(DataConfig(source=Source.tokens, path="s3://bucket/x")).end_of_text is None


def test_layouts_are_short() -> None:
    assert layout_text({"dp": 2, "tp": 1}) == "dp2"
    assert layout_text({"dp": 4, "tp": 2, "zero": 3}) == "dp4 tp2 zero3"
    assert layout_text({"dp": 1}) == "1 rank"
