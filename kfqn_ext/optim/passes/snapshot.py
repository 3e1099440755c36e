"""What a pass may write to in a model beside gradients: found by versions, kept by value, put back."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kfqn_ext._torch import is_on_host, version_of

_PLAIN = (bool, int, float, str, type(None))


class Snapshot:
    """The buffers and plain attributes of a model at one moment, and the values of its buffers.

    A buffer that a pass replaces by another tensor, as ``self.count = self.count + 1`` does, is put back, and so is a
    number that a module counts with. Of other tensors only those are kept that are asked for: a copy of all
    parameters would be a second network.
    """

    def __init__(self, model: nn.Module, others: Iterable[Tensor] = ()) -> None:
        """Keep a model's buffers, its plain attributes, and ``others``."""
        self._slots = list(_slots(model))
        self._values = [_Value(t) for t in (*model.buffers(), *others) if _has_memory(t)]

    @torch.no_grad()
    def put_back(self) -> None:
        """Let the model have what it had; what has not changed is not written to."""
        for slots, name, value in self._slots:
            if slots.get(name) is not value:
                slots[name] = value
        for value in self._values:
            value.put_back()


class _Value:
    """The numbers of a tensor at one moment."""

    def __init__(self, tensor: Tensor) -> None:
        # Of ``data``, whose writes raise no version of the tensor's own: a graph may still need that.
        self._tensor, self._memory, self._version = tensor, tensor.data, version_of(tensor)
        self._numbers = _without_repetitions(self._memory).clone()

    def put_back(self) -> None:
        if self._tensor.data_ptr() != self._memory.data_ptr():  # after ``t.data = ...``
            self._tensor.data = self._memory
        now = _without_repetitions(self._memory)
        # What ``t.data.add_()`` writes raises no version.
        unwritten = version_of(self._tensor) == self._version
        if not (unwritten and is_on_host(now) and torch.equal(now, self._numbers)):
            now.copy_(self._numbers)


class Marks:
    """Tells which parameters, and which tensors that are plain attributes, are written to from now on."""

    def __init__(self, model: nn.Module, by_value: bool = False) -> None:
        """Take note of them; ``by_value``: of their norms too, which also tell of ``p.data.mul_()``."""
        self._marks = {name: (t, version_of(t), t.data_ptr()) for name, t in tensors(model).items()}
        self._norms = self._norms_now() if by_value else None

    def written(self) -> set[str]:
        """Their names. It waits for the device where norms are compared."""
        found = {
            name for name, (t, version, at) in self._marks.items() if version_of(t) != version or t.data_ptr() != at
        }
        if self._norms is not None:
            now = self._norms_now()
            found |= {name for name, norm in self._norms.items() if not torch.equal(norm, now[name])}
        return found

    @torch.no_grad()
    def _norms_now(self) -> dict[str, Tensor]:
        floats = {name: t for name, (t, *_) in self._marks.items() if t.is_floating_point()}
        return dict(zip(floats, torch._foreach_norm(list(floats.values())), strict=True)) if floats else {}


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and tensors that are plain attributes of a module, by name."""
    found: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if _has_memory(p)}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and _has_memory(value):
                found[f"{prefix}.{name}"] = value
    return found


@contextmanager
def left_as_it_was(module: nn.Module, others: Collection[Tensor] = ()) -> Iterator[None]:
    """Restore a module's buffers, plain attributes and every ``.grad`` afterwards, and the values of ``others``.

    In the body there is no ``.grad`` at first.
    """
    grads = [(p, p.grad) for p in module.parameters()]
    snapshot = Snapshot(module, others)
    try:
        for p, _ in grads:
            p.grad = None
        yield
    finally:
        snapshot.put_back()
        for p, grad in grads:
            p.grad = grad


def _slots(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Where modules hold buffers and plain attributes: a dictionary, a key, and what is there."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            yield module._buffers, name, buffer
        for name, value in vars(module).items():
            if isinstance(value, (*_PLAIN, Tensor)):
                yield vars(module), name, value


def _has_memory(t: Tensor) -> bool:
    """Whether a tensor's numbers lie in one block of memory, so that it can be seen whether that is another one."""
    return t.layout == torch.strided and type(t) in (Tensor, nn.Parameter, nn.Buffer)


def _without_repetitions(t: Tensor) -> Tensor:
    """A view in which no number stands for several, as those of ``expand`` do: they can't be written to."""
    for dim, stride in enumerate(t.stride()):
        if stride == 0 and t.shape[dim] > 1:
            t = t.narrow(dim, 0, 1)
    return t
