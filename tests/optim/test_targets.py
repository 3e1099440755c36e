"""Sampled targets: the second moment of their gradients is the Hessian of the loss by the model's output."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext.optim import KFAC, Minibatch
from kfqn_ext.optim.targets import bernoulli, categorical, gaussian, sampler_for

F64 = torch.float64
SAMPLES = 40_000


class Outputs(nn.Module):
    """A model whose output for every datum is given: the gradient by it is what a minibatch's loss sends back."""

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = nn.Parameter(output)

    def forward(self, x: Tensor) -> Tensor:
        return self.output


def second_moment(loss_fn: Any, output: Tensor, y: Tensor, reduction: str = "mean", sampler: Any = None) -> Tensor:
    """Mean over data of ∂h ∂hᵀ of one datum's loss, over many samples: [K, K] for output [N, ...] with K numbers each.

    Each of the N data appears many times in one big batch.
    """
    copies = SAMPLES // len(output)
    model = Outputs(output.repeat(copies, *(1,) * (output.ndim - 1)))
    batch = Minibatch(model, loss_fn, torch.ones(1), y.repeat(copies, *(1,) * (y.ndim - 1)), sampler)
    batch.sampled(seed=3)
    assert model.output.grad is not None
    g = model.output.grad.reshape(len(model.output), -1) * (len(model.output) if reduction == "mean" else 1)
    return g.T @ g / len(g)


def hessian(loss_fn: Any, output: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Mean over data of the Hessian of one datum's loss by its output, [K, K]."""
    H = torch.autograd.functional.hessian(lambda h: loss_fn(h, y), output)
    n = len(output)
    H = H.reshape(n, output[0].numel(), n, output[0].numel())
    return torch.einsum("nknl->kl", H) / (1 if reduction == "mean" else n)


def assert_moment(loss_fn: Any, output: Tensor, y: Tensor, reduction: str = "mean", sampler: Any = None) -> None:
    got, want = second_moment(loss_fn, output, y, reduction, sampler), hessian(loss_fn, output, y, reduction)
    # The error of a mean over 40,000 samples is about 0.5 to 1 % of the largest entry.
    assert (got - want).abs().max() <= 0.05 * want.abs().max(), (got, want)


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64)


def unit(*shape: int) -> Tensor:
    """Fixed targets in [0, 1]."""
    return torch.rand(*shape, dtype=F64, generator=torch.Generator().manual_seed(0))


classes = torch.tensor([0, 2, 1, 2])
dense = torch.tensor([[0, 2, 1], [2, 2, 1]])  # two data, three positions
holes = torch.tensor([[0, -100, 1], [2, -100, -100]])  # two terms of the first datum, one of the second
zeros = torch.tensor([[0, 2, 0], [2, 0, 1]])
soft = torch.softmax(unit(4, 3), 1)
LOSSES: dict[str, tuple[Any, tuple[int, ...], Tensor]] = {
    "cross entropy": (F.cross_entropy, (4, 3), classes),
    "cross entropy, module": (nn.CrossEntropyLoss(), (4, 3), classes),
    "cross entropy, class probabilities": (F.cross_entropy, (4, 3), soft),
    "cross entropy, positions": (F.cross_entropy, (2, 3, 3), dense),
    "cross entropy, positions in two dimensions": (F.cross_entropy, (2, 3, 3, 1), dense.unsqueeze(-1)),
    "cross entropy, class probabilities at positions": (
        F.cross_entropy,
        (2, 3, 3),
        F.one_hot(dense, 3).movedim(-1, 1).to(F64),
    ),
    "cross entropy, ignored positions": (F.cross_entropy, (2, 3, 3), holes),
    "cross entropy, ignored data": (F.cross_entropy, (4, 3), torch.tensor([0, -100, 1, 2])),
    "cross entropy, ignore_index of a partial": (partial(F.cross_entropy, ignore_index=0), (2, 3, 3), zeros),
    "cross entropy, ignore_index of a module": (nn.CrossEntropyLoss(ignore_index=0), (2, 3, 3), zeros),
    "binary cross entropy": (F.binary_cross_entropy_with_logits, (4, 3), unit(4, 3)),
    "binary cross entropy, module": (nn.BCEWithLogitsLoss(), (4, 2, 2), unit(4, 2, 2)),
    "binary cross entropy, one output": (F.binary_cross_entropy_with_logits, (4,), unit(4)),
    "squared error": (F.mse_loss, (4, 3), unit(4, 3)),
    "squared error, module": (nn.MSELoss(), (4, 2, 2), unit(4, 2, 2)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_second_moment_is_the_hessian_by_the_outputs(name: str) -> None:
    loss_fn, shape, y = LOSSES[name]
    assert_moment(loss_fn, logits(*shape), y)


SUMS: dict[str, tuple[Any, tuple[int, ...], Tensor]] = {
    "cross entropy": (partial(F.cross_entropy, reduction="sum"), (2, 3, 3), holes),
    "binary cross entropy": (nn.BCEWithLogitsLoss(reduction="sum"), (4, 3), unit(4, 3)),
    "squared error": (nn.MSELoss(reduction="sum"), (4, 3), unit(4, 3)),
}


@pytest.mark.parametrize("name", SUMS)
def test_of_a_loss_that_is_a_sum_too(name: str) -> None:
    loss_fn, shape, y = SUMS[name]
    assert_moment(loss_fn, logits(*shape), y, reduction="sum")


def pixel_sum(output: Tensor, y: Tensor) -> Tensor:
    """Summed over pixels, averaged over data, as the autoencoders of the paper have it."""
    return F.binary_cross_entropy_with_logits(output, y, reduction="none").flatten(1).sum(1).mean()


def test_of_a_loss_of_ones_own_with_a_named_sampler() -> None:
    assert_moment(pixel_sum, logits(4, 3), unit(4, 3), sampler=bernoulli)


def test_of_one_datum_without_a_batch_dimension() -> None:
    """Logits [C] and a class []: one term, not 1/C of one."""
    z = logits(3)
    total = torch.zeros(3, 3, dtype=F64)
    for seed in range(500):
        model = Outputs(z.clone())
        Minibatch(model, F.cross_entropy, torch.ones(1), torch.tensor(1)).sampled(seed)
        assert model.output.grad is not None
        total += torch.outer(model.output.grad, model.output.grad) / 500
    want = torch.autograd.functional.hessian(lambda h: F.cross_entropy(h, torch.tensor(1)), z)
    assert (total - want).abs().max() <= 0.25 * want.abs().max()


# ------------------------------------------------------------------ the samplers


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_classes_have_the_frequencies_of_the_softmax() -> None:
    z = logits(3)
    y = categorical(z.expand(SAMPLES, 3), torch.zeros(SAMPLES, dtype=torch.long), generator())
    assert (torch.bincount(y, minlength=3) / SAMPLES - z.softmax(0)).abs().max() < 0.01


def test_bits_have_the_frequency_of_the_sigmoid() -> None:
    z = logits(3)
    y = bernoulli(z.expand(SAMPLES, 3), torch.zeros(SAMPLES, 3), generator())
    assert set(y.unique().tolist()) == {0.0, 1.0} and y.dtype == torch.float32
    assert (y.mean(0) - z.sigmoid()).abs().max() < 0.01


def test_real_targets_have_variance_one_half() -> None:
    z = logits(3)
    y = gaussian(z.expand(SAMPLES, 3), torch.zeros(SAMPLES, 3), generator())
    assert (y.mean(0) - z).abs().max() < 0.02 and (y.var(0) - 0.5).abs().max() < 0.02


def test_ignored_positions_stay_ignored() -> None:
    y = categorical(logits(2, 3, 3), holes, generator())
    assert torch.equal(y == -100, holes == -100) and y.max() < 3
    y = categorical(logits(2, 3, 3), zeros, generator(), ignore_index=0)
    assert torch.equal(y == -100, zeros == 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["cross entropy", "binary cross entropy", "squared error"])
def test_low_precision_outputs(name: str, dtype: torch.dtype) -> None:
    loss_fn, shape, y = LOSSES[name]
    model = Outputs(logits(*shape).to(dtype))
    Minibatch(model, loss_fn, torch.ones(1), y.to(dtype) if y.is_floating_point() else y).sampled(seed=0)
    assert model.output.grad is not None and torch.isfinite(model.output.grad).all()


@pytest.mark.parametrize("name", ["cross entropy", "binary cross entropy", "squared error"])
def test_a_seed_fixes_the_sample_and_the_global_random_numbers_stay(name: str) -> None:
    loss_fn, shape, y = LOSSES[name]
    model, gradients, state = Outputs(logits(*shape)), [], torch.get_rng_state()
    for seed in (5, 5, 6):
        model.zero_grad()
        Minibatch(model, loss_fn, torch.ones(1), y).sampled(seed)
        assert model.output.grad is not None
        gradients.append(model.output.grad.clone())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(gradients[0], gradients[1]) and not torch.equal(gradients[0], gradients[2])


# ------------------------------------------------------------------ which losses are known


KNOWN: list[tuple[Any, Callable[..., Tensor], bool]] = [
    (F.cross_entropy, categorical, True),
    (nn.CrossEntropyLoss(), categorical, True),
    (nn.CrossEntropyLoss(reduction="sum"), categorical, False),
    (partial(F.cross_entropy, reduction="sum"), categorical, False),
    (partial(partial(F.cross_entropy, ignore_index=1), reduction="mean"), categorical, True),
    (partial(F.cross_entropy, weight=None, label_smoothing=0.0), categorical, True),
    (F.binary_cross_entropy_with_logits, bernoulli, True),
    (nn.BCEWithLogitsLoss(reduction="sum"), bernoulli, False),
    (F.mse_loss, gaussian, True),
    (partial(F.mse_loss, reduction="sum"), gaussian, False),
    (nn.MSELoss(), gaussian, True),
]


@pytest.mark.parametrize(("loss_fn", "sampler", "averaged"), KNOWN)
def test_known_losses(loss_fn: Any, sampler: Any, averaged: bool) -> None:
    got, got_averaged = sampler_for(loss_fn)
    assert (got.func if isinstance(got, partial) else got) is sampler and got_averaged is averaged


def test_ignore_index_reaches_the_sampler() -> None:
    for loss_fn in (partial(F.cross_entropy, ignore_index=7), nn.CrossEntropyLoss(ignore_index=7)):
        sampler: Any = sampler_for(loss_fn)[0]
        assert sampler.keywords == {"ignore_index": 7}


class MyLoss(nn.CrossEntropyLoss):
    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return super().forward(output * 2, y)


w = torch.ones(3)
REFUSED: list[tuple[Any, str]] = [
    (nn.CrossEntropyLoss(weight=w), "the loss CrossEntropyLoss: its weight makes it no negative log-likelihood"),
    (partial(F.cross_entropy, weight=w), "its weight makes it no negative log-likelihood"),
    (nn.CrossEntropyLoss(label_smoothing=0.1), "the loss CrossEntropyLoss: label_smoothing makes it no"),
    (partial(F.cross_entropy, label_smoothing=0.1), "label_smoothing makes it no"),
    (nn.BCEWithLogitsLoss(pos_weight=w), "the loss BCEWithLogitsLoss: its pos_weight makes it no"),
    (nn.BCEWithLogitsLoss(weight=w), "the loss BCEWithLogitsLoss: its weight makes it no"),
    (partial(F.binary_cross_entropy_with_logits, pos_weight=w), "its pos_weight makes it no"),
    (partial(F.mse_loss, weight=w), "its weight makes it no"),
    (F.l1_loss, "the loss l1_loss: it is not a loss whose distribution is known here"),
    (nn.SmoothL1Loss(), "the loss SmoothL1Loss: it is not a loss"),
    (pixel_sum, "the loss pixel_sum: it is not a loss"),
    (lambda output, y: output.mean(), "the loss <lambda>: it is not a loss"),
    (MyLoss(), "the loss MyLoss: it is not a loss"),
]


@pytest.mark.parametrize(("loss_fn", "message"), REFUSED)
def test_other_losses_are_refused_by_name_with_the_way_out(loss_fn: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        sampler_for(loss_fn)
    assert "sample_targets" in str(error.value) and "kfqn_ext.optim.targets" in str(error.value)


def test_a_refused_loss_changes_nothing_and_has_a_way_out() -> None:
    model = nn.Linear(4, 3)
    optimizer, before = (
        KFAC(model, recipe=KFAC.recipe_stable, momentum=0.9, lr=0.1, damping=1.0),
        model.weight.detach().clone(),
    )
    x, y = torch.randn(6, 4), torch.rand(6, 3)
    with pytest.raises(ValueError, match="pixel_sum"):
        optimizer.step(Minibatch(model, pixel_sum, x, y))
    assert torch.equal(model.weight, before) and all(p.requires_grad for p in model.parameters())
    optimizer.step(Minibatch(model, pixel_sum, x, y, sample_targets=bernoulli))
    assert not torch.equal(model.weight, before)
