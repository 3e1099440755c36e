"""Which data of a batch are measured."""

from typing import Any

import pytest
import torch
from backpack import backpack
from torch import nn

from kfqn_ext.extensions import InputGram, KBFGSQuantities, KFACFactors, extend
from kfqn_ext.geometry import fraction_size


@pytest.mark.parametrize("ext", [KBFGSQuantities, KFACFactors, InputGram])
@pytest.mark.parametrize("wrong", [1, 0, True, 0.0, -0.5, 1.5, float("nan"), [], [0.5], "all", {0}, torch.arange(2)])
def test_what_is_neither_a_share_nor_indices_is_refused(ext: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"subsampling=.*float in \(0.0, 1.0\], or a list of indices"):
        ext(subsampling=wrong)


@pytest.mark.parametrize("indices", [[0, 2], (0, 2), range(0, 3, 2)])
def test_indices(indices: Any) -> None:
    layer, x, moments = extend(nn.Linear(3, 2)), torch.randn(4, 5, 3), KBFGSQuantities(subsampling=indices)
    with backpack(moments):
        layer(x).sum().backward()
    q = moments[layer]
    assert (q.num_data, q.num_locations) == (2, 5)
    torch.testing.assert_close(q.a_bar[:-1], x[[0, 2]].mean((0, 1)))


def test_a_share_is_rounded_up_but_for_rounding_errors() -> None:
    for total in range(1, 201):
        for percent in range(1, 101):
            assert fraction_size(total, percent / 100) == -(-total * percent // 100)
