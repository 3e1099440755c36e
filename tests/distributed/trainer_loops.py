"""The loops of trainers, as one of several processes that ``torchrun`` starts: each writes its parameters down.

Numbers are float64, and a minibatch has the same data in any number of processes, so that one process is the reference.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from kfqn_ext.optim import OnePassKBFGS
from tests.real.trainers import example, their_warnings

BATCH, PARTS, CLIP = 32, 2, 0.5  # data of all processes together; micro-batches of a step; its largest gradient


def quarters() -> TensorDataset:
    """Points in the plane, labelled by the quarter they lie in."""
    x = torch.randn(256, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)).double()


def accelerator(**options: Any) -> Any:
    """As the examples build it, but each batch is divided among the processes."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # that of other tests
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True), **options)


def accelerate_example() -> list[Tensor]:
    """As it is shipped, but for its precision and its order of data."""
    module, models = example("accelerate_loop"), []
    build = module.KBFGS.as_printed

    def kept(model: nn.Module, **options: Any) -> Any:
        models.append(model)
        return build(model, **options)

    module.Accelerator = lambda **_: accelerator()
    module.DataLoader = lambda data, batch_size, shuffle: DataLoader(quarters(), batch_size=BATCH)
    module.KBFGS = type("KBFGS", (), {"as_printed": staticmethod(kept)})
    torch.set_default_dtype(torch.float64)
    try:
        module.main()
    finally:
        torch.set_default_dtype(torch.float32)
    return list(models[0].parameters())


def parts(ranks: int) -> int:
    """Micro-batches of a step: one process takes them at once, for it would look at A along the first one's input."""
    return PARTS if ranks > 1 else 1


def accelerate_drop_in(ranks: int) -> list[Tensor]:
    """Accumulation and clipping, with an optimizer in the place of any other."""
    here = accelerator(gradient_accumulation_steps=parts(ranks))
    model, batches = here.prepare(net(), DataLoader(quarters(), batch_size=PARTS * BATCH // parts(ranks)))
    optimizer = here.prepare(OnePassKBFGS(model))
    for x, y in batches:
        with here.accumulate(model):
            here.backward(F.cross_entropy(model(x), y))
            if here.sync_gradients:
                here.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def fitted(module: Any, ranks: int, batch: int = BATCH, **options: Any) -> list[Tensor]:
    """Lightning's trainer, on data in their order, of which rank r takes each R-th: its own sampler would shuffle."""
    from lightning.pytorch import Trainer

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    where = {"accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto", "precision": "64-true"}
    trainer = Trainer(max_epochs=2, use_distributed_sampler=False, **where, **quiet, **options)
    rank = torch.distributed.get_rank() if ranks > 1 else 0
    sampler = DistributedSampler(quarters(), ranks, rank, shuffle=False)
    trainer.fit(module, DataLoader(quarters(), batch_size=batch // ranks, sampler=sampler))
    return list(module.net.parameters())


def lightning_example(ranks: int) -> list[Tensor]:
    torch.manual_seed(0)
    return fitted(example("lightning_loop").Classifier(), ranks)


def lightning_automatic(ranks: int, is_drop_in: bool = False) -> list[Tensor]:
    """K-BFGS's closure repeats the batch inside the wrapper; the drop-in accumulates micro-batches."""
    shipped: Any = example("lightning_loop").Classifier

    class Automatic(shipped):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = True

        def configure_optimizers(self) -> Any:
            if not is_drop_in:
                return super().configure_optimizers()[0]
            return OnePassKBFGS(self.net, process_group=torch.distributed.group.WORLD if ranks > 1 else None)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.loss(batch)

        def on_train_epoch_end(self) -> None:
            """Without a schedule."""

    torch.manual_seed(0)
    if not is_drop_in:
        return fitted(Automatic(), ranks, gradient_clip_val=CLIP)
    batch = PARTS * BATCH // parts(ranks)
    return fitted(Automatic(), ranks, batch, gradient_clip_val=CLIP, accumulate_grad_batches=parts(ranks))


def loops(ranks: int) -> dict[str, Callable[[], list[Tensor]]]:
    return {
        "accelerate, the example": accelerate_example,
        "accelerate, drop-in": partial(accelerate_drop_in, ranks),
        "lightning, the example": partial(lightning_example, ranks),
        "lightning, automatic": partial(lightning_automatic, ranks),
        "lightning, drop-in": partial(lightning_automatic, ranks, True),
    }


def run(ranks: int) -> dict[str, list[Tensor]]:
    """The parameters that each loop ends with."""
    with their_warnings():
        return {name: [p.detach().clone() for p in loop()] for name, loop in loops(ranks).items()}


def main() -> None:
    torch.set_num_threads(1)
    from torch import distributed

    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.save(run(ranks), Path(sys.argv[1], f"rank{rank}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
