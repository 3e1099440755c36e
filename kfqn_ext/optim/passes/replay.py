"""The second pass over a minibatch: everything as in the first one, except the parameters that have moved."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kfqn_ext._torch import is_batch_norm, is_dropout
from kfqn_ext.extensions import input_gradients_only


class Replay:
    """Repeats a forward-backward pass with torch's random numbers of the first and without traces of the second."""

    def __init__(self, model: nn.Module) -> None:
        """Prepare to replay passes of a model."""
        self._model = model
        self._states: dict[int | None, Tensor] = {}  # of the generators: of each CUDA device, and of the CPU under None
        self._drew = False  # random numbers, in the last pass whose modules do not tell

    def record(self) -> None:
        """Remember the states of torch's random number generators, before the first pass."""
        self._states = {device: _generator_state(device) for device in (None, *cuda_devices(self._model))}

    def look_for_draws(self) -> None:
        """Find out, after the first pass, whether it drew random numbers; states live on the host."""
        if not self._mixes_data:
            self._drew = any(not torch.equal(_generator_state(d), state) for d, state in self._states.items())

    @property
    def repeatable_in_part(self) -> bool:
        """Whether the first data of a minibatch alone give what they gave within it, for all that is known."""
        return not self._drew and not self._mixes_data

    @property
    def _mixes_data(self) -> bool:
        return any(_depends_on_batch(module) for module in self._model.modules())

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
        devices = [device for device in self._states if device is not None]
        with (
            left_as_it_was(self._model),
            torch.random.fork_rng(devices=devices),
            input_gradients_only(self._model, layers),
        ):
            for device, state in self._states.items():
                torch.set_rng_state(state) if device is None else torch.cuda.set_rng_state(state, device)
            yield


@contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Restore a module's buffers and every ``.grad`` afterwards; in the body there is no ``.grad`` at first.

    A buffer that the body replaces by another tensor, as ``self.count = self.count + 1`` does, is put back.
    """
    grads = [(p, p.grad) for p in module.parameters()]
    buffers = [(m._buffers, name, b) for m in module.modules() for name, b in m._buffers.items()]
    saved = [(b, b.clone()) for b in module.buffers()]
    try:
        for p, _ in grads:
            p.grad = None
        yield
    finally:
        with torch.no_grad():
            for b, value in saved:
                b.copy_(value)
        for slots, name, buffer in buffers:
            slots[name] = buffer
        for p, grad in grads:
            p.grad = grad


def cuda_devices(model: nn.Module) -> list[int]:
    """The CUDA devices that a model's parameters are on."""
    return sorted({p.device.index for p in model.parameters() if p.is_cuda})


def _generator_state(device: int | None) -> Tensor:
    return torch.get_rng_state() if device is None else torch.cuda.get_rng_state(device)


def _depends_on_batch(module: nn.Module) -> bool:
    """Whether what a module makes of one datum depends on the rest of the batch."""
    drops = is_dropout(module) and module.training and module.p > 0  # the same numbers, other data
    return drops or (is_batch_norm(module) and (module.training or module.running_mean is None))
