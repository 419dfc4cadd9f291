"""Which held-out data a configuration has, and what is refused of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import BlendPart, Config, DataConfig, Source
from orchestra.cli import main
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.config.rules.eval_rules import rule_eval_documents
from orchestra.config.rules.place_rules import rule_data_files
from orchestra.data.held_out import HELD_OUT, held_out_data
from orchestra.data.token_files import index_text, read_index
from orchestra.errors import ConfigError, DataError
from orchestra.train.inference.evaluation import open_held_out

RUN = Situation(verb="run")


def config_of(*overrides: str) -> Config:
    return compose(["cluster.device=cpu", "cluster.gpus_per_node=1", *overrides], RUN).config


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        config_of(*overrides)
    return "\n".join(refused.value.problems)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    (folder / "text.txt").write_text("What is held out is never trained on. " * 50)
    assert main(["data", "pack", str(folder / "text.txt"), "--output", str(folder / "text")]) == 0
    return folder / "text"


def test_the_library_holds_files_out_by_itself() -> None:
    assert list(held_out_data(config_of("eval.every_steps=10"))) == [HELD_OUT]
    assert list(held_out_data(config_of())) == [HELD_OUT]


def test_named_sources_one_without_a_name_and_blends(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(packed.parent)
    tokens = ("data=tokens", "data.path=text", "train.seq_len=16", "eval.every_steps=10")
    named = held_out_data(config_of(*tokens, "eval.data={wiki:{path:text},code:{source:stdlib}}"))
    # Absolute: a frozen run means the same from any folder.
    assert named["wiki"].path == str(packed)
    assert (named["wiki"].source, named["code"].source) == (Source.tokens, Source.stdlib)
    # A section that is null takes others as one that is empty does.
    instead = held_out_data(config_of(*tokens, "eval.data=null", "eval.data={wiki:{path:text}}"))
    assert list(instead) == ["wiki"]
    one = held_out_data(config_of(*tokens, "eval.data={path:text}"))
    assert [(name, data.path) for name, data in one.items()] == [(HELD_OUT, str(packed))]
    dotted = held_out_data(config_of(*tokens, "eval.data.wiki.path=text"))
    assert dotted["wiki"].path == str(packed)
    blended = held_out_data(config_of(*tokens, "eval.data={mix:{blend:[{path:text},{path:text,weight:2}]}}"))
    assert [(part.path, part.weight) for part in blended["mix"].blend] == [
        (str(packed), 1.0),
        (str(packed), 2.0),
    ]
    assert Path(str(named["wiki"].path)).is_absolute()


def test_what_is_refused_says_what_to_write(packed: Path) -> None:
    tokens = ("data=tokens", f"data.path={packed}", "train.seq_len=16")
    assert "give eval.data={NAME:{path:PREFIX}}" in problems(*tokens, "eval.every_steps=10")
    assert "give eval.data={NAME:{path:PREFIX}}" in problems(*tokens, "eval.at_start=true")
    every = (*tokens, "eval.every_steps=10")
    assert "eval.data.wiki: no file" in problems(*every, "eval.data={wiki:{path:nowhere}}")
    assert "eval.data.wiki.pth: no such key" in problems(*every, "eval.data={wiki:{pth:x}}")
    assert "expected stdlib, tokens or package.module:name" in problems(
        *every, "eval.data={wiki:{source:web}}"
    )
    assert "eval.data.wiki.source={}: expected" in problems(*every, "eval.data={wiki:{source:{}}}")
    assert "there is no eval.data.wiki to delete it from" in problems(*every, "~eval.data.wiki.path")
    assert "give either path" in problems(*every, "eval.data={wiki:{source:tokens}}")
    assert "expected a section" in problems(*every, "eval.data={wiki:3}")
    assert "give eval.data=" in problems(*every, "eval.data=null")
    assert "a name has" in problems(*every, "eval.data={_a:{source:stdlib}}")
    assert "expected {path: PREFIX" in problems(*every, "eval.data={a:{blend:[{path:x,weight:-1}]}}")
    assert "eval.steps" in problems("eval.steps=0")


def test_a_metric_is_one_of_the_held_out_losses() -> None:
    assert config_of("eval.every_steps=5", "run.metric=eval/held_out/loss").run.metric == "eval/held_out/loss"
    assert "set eval.every_steps" in problems("run.metric=eval/held_out/loss")
    assert "did you mean eval/held_out/loss" in problems("eval.every_steps=5", "run.metric=eval/heldout/loss")
    best = ("eval.every_steps=5", "run.metric=eval/held_out/loss", "checkpoint.keep_best=1")
    assert "no multiple of eval.every_steps=5" in problems(*best, "checkpoint.every_steps=12")
    assert config_of(*best, "checkpoint.every_steps=10").checkpoint.every_steps == 10


class Plugged:
    """Samples of one token, which name the token that ends their documents where they are told it."""

    num_samples, vocab_size, identity = 4, 257, "zeros"

    def __init__(self, seq_len: int, *, separator_id: int | None = None) -> None:
        self.tokens = [0] * (seq_len + 1)
        if separator_id is not None:
            self.separator_id = separator_id

    def sample(self, index: int) -> list[int]:  # noqa: ARG002
        return self.tokens


def test_a_plug_in_names_the_token_that_ends_documents_where_the_model_goes_by_it(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    tokens = ("data=tokens", f"data.path={packed}", "train.seq_len=16", "eval.every_steps=10")
    masked = "data.document_masks=true"

    plugged = f"source:'{__name__}:Plugged'"
    named = {"own": 256, "other": 10}
    sources = [f"{name}:{{{plugged},source_options:{{separator_id:{of}}}}}" for name, of in named.items()]
    far = f"eval.data={{nameless:{{{plugged}}},{','.join(sources)}}}"

    config = config_of(*tokens, far)
    told = problems(*tokens, masked, far)
    assert "eval.data.nameless: data.document_masks=true goes by the token" in told
    assert "let what it returns have separator_id=256" in told
    assert "eval.data.other: token 10 ends its documents and 256 those of the training, by which" in told
    assert "let them end with the same token" in told
    assert "eval.data.own" not in told
    unchecked = replace(config, data=replace(config.data, document_masks=True))
    held_out = held_out_data(unchecked)
    assert list(open_held_out({"own": held_out["own"]}, unchecked)) == ["own"]
    with pytest.raises(DataError, match=r"eval\.data\.other: token 10 ends its documents and 256"):
        open_held_out({"other": held_out["other"]}, unchecked)
    # A run that goes on is evaluated as it was, where nothing says that the tokens differ.
    refused = [list(rule_eval_documents(unchecked, Situation(verb))) for verb in ("run", "resume")]
    assert [["nameless" in each for each in of_verb] for of_verb in refused] == [[True, False], [False]]


def test_documents_of_a_plug_in_are_masked_where_it_says_what_ends_them(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    plugged = (f"data.source={__name__}:Plugged", "train.seq_len=16", "data.document_masks=true")
    assert "let what it returns have separator_id" in problems(*plugged)
    named = (*plugged, "data.source_options.separator_id=256")
    wiki = ("eval.every_steps=10", f"eval.data={{wiki:{{path:{packed}}}}}")
    config = config_of(*named, *wiki)
    assert list(open_held_out(held_out_data(config), config)) == ["wiki"]
    other = problems(*plugged, "data.source_options.separator_id=10", *wiki)
    assert "eval.data.wiki: token 256 ends its documents and 10 those of the training, by which" in other
    assert "pack it with the same --separator" in other


def test_documents_that_another_token_ends_are_refused_before_anything_starts(
    packed: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    Path(f"{other}.bin").write_bytes(Path(f"{packed}.bin").read_bytes())
    index = replace(read_index(Path(f"{packed}.json")), separator_id=10)
    Path(f"{other}.json").write_text(index_text(index))
    # Of a blend always, as where its files are opened.
    parts = [BlendPart(str(packed)), BlendPart(str(other))]
    (problem,) = rule_data_files(Config(data=DataConfig(Source.tokens, blend=parts)), RUN)
    assert "data.blend" in problem
    assert "bytes (separator 256)" in problem
    assert "bytes (separator 10)" in problem
    tokens = ("data=tokens", f"data.path={packed}", "train.seq_len=16", "eval.every_steps=10")
    mixed = f"eval.data={{mix:{{blend:[{{path:{packed}}},{{path:{other}}}]}}}}"
    assert "eval.data.mix.blend: " in problems(*tokens, mixed)
    # Of held-out data where the model goes by that token.
    held_out = f"eval.data={{wiki:{{path:{other}}}}}"
    config = config_of(*tokens, held_out)
    assert list(open_held_out(held_out_data(config), config)) == ["wiki"]
    assert "eval.data.wiki: token 10 ends its documents and 256" in problems(
        *tokens, held_out, "data.document_masks=true"
    )
    masked = replace(config, data=replace(config.data, document_masks=True))
    with pytest.raises(DataError, match="token 10 ends its documents and 256"):
        open_held_out(held_out_data(masked), masked)
    stdlib = ("eval.every_steps=10", "train.seq_len=16", "data.document_masks=true")
    assert "eval.data.wiki: token 10 ends its documents and 256" in problems(*stdlib, held_out)
