"""What ``direction_dtype=torch.bfloat16`` does to the directions and inverses of a trained network.

    python -m benchmarks.rounding --data-root data

Trains an autoencoder with K-BFGS in float32, then compares, layer by layer, the direction H_G M H_A with the one from
rounded inverses: relative error, cosine, and how much of ⟨p, M⟩ is kept; and the inverses' smallest eigenvalues
before and after rounding, by which one sees whether an inverse could be *kept* in bfloat16.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import trange

from benchmarks import options
from examples.paper.objective import minibatch
from examples.paper.problems import PROBLEMS
from kfqn_ext.optim import KBFGS, blocks
from kfqn_ext.optim.rounded import RoundedInverses

HEAD = ["layer", "error", "1 - cosine", "⟨p, M⟩ kept", "H_A: smallest, largest", "rounded", "H_G: smallest", "rounded"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", default="mnist", choices=["mnist", "digits", "curves-generated"])
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--docs", type=Path, help="put the table between the marks of this page")
    args = parser.parse_args(arguments)
    options.show(args.docs, "rounding", render(train(args.problem, args.data_root, args.steps)))


def train(name: str, root: Path, steps: int) -> KBFGS:
    """Train on random minibatches of 1000, with the paper's values."""
    torch.manual_seed(0)
    problem = PROBLEMS[name]
    model, images = problem.build(), problem.load(root, False).train.x
    optimizer = KBFGS(model, lr=0.03, damping=0.3)
    for _ in trange(steps, leave=False):
        x = images[torch.randint(len(images), (1000,))]
        optimizer.step(minibatch(model, problem.loss, x, x))
    return optimizer


def render(optimizer: KBFGS) -> str:
    """Lay out one row a layer."""
    rounded = RoundedInverses()
    rows = []
    for layer, _ in optimizer._layers():
        state = optimizer.state[layer.weight]
        view, M = rounded.view(layer.weight, state, torch.bfloat16), state["momentum"]
        p, q = (blocks.precondition(s, optimizer.recipe, M) for s in (state, view))
        cosine = (p * q).sum() / (p.norm() * q.norm())
        A, A_rounded, G, G_rounded = (_eigenvalues(s[key]) for key in ("H_A", "H_G") for s in (state, view))
        rows.append(
            [
                layer.name,
                f"{(p - q).norm() / p.norm():.1e}",
                f"{1 - cosine:.0e}",
                f"{(q * M).sum() / (p * M).sum():.4f}",
                f"{A[0]:.1e}, {A[-1]:.1e}",
                f"{A_rounded[0]:.1e}",
                f"{G[0]:.1e}",
                f"{G_rounded[0]:.1e}",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in [HEAD, ["---"] * len(HEAD), *rows])


def _eigenvalues(H: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(H.double())


if __name__ == "__main__":
    main()
