"""A closure for one minibatch: what ``optimizer.step`` evaluates, once or twice."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext._torch import is_divided, map_leaves, rest, tensors_in
from kfqn_ext.calling import call
from kfqn_ext.geometry import fraction_size
from kfqn_ext.optim.targets import Sampler, loss_of_samples, sampler_for, terms_per_datum


class Minibatch:
    """Loss of a model on one minibatch, as a closure for ``step``.

    Example:
        >>> import torch
        >>> from kfqn_ext.optim import KBFGS, Minibatch
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0)
        >>> batch = Minibatch(model, torch.nn.functional.cross_entropy, torch.rand(8, 4), torch.arange(8) % 3)
        >>> loss = optimizer.step(batch)
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        x: Any,
        y: Any,
        sample_targets: Sampler | None = None,
    ) -> None:
        """Hold a minibatch.

        Args:
            model: The model.
            loss_fn: Maps (model output, y) to a scalar, a mean over data unless the optimizer was told "sum". Where it
                is a module, its own parameters get the gradient of the first pass alone; clearing it is up to you.
            x: The model's input; data along dimension 0 of each tensor. A tuple or list is several inputs,
                ``model(*x)``, and a mapping several by name, ``model(**x)``. A single one of these is ``(x,)``.
            y: The targets; tensors may be in tuples, lists, mappings and dataclasses, as the model's outputs may.
            sample_targets: f(output, y, generator) -> targets from the predictive distribution, for optimizers that
                sample (KFAC). Not needed for cross entropy, binary cross entropy with logits and squared error of
                ``torch.nn``; for a loss that averages nothing but data, one of :mod:`kfqn_ext.optim.targets`.

        Raises:
            ValueError: If ``x`` is a tensor without data.
        """
        first = next(iter(tensors_in(x)), None)
        is_empty = first is not None and not first.is_nested and first.ndim > 0 and first.shape[0] == 0
        if is_empty or (isinstance(x, Tensor) and x.ndim == 0):
            raise ValueError(
                f"Minibatch: the input has shape {[] if first is None else list(first.shape)}, so there is no datum to "
                "learn from. Drop empty batches (DataLoader(drop_last=True))."
            )
        self.model = model
        self.loss_fn = loss_fn
        self.x = x
        self.y = y
        self.sample_targets = sample_targets

    def loss(self) -> Tensor:
        """Evaluate the loss.

        Raises:
            ValueError: If the loss is not a scalar.
            TypeError: If the model takes no such inputs.
        """
        return self._checked(self.loss_fn(self.output(), self.y))

    def output(self) -> Any:
        """Run the model on the minibatch.

        Raises:
            TypeError: If the model takes no such inputs.
        """
        return call(self.model, self.x)

    def __call__(self) -> Tensor:
        """Clear gradients, evaluate the loss, run its backward pass, and return it."""
        rest(self.model)
        divided = [p for p in self.model.parameters() if is_divided(p)]
        loss = self.loss()
        self.model.zero_grad()
        for p in divided:  # in whose places the forward pass has put gathered ones
            p.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def fraction(self, fraction: float) -> "Minibatch":
        """The first data of the minibatch: a fraction of it, rounded up, of every tensor in inputs and targets.

        Raises:
            TypeError: If there is anything else in them than tensors, ``None`` and truth values.
            ValueError: If their tensors differ in their number of data.
        """
        total = next((t.shape[0] for t in tensors_in((self.x, self.y)) if not t.is_nested and t.ndim > 0), 0)
        size = fraction_size(total, fraction)

        def cut(value: Any) -> Any:
            if value is None or isinstance(value, bool) or (isinstance(value, Tensor) and value.ndim == 0):
                return value
            if not isinstance(value, Tensor) or value.is_nested:
                raise TypeError(
                    f"Minibatch: can't take a part of {'a nested ' * isinstance(value, Tensor)}{type(value).__name__}; "
                    "inputs and targets must be tensors with data along dimension 0. Use second_pass_fraction=1.0."
                )
            if value.shape[0] != total:
                raise ValueError(
                    f"Minibatch: can't take a part, for one tensor has {total} data along dimension 0 and another, of "
                    f"shape {list(value.shape)}, {value.shape[0]}. Use second_pass_fraction=1.0."
                )
            return value[:size]

        x, y = map_leaves(cut, self.x), map_leaves(cut, self.y)
        return Minibatch(self.model, self.loss_fn, x, y, self.sample_targets)

    def sampled(self, seed: int) -> None:
        """Run a forward and backward pass of the loss with targets sampled from the predictive distribution.

        A loss that averages K likelihood terms of a datum is scaled by √K, so that the second moment of its
        gradients is the curvature of the loss.

        Args:
            seed: Seeds the sampling, which leaves the global random numbers alone.

        Raises:
            ValueError: If nothing says what distribution the loss belongs to.
            TypeError: If the model takes no such inputs.
        """
        output, loss_fn = self.output(), self.loss_fn
        if self.sample_targets is not None:
            sampler, averaged = self.sample_targets, False
        else:
            sampler, averaged = sampler_for(loss_fn)
            loss_fn = loss_of_samples(loss_fn)
        where = next(chain(tensors_in(output), self.model.parameters())).device
        generator = torch.Generator(where).manual_seed(seed)
        y = sampler(output, self.y, generator)
        loss = self._checked(loss_fn(output, y)) * terms_per_datum(output, self.y, sampler, averaged) ** 0.5
        loss.backward()  # type: ignore[no-untyped-call]

    @staticmethod
    def _checked(loss: Tensor) -> Tensor:
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"type {type(loss).__name__}"
            raise ValueError(
                f"Minibatch: the loss has {found}, not that of a scalar. Let loss_fn average over data, "
                "e.g. reduction='mean' or .mean()."
            )
        return loss
