"""Hugging Face Accelerate: prepare the model, and build the optimizer on what comes back.

In several processes that is the wrapper, which says who trains together. Accelerate's wrapper of the optimizer passes
``step`` and ``zero_grad`` on; the phases are methods of ``optimizer.optimizer``. Needs ``pip install
kfqn-ext[examples]``; run with ``python examples/loops/accelerate_loop.py``, or with ``accelerate launch``.
"""

try:
    import torch
    import torch.nn.functional as F
    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, TensorDataset

    from kfqn_ext.optim import KBFGS
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed. In the checkout: pip install -e ".[examples]"') from None


def main(epochs: int = 4) -> list[float]:
    torch.manual_seed(0)
    x = torch.randn(256, 2)
    y = (2 * (x[:, 0] > 0) + (x[:, 1] > 0)).long()
    accelerator = Accelerator(mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    model, loader = accelerator.prepare(model, loader)
    optimizer = KBFGS.as_printed(model, lr=0.3, damping=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.7)
    optimizer, schedule = accelerator.prepare(optimizer, schedule)
    phases: KBFGS = optimizer.optimizer
    losses = []

    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        return loss.detach()

    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with phases.first_pass():
                losses.append(float(forward_backward(x, y)))
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            if phases.second_pass_due:
                with phases.second_pass():
                    forward_backward(x, y)
            schedule.step()
    return losses


if __name__ == "__main__":
    losses = main()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
