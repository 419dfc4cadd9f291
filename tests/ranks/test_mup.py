"""Maximal update on layouts: a part of a parameter has the initial values and the rate of the whole."""

from __future__ import annotations

from pool import Ranks
from small_trainings import EVEN, alone, assert_equal_trainings, config_of, trained_on

from conf.schema import Config, MupConfig, Parametrization

STEPS = 8


def mup(**parallelism: object) -> Config:
    shares = MupConfig(base_hidden=8, base_layers=1, base_head_dim=2, embedding_rate=2.0)
    optim = {"parametrization": Parametrization.mup, "mup": shares}
    return config_of(EVEN, optim=optim, **parallelism)


def test_every_cut_of_the_model_trains_as_one_rank_does(ranks: Ranks) -> None:
    expected = alone(mup(), STEPS)
    for degrees in ({"zero": 3}, {"tp": 2}, {"pp": 2}):
        (found,) = trained_on(ranks(2), [mup(**degrees)], STEPS)
        assert_equal_trainings(found, expected, str(degrees))
