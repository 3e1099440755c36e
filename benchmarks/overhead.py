"""What an extended model costs while no extension is active: ``python -m benchmarks.overhead``.

Training steps of two equal ResNet-32, one of them extended, in turns of random order; the median over
turns of the ratio of their times, with the quartiles. A third model, again not extended, shows what noise alone gives.
"""

import argparse
import copy
import random
import statistics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kfqn_ext import extend
from workloads.clock import now
from workloads.nets import resnet


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    start = now(x.device)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    return now(x.device) - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=5, help="per stage: 5 for ResNet-32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = resnet(arguments.blocks, 3, 10).to(arguments.device)
    models = {"plain": plain, "extended": extend(copy.deepcopy(plain)), "plain again": copy.deepcopy(plain)}
    runs = {name: (model, torch.optim.SGD(model.parameters(), lr=1e-3)) for name, model in models.items()}
    x = torch.randn(arguments.batch, 3, 32, 32, device=arguments.device)
    y = torch.arange(arguments.batch, device=arguments.device) % 10
    for model, optimizer in runs.values():
        for _ in range(3):
            step(model, optimizer, x, y)
    ratios: dict[str, list[float]] = {"extended": [], "plain again": []}
    order, plain_times = list(runs), []
    for _ in range(arguments.turns):
        random.shuffle(order)
        times = {name: step(*runs[name], x, y) for name in order}
        plain_times.append(times["plain"])
        for name in ratios:
            ratios[name].append(times[name] / times["plain"])
    seconds = statistics.median(plain_times)
    setting = f"ResNet-{6 * arguments.blocks + 2}, batch {arguments.batch}, {arguments.device}, {arguments.turns} turns"
    print(f"{setting}, {1e3 * seconds:.1f} ms a step")
    for name, values in ratios.items():
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{name} / plain: median {median:.4f} (quartiles {low:.4f} to {high:.4f})")


if __name__ == "__main__":
    main()
