"""Quickstart: look at what K-BFGS measures of a layer, then train a small CNN with it, beside Adam and SGD.

    python examples/quickstart.py [--epochs 10] [--runs 3] [--out runs/quickstart.png] [--quick]

Real handwritten digits (they come with scikit-learn), under a minute on two cores. Exits with 1 if something is wrong.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

try:
    import numpy as np
    import torch
    from backpack import backpack
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch import Tensor, nn
    from torch.nn.functional import cross_entropy
    from torch.optim import SGD, Adam, Optimizer

    from kfqn_ext import KBFGS, KBFGSL, KBFGSQuantities, Minibatch, extend
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed. In the checkout: pip install -e ".[examples]"') from None

Data = tuple[Tensor, Tensor]
Curve = list[tuple[float, float, float]]  # (seconds, train loss, test accuracy) at the start and after each epoch
Results = dict[str, np.ndarray]  # for each method the curves of its runs, [runs, 1 + epochs, 3]

# ------------------------------------------------------------------------------------------ a model and its data


def cnn(size: int) -> nn.Sequential:
    """A CNN for grey images of size × size pixels, with BatchNorm and in-place ReLU as real ones have them."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(inplace=True)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(64 * (size // 4) ** 2, 64), nn.ReLU(inplace=True)),
        nn.Linear(64, 10),
    )


def digits() -> tuple[Data, Data]:
    """1,347 training and 450 test images, [n, 1, 8, 8] with values from 0 to 1, and their labels."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=450, stratify=y, random_state=0)
    return (x_train, y_train), (x_test, y_test)


def minibatches(data: Data, size: int) -> Iterator[Data]:
    """The data in random order. What is left over after the last full batch waits for another epoch."""
    x, y = data
    for index in torch.randperm(len(x)).split(size)[: len(x) // size]:
        yield x[index], y[index]


# ------------------------------------------------------------------------------------------ 1. what K-BFGS measures


def show_quantities(console: Console, data: Data) -> bool:
    """Print the quantities of the first convolution; return whether they agree with autograd."""
    x, y = data[0][:128], data[1][:128]
    model = extend(cnn(size=8))
    with backpack(KBFGSQuantities()):
        cross_entropy(model(x), y).backward()

    conv = model[0]
    q = conv.weight.kbfgs
    A_s = q.A @ torch.randn_like(q.a_bar)

    console.rule("[bold]1  What one backward pass tells about a layer", align="left")
    console.print(f"{conv}: {q.num_data} images, |T| = {q.num_locations} locations in each\n", highlight=False)
    table = Table("quantity", "shape", "what it is", box=None, header_style="dim", pad_edge=False, padding=(0, 3, 0, 0))
    table.add_row("q.a_bar", str([*q.a_bar.shape]), "mean of the patches that a filter sees, and a 1 for the bias")
    table.add_row("q.h_bar", str([*q.h_bar.shape]), "mean of the layer's outputs")
    table.add_row("q.dh_bar", str([*q.dh_bar.shape]), "mean of the loss's gradients by these outputs")
    table.add_row("q.A @ s", str([*A_s.shape]), "product with A, the second moment of the patches, without forming A")
    console.print(table)

    # The bias is added at each of the |T| locations, so autograd's gradient is |T| times the mean gradient there.
    autograd, ours = conv.bias.grad, q.num_locations * q.dh_bar
    error = ((autograd - ours).norm() / autograd.norm()).item()
    console.print("\nIt must agree with autograd: the gradient by the bias is |T| · dh_bar")
    console.print(f"  autograd      {numbers(autograd)}\n  |T| · dh_bar  {numbers(ours)}", highlight=False)
    console.print(f"  relative difference {error:.0e}\n", highlight=False)
    return error < 1e-5


def numbers(v: Tensor, count: int = 5) -> str:
    """The first few entries of a vector."""
    return "  ".join(f"{value:+.5f}" for value in v[:count].tolist()) + "  …"


# ------------------------------------------------------------------------------------------ 2. training with it

# Each method got 12 settings, 10 epochs and 3 seeds, judged by the mean log loss, over epochs, on a fifth of the
# training images held out. Here is the best one of each; of two of K-BFGS within the spread of the seeds, the steadier.
#   K-BFGS  lr 0.03, 0.1, 0.3, 1                      × damping 0.3, 3, 30       K-BFGS(L) takes the same setting
#   Adam    lr 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2     × eps 1e-8, 1e-4
#   SGD     lr 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3       × momentum 0.9, 0.95
# K-BFGS learns curvature in each of the first steps and, by default, ever more rarely later.
METHODS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "K-BFGS": lambda model: KBFGS.as_printed(model, lr=0.3, damping=3.0),
    "K-BFGS(L)": lambda model: KBFGSL.as_printed(model, lr=0.3, damping=3.0),
    "Adam": lambda model: Adam(model.parameters(), lr=3e-3),
    "SGD, momentum": lambda model: SGD(model.parameters(), lr=0.03, momentum=0.9),
}
BATCH_SIZE = 64


def train_epoch(model: nn.Module, optimizer: Optimizer, data: Data, batch_size: int) -> Iterator[float]:
    """Go through the data once; yield the loss of each minibatch."""
    for x, y in minibatches(data, batch_size):
        # A Minibatch is a closure. Where K-BFGS learns curvature, it calls it again after the step, to see what the
        # step has changed; torch's optimizers call it once.
        yield optimizer.step(Minibatch(model, cross_entropy, x, y)).item()


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> tuple[float, float]:
    """Loss and accuracy over a data set, in evaluation mode."""
    model.eval()
    outputs = torch.cat([model(x) for x in data[0].split(1000)])
    model.train()
    return cross_entropy(outputs, data[1]).item(), (outputs.argmax(1) == data[1]).double().mean().item()


def train(method: str, train_data: Data, test_data: Data, epochs: int, seed: int, report: Callable[..., None]) -> Curve:
    """Train a fresh model with a method."""
    torch.manual_seed(seed)  # the same initial model and the same minibatches for every method
    model = cnn(size=8)
    optimizer = METHODS[method](model)
    seconds, curve = 0.0, [(0.0, evaluate(model, train_data)[0], evaluate(model, test_data)[1])]
    for epoch in range(epochs):
        start = time.perf_counter()
        if epoch == 0 and isinstance(optimizer, KBFGS | KBFGSL):
            optimizer.warm_start(train_data[0].split(1000), progress=False)  # optional: a better first curvature
        for loss in train_epoch(model, optimizer, train_data, BATCH_SIZE):
            report(advance=1, loss=loss)
        seconds += time.perf_counter() - start  # without the evaluation
        curve.append((seconds, evaluate(model, train_data)[0], evaluate(model, test_data)[1]))
        report(accuracy=curve[-1][2])
    return curve


def train_all(console: Console, train_data: Data, test_data: Data, epochs: int, runs: int) -> Results:
    """Train with every method, from several initial models, with live progress."""
    console.rule(f"[bold]2  Training a CNN with BatchNorm, {runs} × {epochs} epochs", align="left")
    steps = runs * epochs * (len(train_data[0]) // BATCH_SIZE)
    columns = (
        TextColumn("{task.description:13}"),
        BarColumn(20),
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]:.4f}  test accuracy {task.fields[accuracy]:.1%}"),
    )
    results = {}
    with Progress(*columns, console=console) as progress:
        for name in METHODS:
            report = partial(progress.update, progress.add_task(name, total=steps, loss=nan, accuracy=0.0))
            results[name] = np.array([train(name, train_data, test_data, epochs, run, report) for run in range(runs)])
    return results


# ------------------------------------------------------------------------------------------ 3. what came out


def show_table(console: Console, results: Results) -> None:
    """Print where each method ended: the median of its runs."""
    table = Table("method", caption="medians of the runs", caption_justify="left")
    for column in ("train loss", "test accuracy", "seconds"):
        table.add_column(column, justify="right")
    for name, curves in results.items():
        seconds, loss, accuracy = np.median(curves[:, -1], axis=0)
        table.add_row(name, f"{loss:.5f}", f"{accuracy:.2%}", f"{seconds:.1f}")
    console.print()
    console.print(table)


STYLES: dict[str, dict[str, Any]] = {
    "K-BFGS": dict(color="#0b5fa5", linewidth=2.4),
    "K-BFGS(L)": dict(color="#e07b00", linewidth=2.4, dashes=(3, 1.5)),  # dashed: it often lies upon K-BFGS
    "Adam": dict(color="#3f9b62", linewidth=1.6),
    "SGD, momentum": dict(color="#7a7a85", linewidth=1.6),
}


def plot(results: Results, num_test: int, path: Path) -> None:
    """Draw training loss and test error, by epoch and by second: the median of the runs, and a band around all."""
    figure = Figure(figsize=(11, 7.5), dpi=150, layout="constrained")
    axes = figure.subplots(2, 2, sharex="col", sharey="row")
    for name, curves in results.items():
        seconds, loss, accuracy = curves.transpose(2, 0, 1)
        error = np.maximum(1 - accuracy, 0.5 / num_test)  # a log scale has no 0: no error is drawn as half an image
        for row, y in zip(axes, (loss, error), strict=True):
            for ax, x in zip(row, (np.arange(y.shape[1]), np.median(seconds, axis=0)), strict=True):
                ax.plot(x, np.median(y, axis=0), label=name, **STYLES[name])
                ax.fill_between(x, y.min(axis=0), y.max(axis=0), color=STYLES[name]["color"], alpha=0.12, linewidth=0)
    decorate(axes)
    runs = len(next(iter(results.values())))
    shown = "one run" if runs == 1 else f"median and range of {runs} runs"
    figure.suptitle(f"A CNN learns handwritten digits ({shown})", fontsize=15)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=12)
    figure.align_ylabels()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def decorate(axes: np.ndarray) -> None:
    """Dress the four panels, rows (training loss, test error) and columns (epochs, seconds)."""
    for ax in axes.flat:
        ax.set_yscale("log")
        ax.grid(color="#e6e6ea")
        ax.spines[["top", "right"]].set_visible(False)
        ax.margins(x=0.01)
    (loss, _), (error, by_second) = axes
    loss.set_ylabel("training loss", fontsize=12)
    loss.yaxis.set_major_formatter("{x:g}")
    error.set_ylabel("test error", fontsize=12)
    error.yaxis.set_major_locator(FixedLocator([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1]))
    error.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    error.yaxis.set_minor_locator(NullLocator())
    for ax in (error, by_second):
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    error.set_xlabel("epochs", fontsize=12)
    by_second.set_xlabel("seconds of training", fontsize=12)


def main() -> int:
    """Run the three parts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--runs", type=int, default=3, help="trainings of each method, from different initial models")
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart.png"), help="where the curves are drawn")
    parser.add_argument("--quick", action="store_true", help="one run of 5 epochs")
    args = parser.parse_args()
    epochs, runs = (5, 1) if args.quick else (args.epochs, args.runs)

    torch.set_num_threads(1)  # such small tensors are done before a second thread has woken up
    torch.manual_seed(0)
    console = Console()
    train_data, test_data = digits()
    agrees = show_quantities(console, train_data)
    results = train_all(console, train_data, test_data, epochs, runs)
    show_table(console, results)
    plot(results, len(test_data[0]), args.out)
    console.print(f"Curves: {args.out}", highlight=False)

    weak = [name for name, curves in results.items() if not np.median(curves[:, -1, 2]) >= 0.95]
    if not agrees:
        console.print("[red]The quantities disagree with autograd.")
    if weak:
        console.print(f"[red]Less than 95 % test accuracy: {', '.join(weak)}.")
    return 0 if agrees and not weak else 1


if __name__ == "__main__":
    sys.exit(main())
