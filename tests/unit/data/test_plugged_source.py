"""data.source=package.module:name: what a plug-in gives, and what is said of one that is no source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conf.schema import Config, DataConfig, EvalConfig, TrainConfig
from orchestra.data.held_out import held_out_data
from orchestra.data.order import sample_ids
from orchestra.data.source import open_source
from orchestra.errors import ConfigError, DamagedDataError, DataError
from orchestra.plugins import named_in
from orchestra.train.build import meta_model
from orchestra.train.check_plugins import look_at

SEQ_LEN = 8


class Counting:
    """Sample i counts from i on."""

    vocab_size = 30
    num_samples = 20
    identity = "numbers"

    def __init__(self, seq_len: int, *, step: int = 1) -> None:
        self.length, self.step = seq_len + 1, step

    def sample(self, index: int) -> Any:
        return [index + self.step * place for place in range(self.length)]


class Random(Counting):
    def sample(self, index: int) -> Any:  # noqa: ARG002
        return np.random.default_rng().integers(0, 30, self.length)


class Ending(Counting):
    def __init__(self, seq_len: int, *, separator_id: Any = None) -> None:
        super().__init__(seq_len, step=0)
        self.separator_id = separator_id


class Nameless(Counting):
    identity = ""


class Empty(Counting):
    num_samples = 0


class Broken(Counting):
    def sample(self, index: int) -> Any:
        raise OSError(f"no disk has {index}")


class Short(Counting):
    def sample(self, index: int) -> Any:  # noqa: ARG002
        return [1, 2]


class Real(Counting):
    def sample(self, index: int) -> Any:  # noqa: ARG002
        return np.ones(self.length)


def data_of(name: str, **options: Any) -> DataConfig:
    return DataConfig(source=f"{__name__}:{name}", source_options=options)


def config_of(data: DataConfig, **others: Any) -> Config:
    return Config(data=data, train=TrainConfig(seq_len=SEQ_LEN), **others)


def test_samples_come_in_orchestras_own_order() -> None:
    source = open_source(data_of("Counting", step=0), SEQ_LEN)
    ids = source.ids_at(7, 5, seed=3)
    assert (ids == sample_ids(7, 5, num_samples=20, seed=3)).all()
    out = np.empty(SEQ_LEN + 1, dtype=np.int64)
    source.read(int(ids[0]), out)
    assert (out == ids[0]).all()


def test_a_look_tells_vocabularies_and_which_data_they_are() -> None:
    held_out = {"far": {"source": f"{__name__}:Counting", "source_options": {"step": 2}}}
    found = look_at(config_of(data_of("Counting"), eval=EvalConfig(data=held_out)))
    # Of the last sample one with a step of 2 leaves the vocabulary.
    (problem,) = found.problems
    assert "eval.data.far.source" in problem
    assert "sample(19) has the token 35" in problem
    assert found.vocabularies == {"data.source": 30}
    assert found.identity == "numbers, 20 samples of 30 words"


def test_a_look_tells_which_token_ends_documents_where_a_source_says_so() -> None:
    def entry(separator_id: Any) -> dict[str, Any]:
        return {"source": f"{__name__}:Ending", "source_options": {"separator_id": separator_id}}

    held_out = {"a": entry(29), "b": entry(None), "c": entry(30), "d": entry(True)}
    found = look_at(config_of(DataConfig(), eval=EvalConfig(data=held_out)))
    assert found.separators == {"eval.data.a.source": 29}
    assert [problem.partition("; ")[0].rpartition(": ")[2] for problem in found.problems] == [
        "separator_id=30",
        "separator_id=True",
    ]
    assert all("expected a token from 0 to 29, or None" in problem for problem in found.problems)


def test_documents_of_a_plug_in_are_masked_by_the_separator_that_it_names() -> None:
    data = replace(data_of("Ending", separator_id=29), document_masks=True)
    assert meta_model(config_of(data)).separator_id == 29
    nameless = replace(data, source_options={})
    with pytest.raises(DataError, match=r"names none; let what it returns have separator_id"):
        meta_model(config_of(nameless))
    assert meta_model(config_of(replace(nameless, document_masks=False))).separator_id is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Random", "sample(0) returned other tokens when it was asked again"),
        ("Nameless", "identity=''; expected words"),
        ("Empty", "num_samples=0; expected a whole number, 1 or more"),
        ("Broken", "sample(0) failed: OSError: no disk has 0"),
        ("Short", "sample(0) returned [2] of int64; return train.seq_len + 1 = 9 integers"),
        ("Real", "sample(0) returned [9] of float64"),
        ("data_of", "data.source_options.name is missing"),
    ],
)
def test_what_is_no_source_is_said_before_anything_starts(name: str, words: str) -> None:
    problems = look_at(config_of(data_of(name))).problems
    assert words in problems[0], problems


def test_a_run_keeps_the_data_that_it_began_with() -> None:
    mine = data_of("Counting")
    open_source(replace(mine, source_identity="numbers, 20 samples of 30 words"), SEQ_LEN)
    with pytest.raises(DamagedDataError, match="the run began with letters: other samples would come next"):
        open_source(replace(mine, source_identity="letters"), SEQ_LEN)


def test_a_sample_that_goes_wrong_later_is_named() -> None:
    source = open_source(data_of("Counting", step=3), SEQ_LEN)
    out = np.empty(SEQ_LEN + 1, dtype=np.int64)
    source.read(5, out)
    with pytest.raises(DataError, match=r"sample\(6\) has the token 30; its vocab_size=30 allows 0 to 29"):
        source.read(6, out)


def test_held_out_data_come_from_plug_ins_too() -> None:
    alone = {"source": "here:Corpus", "source_options": {"part": "b"}}
    config = config_of(replace(data_of("Counting"), source_identity="numbers"), eval=EvalConfig(data=alone))
    (found,) = held_out_data(config).values()
    assert (found.source, found.source_options, found.source_identity) == ("here:Corpus", {"part": "b"}, None)
    assert [plugin.key for plugin in named_in(config)] == ["data.source", "eval.data.source"]
    # Of the training's own plug-in nothing is known to be held out.
    assert held_out_data(replace(config, eval=EvalConfig())) == {}
    wrong = {
        "a": {"source": "b"},
        "c": {"path": "d", "source_options": {"e": 1}},
        "f": {**alone, "path": "g"},
    }
    with pytest.raises(ConfigError) as refused:
        held_out_data(replace(config, eval=EvalConfig(data=wrong)))
    assert [problem.partition(":")[0] for problem in refused.value.problems] == [
        "eval.data.a.source=b",
        "eval.data.c.source_options are for a plug-in, source=package.module",
        "eval.data.f",
    ]
