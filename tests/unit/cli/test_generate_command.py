"""The tokenizer of a run's data: bytes, the file that packed it and no other; and text from tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command_line import CommandLine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from conf.schema import DataConfig, Source
from orchestra.cli import main
from orchestra.cli.checkpoint.checkpoint_export_command import tokenizer_of as tokenizer_to_export
from orchestra.cli.generate_command import continuation, tokenizer_of
from orchestra.data.tokenizer import BYTES, ByteTokenizer, open_tokenizer
from orchestra.errors import ConfigError

TEXT = "def generate(text): return text + text\n" * 30


def write_tokenizer(path: Path, vocab_size: int) -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    # An end of text with a name that nobody guesses.
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<fin>"], initial_alphabet=alphabet)
    made.train_from_iterator([TEXT], trainer)
    made.save(str(path))


@pytest.fixture
def packed(tmp_path: Path) -> DataConfig:
    (tmp_path / "text.txt").write_text(TEXT)
    write_tokenizer(tmp_path / "tokenizer.json", 300)
    arguments = ["--output", str(tmp_path / "packed"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert main(["data", "pack", str(tmp_path / "text.txt"), *arguments, "--separator", "<fin>"]) == 0
    return DataConfig(source=Source.tokens, path=str(tmp_path / "packed"))


def test_text_goes_through_the_tokenizer_that_packed_the_data_and_back(packed: DataConfig) -> None:
    tokenizer = tokenizer_of(packed, None)
    (encoded,) = tokenizer.encode(["return text é"])
    assert tokenizer.decode(encoded.tolist()) == "return text é"
    assert tokenizer.separator_id == 0


def test_bytes_that_are_no_character_do_not_fail() -> None:
    tokenizer = tokenizer_of(DataConfig(), None)
    assert tokenizer.name == BYTES
    assert tokenizer.decode([104, 105, 0xC3, 256]) == "hi\ufffd"
    with pytest.raises(ConfigError, match=r"--tokenizer own.json: the run reads bytes"):
        tokenizer_of(DataConfig(), "own.json")


def test_the_tokenizer_comes_along_with_the_tokens_and_with_an_export(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    write_tokenizer(tmp_path / "own" / "mine.json", 300)
    (tmp_path / "a.txt").write_text(TEXT)
    own = ("--tokenizer", str(tmp_path / "own" / "mine.json"), "--separator", "<fin>")
    pack = ("data", "pack", str(tmp_path / "a.txt"), *own, "--output")
    assert main([*pack, str(tmp_path / "packed" / "a")]) == 0
    copy = tmp_path / "packed" / "mine.json"
    data = DataConfig(source=Source.tokens, path=str(tmp_path / "packed" / "a"))
    assert tokenizer_to_export(data).file == copy
    assert tokenizer_of(data, None).sha256
    # Another one of that name stays what it is, and does not pass for it.
    copy.write_text("{}")
    assert main([*pack, str(tmp_path / "packed" / "b")]) == 0
    assert copy.read_text() == "{}"
    assert tokenizer_to_export(data).file is None


def test_a_tokenizer_that_is_gone_or_another_one_is_refused(packed: DataConfig, tmp_path: Path) -> None:
    file, other = tmp_path / "tokenizer.json", tmp_path / "other.json"
    write_tokenizer(other, 265)
    with pytest.raises(ConfigError, match="give the one that packed it with --tokenizer FILE"):
        tokenizer_of(packed, str(other))
    moved = tmp_path / "moved"
    moved.mkdir()
    file.rename(moved / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"no file .*; give --tokenizer FILE"):
        tokenizer_of(packed, None)
    assert tokenizer_of(packed, str(moved)).separator_id == 0
    gone = DataConfig(source=Source.tokens, path=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"the tokenizer is not known.*; give .* with --tokenizer FILE"):
        tokenizer_of(gone, None)
    # With the data gone too, or of somebody else's, there is nothing that it could be compared with.
    with pytest.raises(
        ConfigError, match=r"no end-of-text token .*; name its eos_token in a tokenizer_config.json"
    ):
        tokenizer_of(gone, str(moved))
    (moved / "tokenizer_config.json").write_text('{"eos_token": "<fin>"}')
    for data in (gone, DataConfig(source="package.module:name")):
        assert tokenizer_of(data, str(moved)).separator_id == 0
    with pytest.raises(ConfigError, match="cannot be read"):
        tokenizer_of(gone, str(tmp_path / "nothing.json"))
    with pytest.raises(ConfigError, match=r"data.source=package.module:name gives tokens.* --tokenizer FILE"):
        tokenizer_of(DataConfig(source="package.module:name"), None)


def test_what_is_sampled_is_read_after_its_beginning(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    # As Llama 2 and T5: a word begins with a mark, which at the beginning of a text stands for no space.
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator([TEXT], trainers.BpeTrainer(special_tokens=["<unk>", "</s>"]))
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path))
    before, whole = (tokens.tolist() for tokens in tokenizer.encode(["return text", "return text + text"]))
    assert whole[: len(before)] == before
    assert continuation(tokenizer, before, whole[len(before) :]) == " + text"
    assert continuation(tokenizer, [], whole) == "return text + text"
    assert continuation(ByteTokenizer(), list(b"a "), list(b" b\xc3")) == " b\ufffd"


def test_text_that_is_no_utf_8_is_refused(orchestra: CommandLine) -> None:
    # What Python makes of the byte 0xff in an argument.
    refused = orchestra("generate", "run", "ab\udcff", code=2)
    assert "argument TEXT: character 2 is not UTF-8" in refused.err
