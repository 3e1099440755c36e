"""The second pass over a minibatch: everything as in the first one, except the parameters that have moved."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from kfqn_ext.extensions import input_gradients_only
from kfqn_ext.optim.shifts import removes_shifts


class Replay:
    """Repeats a forward-backward pass with the random numbers of the first and without traces of the second."""

    def __init__(self, model: nn.Module) -> None:
        """Prepare to replay passes of a model."""
        self._model = model
        self._cpu_state: Tensor | None = None
        self._cuda_states: dict[int, Tensor] = {}

    def record(self) -> None:
        """Remember the state of the random number generators, before the first pass."""
        self._cpu_state = torch.get_rng_state()
        self._cuda_states = {device: torch.cuda.get_rng_state(device) for device in self._cuda_devices()}

    @property
    def repeatable_in_part(self) -> bool:
        """Whether the first data of a minibatch alone give what they gave within it."""
        return not any(_depends_on_batch(module) for module in self._model.modules())

    @contextmanager
    def repeat(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Run the body on the recorded random numbers; restore them, all buffers and every ``.grad`` afterwards.

        The buffers are BatchNorm's running statistics above all: a minibatch counts once. Parameters get no
        gradient in the body, but a closure may clear ``.grad``, so that is put aside.

        Args:
            layers: Those whose output gradients are wanted.

        Yields:
            Nothing.
        """
        parameters = list(self._model.parameters())
        grads = [p.grad for p in parameters]
        buffers = list(self._model.buffers())
        saved = [b.clone() for b in buffers]
        try:
            for p in parameters:
                p.grad = None
            with torch.random.fork_rng(devices=list(self._cuda_states)), input_gradients_only(self._model, layers):
                if self._cpu_state is not None:
                    torch.set_rng_state(self._cpu_state)
                for device, state in self._cuda_states.items():
                    torch.cuda.set_rng_state(state, device)
                yield
        finally:
            with torch.no_grad():
                for b, value in zip(buffers, saved, strict=True):
                    b.copy_(value)
            for p, grad in zip(parameters, grads, strict=True):
                p.grad = grad

    def _cuda_devices(self) -> set[int]:
        return {p.device.index for p in self._model.parameters() if p.is_cuda}


def _depends_on_batch(module: nn.Module) -> bool:
    """Whether what a module makes of one datum depends on the rest of the batch."""
    drops = isinstance(module, _DropoutNd) and module.training and module.p > 0  # the same numbers, other data
    return drops or (isinstance(module, _BatchNorm) and removes_shifts(module))
