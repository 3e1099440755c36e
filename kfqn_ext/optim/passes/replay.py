"""The second pass over a minibatch: everything as in the first one, except the parameters that have moved."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from kfqn_ext._torch import is_batch_norm, is_dropout
from kfqn_ext.extensions import input_gradients_only
from kfqn_ext.optim.passes.draws import generator_state
from kfqn_ext.optim.passes.snapshot import Marks, Snapshot, left_as_it_was, tensors

_LOOKS = 2  # first passes in which parameters are compared by value: at first a copy equals what it is to follow


class Replay:
    """Repeats a forward-backward pass with torch's random numbers of the first and without traces of the second.

    Attributes:
        is_exact: Whether nothing is known that makes the repetition of the last pass another computation.
        drew: Whether the last pass whose modules do not tell drew random numbers.
        with_gradients: Whether parameters get a gradient in the repetition too, for a body that reads it.
    """

    def __init__(self, model: nn.Module) -> None:
        """Prepare to replay passes of a model."""
        self.is_exact = True
        self.with_gradients = False
        self._model = model
        self._states: dict[int | None, Tensor] = {}  # of the generators: of each CUDA device, and of the CPU under None
        self.drew = False
        self._looks = 0
        self._written: set[str] = set()  # parameters and plain tensors that passes write to
        self._before: Snapshot | None = None
        self._marks = Marks(nn.Module())

    def record(self) -> None:
        """Remember torch's random number generators, and what a forward pass changes, before the first pass."""
        self._states = {device: generator_state(device) for device in (None, *cuda_devices(self._model))}
        self._before = Snapshot(self._model, [t for t in self._kept() if not t.requires_grad])
        self._marks = Marks(self._model, by_value=self._looks < _LOOKS)
        self._looks += 1

    def look_for_draws(self) -> None:
        """Find out, after the first pass, whether it drew random numbers; states live on the host."""
        if not self._mixes_data:
            self.drew = any(not torch.equal(generator_state(d), state) for d, state in self._states.items())

    def look_for_writes(self) -> None:
        """Find out, after the first pass, whether it wrote to a frozen copy: then it can be repeated the next time."""
        found, trained = self._marks.written() - self._written, dict(self._model.named_parameters())
        self.is_exact = all(name in trained and trained[name].requires_grad for name in found)
        self._written |= found

    @property
    def repeatable_in_part(self) -> bool:
        """Whether the first data of a minibatch alone give what they gave within it, for all that is known."""
        return not self.drew and not self._mixes_data

    @property
    def _mixes_data(self) -> bool:
        return any(_depends_on_batch(module) for module in self._model.modules())

    def _kept(self) -> list[Tensor]:
        """What passes are known to write to, beside buffers and numbers."""
        return [t for name, t in tensors(self._model).items() if name in self._written] if self._written else []

    @contextmanager
    def repeat(self, layers: Iterable[nn.Module]) -> Iterator[None]:
        """Run the body on the recorded random numbers, buffers and counters; afterwards all is as it was.

        A pass may be repeated more than once: where the first repetition fails, or another needs other targets.

        The buffers are BatchNorm's running statistics above all: a minibatch counts once. Parameters get no
        gradient in the body unless it reads them, but a closure may clear ``.grad``, so that is put aside.

        Args:
            layers: Those whose output gradients are wanted.

        Yields:
            Nothing.
        """
        devices = [device for device in self._states if device is not None]
        with (
            left_as_it_was(self._model, self._kept()),
            torch.random.fork_rng(devices=devices),
            nullcontext() if self.with_gradients else input_gradients_only(self._model, layers),
        ):
            if self._before is not None:
                self._before.put_back()
            marks = Marks(self._model)
            for device, state in self._states.items():
                torch.set_rng_state(state) if device is None else torch.cuda.set_rng_state(state, device)
            yield
            found = marks.written() - self._written
            self.is_exact &= not found
            self._written |= found


def cuda_devices(model: nn.Module) -> list[int]:
    """The CUDA devices that a model's parameters are on."""
    return sorted({p.device.index for p in model.parameters() if p.is_cuda})


def _depends_on_batch(module: nn.Module) -> bool:
    """Whether what a module makes of one datum depends on the rest of the batch."""
    drops = is_dropout(module) and module.training and module.p > 0  # the same numbers, other data
    return drops or (is_batch_norm(module) and (module.training or module.running_mean is None))
