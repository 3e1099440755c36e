"""Other packages' optimizers, each used as its own documentation does.

They are imported where they are built: one that is missing, or does not run with this torch, is a row that says so.
"""

import torch
from torch import nn

from benchmarks.problems import Setup
from benchmarks.ready import Ready
from workloads.workload import DAMPING, LR, NEVER


def curvlinops_kfac(setup: Setup) -> Ready:
    """The inverse of a KFAC operator, times the gradient. Its factors are of one minibatch and never averaged."""
    from curvlinops import KFACInverseLinearOperator

    batch, model = setup.batch, setup.model
    params = supported_parameters(model)
    held: dict[str, KFACInverseLinearOperator] = {}

    def ordinary() -> None:
        batch()
        directions = held["inverse"] @ [p.grad for p in params]
        for p, direction in zip(params, directions, strict=True):
            p.grad = direction
        with torch.no_grad():
            trained = [p for p in model.parameters() if p.grad is not None]
            torch._foreach_add_(trained, [p.grad for p in trained], alpha=-LR)

    def due() -> None:
        held["inverse"] = KFACInverseLinearOperator(curvlinops_operator(setup), damping=DAMPING)
        ordinary()

    due()
    return Ready({"ordinary": ordinary, "due": due}, held)


def curvlinops_operator(setup: Setup):
    """KFAC of one minibatch with sampled targets; its factors are computed when they are first needed."""
    from curvlinops import KFACLinearOperator

    return KFACLinearOperator(
        setup.model,
        setup.criterion,
        supported_parameters(setup.model),
        [(setup.x, setup.y)],
        check_deterministic=False,  # a comparison of two passes
        separate_weight_and_bias=False,
    )


def supported_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of linear layers and convolutions."""
    return [p for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)) for p in m.parameters()]


def singd(setup: Setup) -> Ready:
    """Dense structures, the package's default; parameters of other layers are not trained."""
    from singd.optim.optimizer import SINGD

    optimizer, batch = SINGD(setup.model, lr=LR, warn_unsupported=False), setup.batch

    def step(T: int) -> None:
        for group in optimizer.param_groups:
            group["T"] = T
        batch()
        optimizer.step()

    step(1)
    return Ready({"ordinary": lambda: step(NEVER), "due": lambda: step(1)}, optimizer)


def asdfghjkl_kfac(setup: Setup) -> Ready:
    """``KfacGradientMaker`` with SGD, as in the package's README: factors are inverted as they come, not averaged.

    It samples from cross entropy or squared error; an autoencoder's binary cross entropy is nearer to the latter.
    """
    from asdl.precondition import KfacGradientMaker, PreconditioningConfig

    model, criterion = setup.model, setup.criterion
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    config = PreconditioningConfig(data_size=len(setup.x), damping=DAMPING)
    maker = KfacGradientMaker(model, config, loss_type="mse" if setup.workload.classes is None else "cross_entropy")

    def step(T: int) -> None:
        config.preconditioner_upd_interval = T
        optimizer.zero_grad()
        output = maker.setup_model_call(model, setup.x)
        maker.setup_loss_call(criterion, output, setup.y)
        maker.forward_and_backward()
        optimizer.step()

    step(1)
    return Ready({"ordinary": lambda: step(NEVER), "due": lambda: step(1)}, (maker, optimizer))


def shampoo(setup: Setup) -> Ready:
    """The package's default computes the roots at every step."""
    from pytorch_optimizer import Shampoo

    optimizer, batch = Shampoo(setup.model.parameters(), lr=LR), setup.batch

    def step(roots: int) -> None:
        optimizer.preconditioning_compute_steps = roots
        batch()
        optimizer.step()

    step(1)
    return Ready({"ordinary": lambda: step(NEVER), "due": lambda: step(1)}, optimizer)
