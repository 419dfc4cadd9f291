"""What a small model found, as overrides of a larger one."""

from __future__ import annotations

from conf.schema import Config
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.model.parametrization import ParameterShare, share_of
from orchestra.report.carry_over import carried_over

CPU = Situation("run", num_gpus=0)
LARGE = ["model.hidden_size=1024", "model.intermediate_size=3584", "model.num_hidden_layers=16"]


def test_the_overrides_make_a_larger_model_count_from_the_small_one() -> None:
    assert carried_over(Config()) is None
    small = compose(["experiment=mup_small", "optim.lr=3e-3"], CPU).config
    words = carried_over(small)
    assert words is not None
    large = compose([*words.split(), *LARGE], CPU).config
    assert (large.optim.lr, large.model.init_std) == (3e-3, small.model.init_std)
    name = "layers.0.mlp.down_proj.weight"
    assert share_of(small.model, small.optim)(name) == ParameterShare()
    # Four times as wide and four times as deep.
    assert share_of(large.model, large.optim)(name) == ParameterShare(1 / 2 / 2, 1 / 4 / 4)
    # Whoever carries over from the large one counts from the small one still.
    again = carried_over(large)
    assert again is not None
    assert "optim.mup.base_hidden=256 optim.mup.base_layers=4 optim.mup.base_head_dim=32" in again
