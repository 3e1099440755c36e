"""A λ of the paper's that is given where ε is meant: a warning says which is which, and the form that takes it."""

import re
import warnings
from typing import Any

import pytest
from torch import nn

import kfqn_ext.optim
from tests.optim.family import FAMILY, rows

RELATIVE = rows(lambda member: member.relative)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("name", RELATIVE)
def test_it_warns_and_the_form_that_it_names_is_the_paper_s(name: str) -> None:
    with pytest.warns(UserWarning, match="mean eigenvalue") as caught:
        FAMILY[name].make(model(), lr=0.1, damping=30.0)
    (form,) = re.findall(r"build (\w+)\.as_printed", str(caught[0].message))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        printed: Any = getattr(kfqn_ext.optim, form).as_printed(model(), lr=0.1, damping=30.0)
    assert not printed.recipe.length.is_set


@pytest.mark.parametrize("name", RELATIVE)
def test_a_group_that_is_added_later_is_asked_too(name: str) -> None:
    net = model()
    optimizer = FAMILY[name].build(net, params=net[0].parameters())
    with pytest.warns(UserWarning, match="mean eigenvalue"):
        optimizer.add_param_group({"params": net[2].parameters(), "damping": 30.0})


@pytest.mark.parametrize("name", RELATIVE)
def test_it_is_silent_about_what_is_usual(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for damping in (0.03, 0.3, 1.0):
            FAMILY[name].make(model(), lr=0.1, damping=damping)
