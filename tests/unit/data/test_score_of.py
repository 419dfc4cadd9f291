"""Which loss checkpoint.keep_best compares: on other data, or measured otherwise, it is another one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.schema import Config, EvalConfig, RunConfig
from orchestra.errors import DataError
from orchestra.train.inference.evaluation import score_of

WriteTokens = Callable[..., str]


def config_of(data: dict[str, Any], metric: str = "eval/wiki/loss", **evaluation: Any) -> Config:
    return replace(
        Config(), eval=EvalConfig(every_steps=5, data=data, **evaluation), run=RunConfig(metric=metric)
    )


def test_it_follows_what_the_tokens_are_not_where_they_lie(write_tokens: WriteTokens, tmp_path: Path) -> None:
    tokens = np.arange(5000, dtype=np.uint16) % 257
    path, elsewhere = write_tokens("wiki", tokens), str(tmp_path / "moved")
    before = score_of(config_of({"wiki": {"path": path}}), 1)
    assert before.startswith("eval/wiki/loss ")
    for end in (".bin", ".json"):
        shutil.copy(path + end, elsewhere + end)
    assert score_of(config_of({"wiki": {"path": elsewhere}}), 1) == before
    # One that nothing is compared by may be another one.
    code = {"path": write_tokens("code", tokens[::-1].copy())}
    assert score_of(config_of({"wiki": {"path": path}, "code": code}), 1) == before
    assert score_of(config_of({"wiki": code}), 1) != before
    write_tokens("wiki", tokens[::-1].copy())
    assert score_of(config_of({"wiki": {"path": path}}), 1) != before
    Path(f"{path}.json").unlink()
    with pytest.raises(DataError, match=r"wiki\.json"):
        score_of(config_of({"wiki": {"path": path}}), 1)


def test_it_follows_what_alters_the_number_and_nothing_else() -> None:
    config = config_of({"wiki": {"source": "stdlib"}})
    before = score_of(config, 1)
    train = config.train
    others = [
        replace(config, eval=replace(config.eval, steps=3)),
        replace(config, eval=replace(config.eval, steps=None)),
        replace(config, train=replace(train, global_batch_size=2)),
        replace(config, train=replace(train, seq_len=train.seq_len // 2)),
        replace(config, train=replace(train, loss="my.losses:focal")),
        replace(config, data=replace(config.data, document_masks=True)),
        replace(config, eval=replace(config.eval, data={"wiki": {"source": "my.data:words"}})),
    ]
    assert len({before, *(score_of(other, 1) for other in others)}) == len(others) + 1
    same = [
        replace(config, eval=replace(config.eval, every_steps=10, at_start=True)),
        replace(config, train=replace(train, steps=7, micro_batch_size=1)),
        replace(config, data=replace(config.data, prefetch_batches=1)),
    ]
    assert {score_of(other, 1) for other in same} == {before}


def test_the_loss_of_the_training_is_another_one_where_somebody_elses_is_trained() -> None:
    config = config_of({"wiki": {"source": "stdlib"}}, metric="loss")
    assert score_of(config, 1).startswith("loss ")
    assert score_of(replace(config, eval=replace(config.eval, steps=3)), 1) == score_of(config, 1)
    assert score_of(replace(config, train=replace(config.train, loss="my.losses:focal")), 1) != score_of(
        config, 1
    )
