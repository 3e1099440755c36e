"""What ``direction_dtype=torch.bfloat16`` does to the directions and inverses of a trained network.

    python -m benchmarks.rounding --data-root data

Trains an autoencoder with K-BFGS in float32, then compares, layer by layer, the direction H_G M H_A with the one from
rounded inverses: relative error, cosine, and how much of ⟨p, M⟩ is kept; and the inverses' smallest eigenvalues
before and after rounding, by which one sees whether an inverse could be *kept* in bfloat16.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import Tensor
from tqdm import trange

from benchmarks import options
from benchmarks.report import markdown
from kfqn_ext.optim import KBFGS
from kfqn_ext.optim.preconditioner import block as blocks
from kfqn_ext.optim.preconditioner.rounded import RoundedInverses
from workloads.objective import minibatch
from workloads.problems import PROBLEMS

_CELLS = [
    *("{error:.1e}", "{1 - cosine:.0e}", "{kept:.4f}"),
    *("{H_A smallest:.1e}, {H_A largest:.1e}", "{H_A rounded:.1e}", "{H_G smallest:.1e}", "{H_G rounded:.1e}"),
]
HEAD = ["layer", "error", "1 - cosine", "⟨p, M⟩ kept", "H_A: smallest, largest", "rounded", "H_G: smallest", "rounded"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.plain(__doc__)
    options.add_outputs(parser)
    parser.add_argument("--problem", default="mnist", choices=["mnist", "digits", "curves-generated"])
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args(arguments)
    layers = compare(train(args.problem, args.data_root, args.steps))
    options.finish(args, "rounding", torch.device("cpu"), {"layers": layers}, render)


def train(name: str, root: Path, steps: int) -> KBFGS:
    """Train on random minibatches of 1000, with the paper's values."""
    torch.manual_seed(0)
    problem = PROBLEMS[name]
    model, images = problem.build(), problem.load(root, False).train.x
    optimizer = KBFGS.as_printed(model, lr=0.03, damping=0.3)
    for _ in trange(steps, leave=False):
        x = images[torch.randint(len(images), (1000,))]
        optimizer.step(minibatch(model, problem.loss, x, x))
    return optimizer


def compare(optimizer: KBFGS) -> dict[str, dict[str, float]]:
    """What rounding does to each layer."""
    rounded = RoundedInverses(warn)
    found = {}
    for block in optimizer._blocks():
        layer, state = block.layer, block.state
        view, M = rounded.view(layer.weight, state, torch.bfloat16), state["momentum"]
        p, q = (blocks.precondition(s, optimizer.recipe, M) for s in (state, view))
        cosine = (p * q).sum() / (p.norm() * q.norm())
        A, A_rounded, G, G_rounded = (_eigenvalues(s[key]) for key in ("H_A", "H_G") for s in (state, view))
        numbers = {
            "error": (p - q).norm() / p.norm(),
            "1 - cosine": 1 - cosine,
            "kept": (q * M).sum() / (p * M).sum(),
            "H_A smallest": A[0],
            "H_A largest": A[-1],
            "H_A rounded": A_rounded[0],
            "H_G smallest": G[0],
            "H_G rounded": G_rounded[0],
        }
        found[layer.name] = {name: number.item() for name, number in numbers.items()}
    return found


def render(results: dict[str, Any]) -> str:
    """Lay out one row a layer."""
    rows = [[name, *(cell.format_map(row) for cell in _CELLS)] for name, row in results["layers"].items()]
    return markdown([HEAD, *rows])


def _eigenvalues(H: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(H.double())


if __name__ == "__main__":
    main()
