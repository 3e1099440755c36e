"""What cannot be left out, alone, where a step misses its target: ``python -m benchmarks.floors``.

Each floor is 1 plus the time of bare operations that have to be done beside the gradient, by the cheapest ways known
here, in units of what the target is in: SGD-m's step, or a forward-backward pass. Interleaved in one process, medians,
one thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import options
from benchmarks.contenders import CONTENDERS
from benchmarks.extraction import EXTRACTIONS, PLAIN
from benchmarks.problems import PROBLEMS, QUICK, Setup, set_up
from benchmarks.report import markdown
from benchmarks.turns import Run, interleave, prepare
from kfqn_ext import extend
from kfqn_ext.extensions import input_gradients_only
from kfqn_ext.geometry import LayerGeometry, geometry_of
from kfqn_ext.geometry.layer_pass import fraction_size
from workloads.layer_sizes import layer_sizes


@dataclass(frozen=True)
class Floor:
    """What a row of the table is made of.

    Attributes:
        row: The row that it is a floor of.
        problem: Where.
        base: What 1 is.
        done: What has to be done besides, in words.
        build: Makes that.
        ours: Makes what is measured, and what runs before it, untimed.
    """

    row: str
    problem: str
    base: str
    done: str
    build: Callable[[Setup], Run]
    ours: Callable[[Setup], tuple[Run, Run]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.parser(__doc__)
    options.add_outputs(parser)
    args = parser.parse_args(arguments)
    device = prepare(args.device)
    found: dict[str, dict[str, float]] = {}
    for problem in args.problem:
        make = partial(set_up, (QUICK if args.quick else PROBLEMS)[problem], device)
        found |= _ratios([floor for floor in FLOORS if floor.problem == problem], make, args.turns, device)
    options.finish(args, "floors", device, {"floors": found}, render)


def render(results: dict[str, Any]) -> str:
    """A row a floor that was measured."""
    rows = [["of", "is 1", "besides", "floor", "measured"]]
    for floor in FLOORS:
        if floor.row in results["floors"]:
            ratios = results["floors"][floor.row]
            rows.append([floor.row, floor.base, floor.done, *(f"{ratios[key]:.2f}" for key in ("floor", "measured"))])
    return markdown(rows)


def _ratios(
    floors: list[Floor], make: Callable[[], Setup], turns: int, device: torch.device
) -> dict[str, dict[str, float]]:
    runs = {name: build(make()) for name, build in BASES.items()}
    before, step = dict(runs), runs[SGD]
    for floor in floors:
        bare = runs[_bare(floor)] = floor.build(make())
        # As in a training step: all that it reads was last used one step ago.
        before[_bare(floor)] = lambda bare=bare: (bare(), step())
        before[floor.row], runs[floor.row] = floor.ours(make())
    times = interleave(runs, SGD, turns, device, before)
    found = {}
    for floor in floors:
        least, ours = (times.median(name) / times.median(floor.base) for name in (_bare(floor), floor.row))
        found[floor.row] = {"floor": 1 + least, "measured": ours}
    return found


def _bare(floor: Floor) -> str:
    return f"floor of {floor.row}"


def _step(contender: str, kind: str, setup: Setup) -> tuple[Run, Run]:
    steps = CONTENDERS[contender].build(setup).steps
    return steps["ordinary"], steps[kind]


def _extraction(setup: Setup) -> tuple[Run, Run]:
    run = EXTRACTIONS["KBFGSQuantities(probe=…)"](setup)
    return run, run


def _directions(dtype: torch.dtype, setup: Setup) -> Run:
    """M H_A and H_G (M H_A) of all layers, as M comes and as a parameter takes them."""
    random = partial(torch.randn, device=setup.x.device)
    sizes = layer_sizes(setup.model, setup.x)
    layers = [(random(s.I, s.J), random(s.J, s.J).to(dtype), random(s.I, s.I).to(dtype)) for s in sizes]
    return lambda: [(H_G @ (M.to(dtype) @ H_A)).float() for M, H_A, H_G in layers]


def _learning(share: float, setup: Setup) -> Run:
    """The second pass of a part, two products with H_A and H_G and a rank-2 update of both, and the directions."""
    direct = _directions(torch.bfloat16, setup)
    model, batch = extend(setup.model), setup.batch.fraction(share)
    sides = [d for s in layer_sizes(model, setup.x) for d in (s.I, s.J)]
    random = partial(torch.randn, device=setup.x.device)
    inverses = [(torch.eye(d, device=setup.x.device), random(d), random(d, 2) / d) for d in sides]

    def run() -> None:
        with input_gradients_only(model):
            batch()
        for H, y, factors in inverses:
            torch.mv(H, torch.mv(H, y))
            H.addmm_(factors, factors.T)
            H.bfloat16()
        direct()

    return run


def _learning_and_measuring(share: float, setup: Setup) -> Run:
    """The same, and ā, h̄, Σ ∂h and its noise of a part in both passes, and A s in the first."""
    learn, part = _learning(share, setup), fraction_size(len(setup.x), share)
    seen = [(module, geometry, x[:part], g[:part]) for module, geometry, x, g in _seen(setup)]

    @torch.no_grad()
    def measure(is_first: bool) -> None:
        for module, geometry, x, g in seen:
            a_bar = _sums(geometry, x, g)
            geometry.multiply(module.weight, module.bias, a_bar)
            if is_first:
                geometry.gram_product(x, a_bar.unsqueeze(-1))

    return lambda: (measure(True), learn(), measure(False))


def _sums(geometry: LayerGeometry, x: Tensor, g: Tensor) -> Tensor:
    """ā, Σ ∂h and its noise, each the cheapest way there is; ā is returned."""
    geometry.sum_outputs(g)
    geometry.bound_sum_abs(g)
    return geometry.mean_patch(x)


def _forward(setup: Setup) -> Run:
    """A forward pass of the whole minibatch."""
    return torch.no_grad()(lambda: setup.model(setup.x))


def _reading(setup: Setup) -> Run:
    """Three reads of each layer's input (ā, and A s with an s that depends on it) and two of its output gradient."""
    seen = _seen(setup)
    return lambda: [(x.sum(), x.sum(), x.sum(), g.sum(), g.sum()) for *_, x, g in seen]


def _measuring(setup: Setup) -> Run:
    """ā, A ā, Σ ∂h and its noise, without hooks and without h̄."""
    seen = _seen(setup)

    def run() -> None:
        for _, geometry, x, g in seen:
            geometry.gram_product(x, _sums(geometry, x, g).unsqueeze(-1))

    return torch.no_grad()(run)


def _seen(setup: Setup) -> list[tuple[Any, LayerGeometry, Tensor, Tensor]]:
    """Each layer's input, and its output in place of the output's gradient."""
    seen: list[tuple[Any, LayerGeometry, Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        geometry = geometry_of(module)
        assert geometry is not None
        seen.append((module, geometry, args[0].detach(), output.detach()))

    layers = [module for module in setup.model.modules() if geometry_of(module) is not None]
    handles = [layer.register_forward_hook(note) for layer in layers]
    with torch.no_grad():
        setup.model(setup.x)
    for handle in handles:
        handle.remove()
    return seen


SGD = "SGD-m's step"
BASES: dict[str, Callable[[Setup], Run]] = {
    SGD: lambda setup: CONTENDERS["sgdm"].build(setup).steps["ordinary"],
    PLAIN: EXTRACTIONS[PLAIN],
}
_CASTS = "products with H_A and H_G, casts of M and p"
_PAIR = "a forward pass, for the classifier's pair"
_PRODUCTS, _ROUNDED = (partial(_directions, dtype) for dtype in (torch.float32, torch.bfloat16))
_LEARNING = "these, a second pass, two H y, rank-2 updates, casts of H"
_MEASURING = "these, and ā, A s, h̄, Σ ∂h and its noise, bare"
_QUARTER = "MNIST autoencoder: K-BFGS, T = 1, bfloat16, curvature from a quarter"


def _of_step(row: str, problem: str, done: str, build: Callable[[Setup], Run], contender: str, kind: str) -> Floor:
    return Floor(row, problem, SGD, done, build, partial(_step, contender, kind))


FLOORS = [
    _of_step(
        "ResNet32: K-BFGS, a step that is not due, bfloat16",
        *("resnet32", _CASTS, _ROUNDED, "kbfgs-bf16", "ordinary"),
    ),
    _of_step("ResNet32: K-BFGS, T = 1, bfloat16", "resnet32", _PAIR, _forward, "kbfgs-bf16", "due"),
    Floor("ResNet32: extraction", "resnet32", PLAIN, "reading inputs and output gradients", _reading, _extraction),
    Floor("ResNet32: the same", "resnet32", PLAIN, "ā, A s, Σ ∂h and its noise, bare", _measuring, _extraction),
    _of_step("VGG16: K-BFGS, T = 1, bfloat16", "vgg16", _PAIR, _forward, "kbfgs-bf16", "due"),
    _of_step(
        "MNIST autoencoder: K-BFGS, a step that is not due",
        *("autoencoder", "products with H_A and H_G", _PRODUCTS, "kbfgs", "ordinary"),
    ),
    _of_step(
        "MNIST autoencoder: the same, bfloat16",
        *("autoencoder", _CASTS, _ROUNDED, "kbfgs-bf16", "ordinary"),
    ),
    _of_step(_QUARTER, "autoencoder", _LEARNING, partial(_learning, 0.25), "kbfgs-bf16-quarter", "due"),
    _of_step(
        "MNIST autoencoder: the same, with what is measured",
        *("autoencoder", _MEASURING, partial(_learning_and_measuring, 0.25), "kbfgs-bf16-quarter", "due"),
    ),
]


if __name__ == "__main__":
    main()
