"""Train a small CNN on scikit-learn's digits in several processes, each with a share of every minibatch.

    torchrun --standalone --nproc-per-node 2 examples/distributed_cnn.py [--optimizer kbfgs] [--epochs 5]
        [--shard | --fsdp] [--checkpoint runs/digits.pt]

With --shard each process keeps the optimizer's state of some layers, with --fsdp also rows of each parameter only. A
checkpoint that is there is resumed, on any number of processes and in any of these forms.
"""

import argparse
from pathlib import Path
from typing import Any

try:
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from torch import Tensor, distributed, nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from kfqn_ext.optim import KBFGS, Minibatch, OnePassKBFGS
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed. In the checkout: pip install -e ".[examples]"') from None

OPTIMIZERS = {"onepass": OnePassKBFGS, "kbfgs": KBFGS}


def digits() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    """Training data, and test data."""
    X, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(X / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(y)
    return TensorDataset(images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def train(args: argparse.Namespace) -> float:
    """Train, and return the accuracy on test data."""
    cuda = torch.cuda.is_available()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    data, (x_test, y_test) = digits()
    torch.manual_seed(0)  # one network on all ranks
    model, optimizer, first = build(args, cnn().to(device))
    torch.manual_seed(1 + rank)  # and random numbers of each rank's own

    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size // size, sampler=sampler, drop_last=True)
    accuracy = 0.0
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            if args.optimizer == "onepass":
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                optimizer.step(Minibatch(model, F.cross_entropy, x, y))
        with torch.no_grad():
            accuracy = float((model(x_test.to(device)).argmax(1).cpu() == y_test).float().mean())
        if rank == 0:
            print(f"epoch {epoch + 1}  test accuracy {accuracy:.2%}  {size} process(es)", flush=True)
        save(args.checkpoint, model, optimizer, epoch + 1)
    return accuracy


def build(args: argparse.Namespace, network: nn.Module) -> tuple[nn.Module, Any, int]:
    """The network as the processes share it, its optimizer, and the epoch to go on with."""
    saved: dict[str, Any] = {}
    if args.checkpoint is not None and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, weights_only=True, map_location="cpu")
        network.load_state_dict(saved["model"])
    model = fully_shard(network) if args.fsdp else DistributedDataParallel(network)
    options = {"shard_state": True} if args.shard else {}
    optimizer = OPTIMIZERS[args.optimizer](model, **options)
    if saved:
        optimizer.load_state_dict(saved["optimizer"])  # each process takes what is its own
    return model, optimizer, int(saved.get("epoch", 0))


def save(path: Path | None, model: nn.Module, optimizer: Any, epoch: int) -> None:
    """Gather all that the processes hold, and let one of them save it; half a file is never in the other's place."""
    if path is None:
        return
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    weights = get_model_state_dict(inner, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    state = optimizer.gather_state()
    if distributed.get_rank() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        torch.save({"model": weights, "optimizer": state, "epoch": epoch}, new)
        new.replace(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="onepass")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=100, help="of all processes together")
    parser.add_argument("--checkpoint", type=Path, help="file that is resumed where it is there, and written")
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--shard", action="store_true", help="divide the optimizer's state; with --optimizer kbfgs")
    forms.add_argument("--fsdp", action="store_true", help="divide the parameters too; with --optimizer kbfgs")
    args = parser.parse_args()
    if (args.shard or args.fsdp) and args.optimizer == "onepass":
        parser.error("the one-pass row has no divided state: take --optimizer kbfgs")
    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(args)  # what it makes ends with it, before the group does
    distributed.barrier()
    distributed.destroy_process_group()
