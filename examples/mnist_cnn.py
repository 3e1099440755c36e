"""Train the quickstart's CNN on MNIST. Exits with 0 if it reaches 99 % test accuracy.

    python examples/mnist_cnn.py [--optimizer kbfgs] [--epochs 5] [--data-root data] [--out runs/mnist_cnn.jsonl]

Two minutes to a quarter of an hour on two cores. MNIST is downloaded where --data-root doesn't hold it yet.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

try:
    import torch
    from quickstart import METHODS, Data, cnn, evaluate, train_epoch
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from torchvision.datasets import MNIST

    from kfqn_ext import KBFGS, KBFGSL
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed. In the checkout: pip install -e ".[examples]"') from None

NAMES = {"kbfgs": "K-BFGS", "kbfgsl": "K-BFGS(L)", "adam": "Adam", "sgd": "SGD, momentum"}


def mnist(root: Path, train: bool) -> Data:
    """All images as one tensor, [n, 1, 28, 28] with values from 0 to 1: a loader makes them one by one, slowly."""
    try:
        data = MNIST(root, train=train, download=True)  # downloads nothing that is there already
    except Exception as error:  # whatever torchvision and the network raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise SystemExit(
            f"MNIST can neither be read below {root.resolve()} nor be downloaded ({reason}). Name its directory with "
            f"--data-root, or delete {root.resolve() / 'MNIST'} and try again."
        ) from None
    return data.data.unsqueeze(1) / 255, data.targets


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, printing the test accuracy after each epoch; return what happened."""
    torch.manual_seed(args.seed)
    train_data, test_data = mnist(args.data_root, train=True), mnist(args.data_root, train=False)
    model = cnn(size=28)
    optimizer = METHODS[NAMES[args.optimizer]](model)
    record: dict[str, Any] = {"optimizer": args.optimizer, "batch_size": args.batch_size, "seed": args.seed}
    record |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    record |= {"train_loss": [], "test_accuracy": [], "seconds": []}

    start, paused = time.perf_counter(), 0.0
    if isinstance(optimizer, KBFGS | KBFGSL):
        optimizer.warm_start(train_data[0][:6000].split(500))  # a tenth of the data says enough about a first H_A
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), transient=True) as progress:
        task = progress.add_task("", total=len(train_data[0]) // args.batch_size, loss=float("nan"))
        for epoch in range(1, args.epochs + 1):
            progress.reset(task, description=f"epoch {epoch}")
            for loss in train_epoch(model, optimizer, train_data, args.batch_size):
                progress.update(task, advance=1, loss=loss)
            seconds = time.perf_counter() - start - paused
            train_loss, accuracy = evaluate(model, train_data)[0], evaluate(model, test_data)[1]
            paused = time.perf_counter() - start - seconds  # evaluation is no part of the training time
            line = f"epoch {epoch}  train loss {train_loss:.5f}  test accuracy {accuracy:.2%}  {seconds:.0f} s"
            progress.console.print(line, highlight=False)
            record["train_loss"].append(train_loss)
            record["test_accuracy"].append(accuracy)
            record["seconds"].append(round(seconds, 1))
    return record


def main() -> int:
    """Train and keep the record; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=NAMES, default="kbfgs", help="with the settings of the quickstart")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("runs/mnist_cnn.jsonl"), help="a JSON line is appended here")
    args = parser.parse_args()

    record = train(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    accuracy = record["test_accuracy"][-1]
    print(f"{NAMES[args.optimizer]}: {accuracy:.2%} of the test images after {args.epochs} epochs. Record: {args.out}")
    return 0 if accuracy >= 0.99 else 1


if __name__ == "__main__":
    sys.exit(main())
