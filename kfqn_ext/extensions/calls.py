"""Which call of a layer an extension is called for, in which backward pass, and whether it was h = W a + b."""

import copy
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast
from weakref import WeakSet

from torch import nn

from kfqn_ext._torch import accumulates_gradient_of, current_backward, has_global_forward_hooks, version_of
from kfqn_ext.extensions.active import active
from kfqn_ext.extensions.elsewhere import is_used_elsewhere
from kfqn_ext.geometry import LayerGeometry, geometry_of

T = TypeVar("T")
CALL = "_kfqn_call"
SHARED = "_kfqn_shared"
_PLAIN = frozenset((int, float, bool, str, tuple))


class Call:
    """One call of a layer, alive as long as its graph: tells a second pass through it from another call."""

    def __init__(self, module: nn.Module) -> None:
        """Remember what the layer multiplies with, without holding it, and where the call is made."""
        self.within: int = current_backward()  # in which backward pass, as in a reentrant checkpoint; -1 for none
        self.thread = threading.get_ident()
        self._used, self.trained = [], False
        for name in ("weight", "bias"):
            p = module._parameters.get(name)  # the one that torch.func.functional_call puts there
            if p is not None:
                self._used.append((name, weakref.ref(p), version_of(p)))
                self.trained |= p.requires_grad
        self._settings = _settings(module)
        self._own_output = not has_global_forward_hooks()
        reached = active().reached
        self._zeros = tuple(reached.zeros) if module in reached.layers else None

    def objection(self, module: nn.Module) -> str | None:
        """Why this was not h = W a + b with the W and b that the layer has now; None where it was."""
        if not self._own_output:
            return (
                "a global forward hook (torch.nn.modules.module.register_module_forward_hook) may have changed its "
                "output before that was watched; register the hook on the modules"
            )
        for name, used, version in self._used:
            held = module._parameters.get(name)
            if held is None or held is not used():
                return (
                    f"it was called with another {name} than it has, as by torch.func.functional_call, whose gradient "
                    "is not the layer's own"
                )
            if version_of(held) != version:
                return (
                    f"its {name} was changed in place between forward and backward pass; change it when the backward "
                    "pass has ended"
                )
        if _settings(module) != self._settings and self._geometry(module) != geometry_of(module):
            return "its settings (stride, padding, …) were changed since it was called; give each a layer of its own"
        return None

    def objection_to_gradient(self, module: nn.Module) -> str | None:
        """Why the weight's gradient is not that of its layer's calls and of penalties; None where nothing tells."""
        weight = module._parameters["weight"]
        if weight is None or not weight.requires_grad or not is_used_elsewhere(weight, self.thread):
            return None
        return (
            "its weight is multiplied outside of the layer too, as by F.linear(x, layer.weight): the gradient is the "
            "sum over both. Call the layer itself, whose calls are merged"
        )

    def _geometry(self, module: nn.Module) -> LayerGeometry | None:
        """The layer as it was."""
        twin = copy.copy(module)
        vars(twin).update(self._settings)
        return geometry_of(twin)

    def is_added_up(self, module: nn.Module) -> bool:
        """Whether the pass that runs adds to the weight's ``.grad`` or, where that is frozen, to that of a zero.

        A call inside a reentrant checkpoint is in a pass that adds, for torch refuses others.
        """
        weight = module._parameters["weight"]
        if weight is not None and weight.requires_grad:
            return accumulates_gradient_of(weight)
        if self._zeros is None:
            return False
        return self.within >= 0 or any(map(accumulates_gradient_of, reversed(self._zeros)))


def _settings(module: nn.Module) -> dict[str, Any]:
    """What a geometry may be read off, beside parameters; and more, as ``training``, which makes no other one."""
    return {name: value for name, value in vars(module).items() if type(value) in _PLAIN}


def shared(module: nn.Module, key: Hashable, make: Callable[[], T]) -> T:
    """What several extensions need of the call that a layer's gradient has arrived for; it is made once.

    BackPACK's own hooks have no place for it, and each extension makes its own.
    """
    found: dict[Hashable, Any] | None = module.__dict__.get(SHARED)
    if found is None:
        return make()
    if key not in found:
        found[key] = make()
    return cast(T, found[key])


def call_of(module: nn.Module) -> tuple[Any, int]:
    """The call that a layer's gradient has arrived for, as an object, and the number of the backward pass.

    Calls inside reentrant checkpoints have backward passes of their own, and count for the one around them.
    """
    call = module.__dict__.get(CALL)
    backward = current_backward()
    if call is None:  # BackPACK's own hooks, which keep the output of each call
        return module.output, backward
    return call, backward if call.within < 0 else call.within


def is_added_up(module: nn.Module) -> bool:
    """Whether the pass that runs adds up to the layer's ``.grad``, or would if that were wanted."""
    call: Call | None = module.__dict__.get(CALL)
    return call is None or shared(module, "added up", lambda: call.is_added_up(module))


def objection_to(module: nn.Module, of_grad: bool) -> tuple[str | None, bool]:
    """Why the call that a layer's gradient has arrived for is not to be measured, and whether it has a gradient of W.

    BackPACK's own hooks don't tell.

    Args:
        module: The layer.
        of_grad: Whether what is measured stands for the weight's whole gradient, and not for the call alone.
    """
    call: Call | None = module.__dict__.get(CALL)
    if call is None:
        return None, True
    why = shared(module, "objection", lambda: call.objection(module))
    if why is None and of_grad:
        why = shared(module, "objection to gradient", lambda: call.objection_to_gradient(module))
    return why, call.trained


class SingleCalls:
    """Layers that backward passes have reached through one call, and never through several: learned as passes end."""

    def __init__(self) -> None:
        """Know of no layer yet."""
        self._single: WeakSet[nn.Module] = WeakSet()
        self._several: WeakSet[nn.Module] = WeakSet()

    def __contains__(self, module: nn.Module) -> bool:
        """Whether a layer is known to be one."""
        return module in self._single and module not in self._several

    def note(self, module: nn.Module, several: bool) -> None:
        """Learn from a pass."""
        (self._several if several else self._single).add(module)
