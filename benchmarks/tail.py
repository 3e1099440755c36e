"""A second pass from the first layer that learns, in place of the whole: ``python -m benchmarks.tail``.

A small CNN with BatchNorm on scikit-learn's digits, where the classifier alone learns from both passes. The second one
starts from what the classifier has read in the first. Losses are means over the last twenty minibatches of each seed.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import options
from benchmarks.report import markdown
from kfqn_ext.optim import KBFGS
from workloads.clock import now

CPU, WAYS = torch.device("cpu"), ("whole", "tail")
_BATCH, _LAST = 64, 20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options.plain(__doc__)
    options.add_outputs(parser)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = {way: [list(train(way, seed, args.steps)) for seed in range(args.seeds)] for way in WAYS}
    options.finish(args, "tail", CPU, {"steps": args.steps, "runs": found}, render)


def render(results: dict[str, Any]) -> str:
    """A row a way."""
    rows = [["second pass", "training loss of each seed", "ms of it"]]
    for way, runs in results["runs"].items():
        losses = ", ".join(f"{loss:.4f}" for loss, _ in runs)
        rows.append([way, losses, f"{1e3 * statistics.median(seconds for _, seconds in runs):.2f}"])
    return markdown(rows)


def train(way: str, seed: int, steps: int) -> tuple[float, float]:
    """Training loss, and seconds of a second pass, of K-BFGS with every step due."""
    torch.manual_seed(seed)
    x, y = _digits()
    body, head = _body(), nn.Linear(16, 10)
    optimizer = KBFGS(nn.Sequential(body, head), curvature_update_freq=1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses, seconds = [], []
    for _ in range(steps):
        chosen = torch.randint(len(x), (_BATCH,))
        optimizer.zero_grad()
        with optimizer.first_pass():
            features = body(x[chosen])
            loss = F.cross_entropy(head(features), y[chosen])
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
        start, head_alone = now(CPU), optimizer.second_pass_layers == [head]
        with optimizer.second_pass():
            read = features.detach() if way == "tail" and head_alone else body(x[chosen])
            F.cross_entropy(head(read), y[chosen]).backward()
        seconds.append(now(CPU) - start)
    return statistics.mean(losses[-_LAST:]), statistics.median(seconds)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return torch.from_numpy(digits.images).float().unsqueeze(1) / 16, torch.from_numpy(digits.target)


def _body() -> nn.Module:
    layers: list[nn.Module] = []
    for d_in, d_out, pool in ((1, 8, True), (8, 16, False), (16, 16, False)):
        layers += [nn.Conv2d(d_in, d_out, 3, padding=1, bias=False), nn.BatchNorm2d(d_out), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if pool else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


if __name__ == "__main__":
    main()
