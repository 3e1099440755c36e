"""Training loops as users write them: for each, what it must equal, or the error that names it."""

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from backpack import backpack, disable
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from kfqn_ext.extensions import KBFGSQuantities, KFACFactors, extend, unextend
from kfqn_ext.optim import KBFGS, KBFGSL, KFAC, Minibatch, gate
from tests.real import watch

F64 = torch.float64
X, Y = torch.randn(12, 2, 5, 5, dtype=F64, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3
SETTINGS: dict[str, Any] = {"lr": 0.1, "damping": 1.0, "curvature_update_freq": 1}


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(True), nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def close(a: Any, b: Any, tol: float = 1e-9) -> None:
    """Parameters and curvature of two (model, optimizer)."""
    for p, q in zip(a[0].parameters(), b[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=tol, atol=tol)
        one, other = a[1].state[p], b[1].state[q]
        for key in ("H_A", "H_G", "s_G", "y_G", "momentum", "Omega", "Gamma"):
            assert (key in one) == (key in other)
            if key in one:
                scale = float(other[key].abs().max())
                torch.testing.assert_close(one[key], other[key], rtol=0, atol=tol * scale + 1e-300, msg=key)


def phases(optimizer: Any, losses: Callable[[], Any], first: Any = None, second: Any = None) -> None:
    """A step in two phases; ``losses`` runs all its backward passes."""
    optimizer.zero_grad()
    with optimizer.first_pass(**(first or {})):
        losses()
    optimizer.step()
    if optimizer.second_pass_due:
        with optimizer.second_pass(**(second or {})):
            losses()


# ------------------------------------------------------------------ accumulation, several passes


def accumulation(reduction: str) -> Callable[[], None]:
    """Micro-batches of several sizes equal the big batch: parameters, momentum and curvature, over several steps."""

    def check() -> None:
        pairs = []
        for micro in (False, True):
            model = net()
            optimizer = KBFGS(model, reduction=reduction, **SETTINGS)

            def losses(model: Any = model, micro: bool = micro) -> None:
                for part in (slice(0, 5), slice(5, 9), slice(9, 12)) if micro else (slice(0, 12),):
                    total = F.cross_entropy(model(X[part]), Y[part], reduction="sum")
                    (total / (12 if reduction == "mean" else 1)).backward()

            for _ in range(4):
                phases(optimizer, losses, {"keep_inputs": True})
            pairs.append((model, optimizer))
        close(*pairs)

    return check


def accumulation_without_kept_inputs() -> None:
    """All but the direction s of the Hessian action is the big batch's; y = A s holds for the big batch's A."""
    whole, parts = KBFGSQuantities(accumulate=True), KBFGSQuantities(accumulate=True, probe=lambda module, a: 2 * a)
    model = extend(net())
    with backpack(whole):
        F.cross_entropy(model(X), Y).backward()
    for part in (slice(0, 4), slice(4, 12)):
        with backpack(parts):
            (F.cross_entropy(model(X[part]), Y[part], reduction="sum") / 12).backward()
    for module in watch.layers(model).values():
        q, big = parts[module], whole[module]
        for name in ("a_bar", "h_bar", "dh_bar"):
            torch.testing.assert_close(getattr(q, name), getattr(big, name))
        torch.testing.assert_close(q.A_s, big.A @ q.s)
    optimizer = KBFGS(model, **SETTINGS)
    before = float(F.cross_entropy(model(X), Y).detach())
    for _ in range(5):
        phases(
            optimizer,
            lambda: [(F.cross_entropy(model(X[p]), Y[p]) / 2).backward() for p in (slice(0, 6), slice(6, 12))],
        )
    assert float(F.cross_entropy(model(X), Y).detach()) < before


def accumulation_of_kfac() -> None:
    pairs = []
    for micro in (False, True):
        model = net()
        optimizer = KFAC(model, lr=0.1)

        def losses(y: Tensor, model: Any = model, micro: bool = micro) -> None:
            for part in (slice(0, 5), slice(5, 12)) if micro else (slice(0, 12),):
                (F.cross_entropy(model(X[part]), y[part], reduction="sum") / 12).backward()

        for step in range(3):
            optimizer.zero_grad()
            with optimizer.first_pass():
                losses(Y)
            if optimizer.second_pass_due:
                with optimizer.second_pass():
                    losses((Y + step) % 3)
            optimizer.step()
        pairs.append((model, optimizer))
    close(*pairs)


def a_second_pass_over_other_data() -> None:
    """Named, and nothing is learned: with one micro-batch repeated of two, ∂h̄ would be of another loss."""
    model = net()
    optimizer = KBFGS(model, **SETTINGS)
    phases(optimizer, lambda: F.cross_entropy(model(X), Y).backward())
    H = {p: optimizer.state[p]["H_G"].clone() for p in model.parameters() if p.ndim > 1}
    optimizer.zero_grad()
    with optimizer.first_pass():
        for part in (slice(0, 6), slice(6, 12)):
            (F.cross_entropy(model(X[part]), Y[part]) / 2).backward()
    optimizer.step()
    with pytest.warns(UserWarning) as said, optimizer.second_pass():
        F.cross_entropy(model(X[6:]), Y[6:]).backward()
    counted = [str(w.message) for w in said if "read other data than the first" not in str(w.message)]
    assert all("first pass and 6 at" in text and "must repeat the first" in text for text in counted)
    assert len(counted) == 3 and all(torch.equal(optimizer.state[p]["H_G"], value) for p, value in H.items())


def several_losses() -> None:
    """Two backward passes through one forward pass equal one pass of the sum, for mean and sum losses."""
    for reduction in ("mean", "sum"):
        pairs = []
        for apart in (False, True):
            model = net()
            optimizer = KBFGS.as_printed(model, reduction=reduction, **SETTINGS)

            def losses(model: Any = model, apart: bool = apart, reduction: str = reduction) -> None:
                output = model(X)
                terms = [F.cross_entropy(output, Y, reduction=reduction), 0.1 * output.square().sum(1).mean()]
                terms[1] = terms[1] * (len(X) if reduction == "sum" else 1)
                if apart:
                    terms[0].backward(retain_graph=True)
                    terms[1].backward()
                else:
                    sum(terms).backward()

            for _ in range(3):
                phases(optimizer, losses)
            pairs.append((model, optimizer))
        close(*pairs)


def several_losses_of_squares() -> None:
    """Γ of a sum of losses is not the sum of their Γ: factors, and dampings by tr Γ, refuse what they can't know."""
    model, factors = extend(net()), KFACFactors(accumulate=True)
    output = model(X)
    with pytest.raises(NotImplementedError, match=r"KFACFactors .* add the losses up"), backpack(factors):
        F.cross_entropy(output, Y).backward(retain_graph=True)
        output.square().mean().backward()
    model = net()
    optimizer = KBFGS(model)
    with pytest.raises(NotImplementedError, match=r"FactorTraces .* add the losses up"), optimizer.first_pass():
        output = model(X)
        F.cross_entropy(output, Y).backward(retain_graph=True)
        output.square().mean().backward()


def retained_graph() -> None:
    """Backward twice through a graph, each measured: the second result replaces the first."""
    model, moments = extend(net()), KBFGSQuantities()
    loss = F.cross_entropy(model(X), Y)
    found = []
    for _ in range(2):
        with backpack(moments):
            loss.backward(retain_graph=True)
        found.append(moments[model[0]])
    assert torch.equal(found[0].dh_bar, found[1].dh_bar) and found[1].num_data == 12


def two_forwards_and_an_evaluation() -> None:
    """Forward, forward, an evaluation, then one backward pass over both: as one batch."""
    pairs = []
    for apart in (False, True):
        model = net()
        optimizer = KBFGS(model, **SETTINGS)

        def losses(model: Any = model, apart: bool = apart) -> None:
            if not apart:
                F.cross_entropy(model(X), Y).backward()
                return
            parts = [F.cross_entropy(model(X[p]), Y[p], reduction="sum") for p in (slice(0, 5), slice(5, 12))]
            model.eval()
            model(X[:7] * 100)  # with gradients enabled, and never differentiated
            with torch.no_grad():
                model(X * 100)
            model.train()
            (sum(parts) / 12).backward()

        for _ in range(3):
            phases(optimizer, losses, {"keep_inputs": True})
        pairs.append((model, optimizer))
    close(*pairs)


def auxiliary_passes() -> None:
    """Gradients by the input, or of a penalty with create_graph, are no part of what the layers saw."""
    x = X.clone().requires_grad_()
    for auxiliary in (
        lambda model: torch.autograd.grad(F.cross_entropy(model(x), Y), x),
        lambda model: torch.autograd.grad(F.cross_entropy(model(x), Y), x, create_graph=True),
    ):
        want, got = KBFGSQuantities(accumulate=True), KBFGSQuantities(accumulate=True)
        model = extend(net())
        with backpack(want):
            F.cross_entropy(model(X), Y).backward()
        with backpack(got):
            auxiliary(model)
            F.cross_entropy(model(X), Y).backward()
            auxiliary(model)
        for module in watch.layers(model).values():
            assert torch.equal(got[module].dh_bar, want[module].dh_bar)
            assert torch.equal(got[module].a_bar, want[module].a_bar) and got[module].num_data == 12

    def adversarial(model: Any) -> None:
        """The example within the loop's closure, as it should be: unseen."""
        with disable():
            (g,) = torch.autograd.grad(F.cross_entropy(model(x), Y), x)
        F.cross_entropy(model(X + 0.1 * g.sign()), Y).backward()

    model = net()
    optimizer = KBFGS(model, **SETTINGS)
    for _ in range(3):
        phases(optimizer, lambda: adversarial(model))
    assert optimizer.diagnostics()[0].G.kept + optimizer.diagnostics()[0].G.skipped == 3


def auxiliary_pass_in_a_closure() -> None:
    """Disabled or not: the second pass, too, tells it from the pass that counts, though weights are frozen."""
    x, found = X.clone().requires_grad_(), []
    for aside in (disable, nullcontext):
        model = net()
        optimizer = KBFGS(model, **SETTINGS)

        def closure(model: Any = model, optimizer: Any = optimizer, aside: Any = aside) -> Tensor:
            optimizer.zero_grad()
            with aside():
                (g,) = torch.autograd.grad(F.cross_entropy(model(x), Y), x)
            loss = F.cross_entropy(model(X + 0.1 * g.sign()), Y)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        found.append((model, optimizer))
    assert all(int(d.G.kept + d.G.skipped) == 3 for d in found[0][1].diagnostics())
    close(*found, tol=0.0)


def measurements_are_used_once() -> None:
    """A step without first_pass after one with it must not learn from the older one."""
    model = net()
    optimizer = KBFGS(model, **SETTINGS)
    phases(optimizer, lambda: F.cross_entropy(model(X), Y).backward())
    optimizer.zero_grad()
    F.cross_entropy(model(X), Y).backward()
    with pytest.warns(UserWarning, match="without measurements when curvature was due"):
        optimizer.step()
    assert not optimizer.second_pass_due and optimizer._iteration is None


def equal_memory_of_gradients() -> None:
    """A gradient that is freed and allocated anew at the same place has changed."""
    model = nn.Linear(4, 3, bias=False)
    optimizer = KBFGS(model, **SETTINGS)
    for _ in range(20):
        optimizer.step(Minibatch(model, F.cross_entropy, torch.randn(6, 4), torch.arange(6) % 3))


# ------------------------------------------------------------------ losses


def summed_loss() -> None:
    pairs = []
    for reduction in ("mean", "sum"):
        model = net()
        optimizer = KBFGS(model, reduction=reduction, lr=0.1, damping=1.0, curvature_update_freq=1)
        for _ in range(3):
            optimizer.step(Minibatch(model, lambda o, y, r=reduction: F.cross_entropy(o, y, reduction=r), X, Y))
        pairs.append((model, optimizer))
    for layer in (0, 3, 5):  # the gradient is N times as large, the quantities of a datum's loss are not
        one, other = (optimizer.state[model[layer].weight]["H_A"] for model, optimizer in pairs)
        assert one.isfinite().all() and other.isfinite().all()
    moments, model = [KBFGSQuantities(r) for r in ("mean", "sum")], extend(net())
    for ext in moments:
        with backpack(ext):
            F.cross_entropy(model(X), Y, reduction=ext.reduction).backward()
    for a, b in zip(*(ext.values() for ext in moments), strict=True):
        torch.testing.assert_close(a.dh_bar, b.dh_bar)


def losses_over_sequences() -> None:
    """[N, C, T] cross entropy with ignored targets and class weights, squared errors: ∂h as autograd."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 7, 5, dtype=F64), torch.randint(3, (6, 7))
    y[0, :3] = -100
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=F64)
    for loss in (
        lambda m: F.cross_entropy(m(x).transpose(1, 2), y),
        lambda m: F.cross_entropy(m(x).transpose(1, 2), y, weight=weight),
        lambda m: F.mse_loss(m(x), x[..., :3]),
        lambda m: F.cross_entropy(m(x).flatten(0, 1), y.flatten()),
    ):
        assert watch.check(copy.deepcopy(model), loss) == {"0", "2"}


def smaller_last_batch() -> None:
    model = net()
    optimizer = KBFGS(model, **SETTINGS)
    for size in (5, 5, 2, 5, 1):
        loss = optimizer.step(Minibatch(model, F.cross_entropy, X[:size], Y[:size]))
        assert loss.isfinite()


def unextended_loss_and_own_forward() -> None:
    """Only the layers are extended: a loss of one's own needs nothing."""
    model = net()
    optimizer = KBFGS(model, **SETTINGS)
    losses = [
        float(optimizer.step(Minibatch(model, lambda o, y: (o.logsumexp(1) - o[:, 0]).mean(), X, Y))) for _ in range(8)
    ]
    assert losses[-1] < losses[0]


# ------------------------------------------------------------------ precision


def reduced_precision() -> None:
    """H_A of a first layer, whose inputs no product has rounded, is bit for bit the same, and so is torch's setting."""
    before, found = torch.get_float32_matmul_precision(), []
    try:
        for setting in ("highest", "medium"):
            torch.set_float32_matmul_precision(setting)
            model = net().float()
            optimizer = KBFGS(model, **SETTINGS)
            optimizer.step(Minibatch(model, F.cross_entropy, X.float(), Y))
            assert torch.get_float32_matmul_precision() == setting
            found.append(optimizer.state[model[0].weight]["H_A"])
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(*found)


def autocast_bfloat16() -> None:
    """Quantities and curvature in float32, close to those without autocast."""
    found = []
    for enabled in (False, True):
        model = net().float()
        optimizer, x = KBFGS(model, **SETTINGS), X.float()

        def losses(model: Any = model, enabled: bool = enabled, x: Tensor = x) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(model(x), Y)
            loss.backward()

        for _ in range(3):
            phases(optimizer, losses)
        state = optimizer.state[model[0].weight]
        assert state["H_A"].dtype == state["y_G"].dtype == torch.float32
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert 0 < float((found[0] - found[1]).abs().max()) < 0.05


def grad_scaler() -> None:
    """GradScaler through the two phases: the scale cancels, also a new one, and a skipped step leaves everything."""
    pairs = []
    for scaled in (False, True):
        model = net()
        optimizer = KBFGS(model, **SETTINGS)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
        for step in range(6):
            optimizer.zero_grad()
            with optimizer.first_pass(loss_scale=scaler.get_scale()):
                scaler.scale(F.cross_entropy(model(X), Y)).backward()
            if step == 3 and scaled:  # an overflow: this step is skipped, and repeated below
                before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model[0].weight.grad[0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
                assert not optimizer.second_pass_due
                after = (model.state_dict(), optimizer.state_dict())
                for a, b in zip(before[0].values(), after[0].values(), strict=True):
                    assert torch.equal(a, b)
                assert before[1]["param_groups"] == after[1]["param_groups"]
                optimizer.zero_grad()
                with optimizer.first_pass(loss_scale=scaler.get_scale()):
                    scaler.scale(F.cross_entropy(model(X), Y)).backward()
            if step % 2:  # on the other steps, scaler.step unscales
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()  # the scale of the second pass may be another one
            if optimizer.second_pass_due:
                with optimizer.second_pass(loss_scale=scaler.get_scale()):
                    scaler.scale(F.cross_entropy(model(X), Y)).backward()
        pairs.append((model, optimizer))
    close(*pairs)


def float16_needs_its_scale() -> None:
    """The scale can't be seen in a gradient; float16 without one is an error."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).half()
    x, y = torch.randn(6, 5).half(), torch.arange(6) % 3
    optimizer = KBFGS(model, **SETTINGS)

    def loss(scale: float) -> None:
        (F.cross_entropy(model(x).float(), y) * scale).backward()

    said = r"float16.*first_pass\(loss_scale=scaler.get_scale\(\)\)"
    with pytest.raises(RuntimeError, match=said), optimizer.first_pass():
        loss(64.0)
    with pytest.raises(RuntimeError, match="float16"):
        optimizer.step(Minibatch(model, lambda o, t: F.cross_entropy(o.float(), t), x, y))
    found = []
    for scale in (1.0, 64.0):
        twin = copy.deepcopy(model)
        optimizer = KBFGS(twin, **SETTINGS)
        optimizer.zero_grad()
        with optimizer.first_pass(loss_scale=scale):
            (F.cross_entropy(twin(x).float(), y) * scale).backward()
        for p in twin.parameters():
            assert p.grad is not None
            p.grad /= scale
        optimizer.step()
        with optimizer.second_pass(loss_scale=scale):
            (F.cross_entropy(twin(x).float(), y) * scale).backward()
        found.append(optimizer.state[twin[2].weight])
    for key in ("s_G", "y_G", "H_G"):
        torch.testing.assert_close(found[0][key], found[1][key], rtol=0.05, atol=2e-3)


def scaler_with_a_closure() -> None:
    model = net()
    optimizer, scaler = KBFGS(model, **SETTINGS), torch.amp.GradScaler("cpu")
    with pytest.raises(RuntimeError, match="[Cc]losure"):
        scaler.step(optimizer, closure=Minibatch(model, F.cross_entropy, X, Y))


# ------------------------------------------------------------------ steps and rates


def clipping() -> None:
    model = net()
    optimizer = KBFGS(model, **SETTINGS)
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.first_pass():
            F.cross_entropy(model(X), Y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        optimizer.step()
        with optimizer.second_pass():
            F.cross_entropy(model(X), Y).backward()
    assert torch.stack([p.grad.norm() for p in model.parameters()]).norm() <= 1e-3 * 1.001


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda k: 1 / (k + 1)),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": lambda o: lrs.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [1, 3], 0.5),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 4),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.5, 1), lrs.ExponentialLR(o, 0.5)], [2]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.5, 2), lrs.ExponentialLR(o, 0.9)]),
    "SWALR": lambda o: SWALR(o, 0.01, anneal_epochs=3),
}


def schedulers() -> None:
    """Every kind moves the rate (and, where it cycles, the momentum) of a step, as writing it into the group does."""
    ours = {name for name in SCHEDULERS if name not in ("SWALR",)}
    public = {n for n in lrs.__all__ if n not in ("LRScheduler",)}
    assert ours == public
    for name, make in SCHEDULERS.items():
        scheduled, by_hand, rates = net(), net(), []
        optimizer = KBFGS(scheduled, **SETTINGS)
        schedule = make(optimizer)
        for _ in range(4):
            rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
            optimizer.step(Minibatch(scheduled, F.cross_entropy, X, Y))
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        assert len(set(rates)) > 1, name
        optimizer = KBFGS(by_hand, **SETTINGS)
        for lr, momentum in rates:
            optimizer.param_groups[0].update(lr=lr, momentum=momentum)
            optimizer.step(Minibatch(by_hand, F.cross_entropy, X, Y))
        for p, q in zip(scheduled.parameters(), by_hand.parameters(), strict=True):
            assert torch.equal(p, q), name


def model_copies() -> None:
    """SWA and EMA averages and deep copies in mid-training: usable, and no burden on the original."""
    model, twin = net(), net()
    optimizers = [KBFGS(m, **SETTINGS) for m in (model, twin)]
    swa, ema = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        for m, o in zip((model, twin), optimizers, strict=True):
            o.step(Minibatch(m, F.cross_entropy, X, Y))
        swa.update_parameters(model)
        ema.update_parameters(model)
        copy.deepcopy(model)(X).sum().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    with torch.no_grad():
        assert swa(X).isfinite().all() and ema(X).isfinite().all()
    another = copy.deepcopy(model)
    optimizer = KBFGS(another, **SETTINGS)
    optimizer.step(Minibatch(another, F.cross_entropy, X, Y))
    assert optimizer.state[another[0].weight]["H_A"].isfinite().all()


def groups() -> None:
    """lr, damping, T and weight decay by group; weight and bias of a layer in two groups have one step."""
    model = net()
    optimizer = KBFGS(
        model,
        [
            {"params": list(model[0].parameters()), "lr": 0.0, "weight_decay": 0.0},
            {"params": list(model[3].parameters()), "damping": 2.0, "curvature_update_freq": 2},
            {"params": list(model[5].parameters()), "weight_decay": 0.1},
        ],
        **SETTINGS,
    )
    before = copy.deepcopy(model.state_dict())
    optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    moved = {k.split(".")[0] for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert moved == {"3", "5"} and optimizer.diagnostics()[1].G.kept == 0 and optimizer.diagnostics()[2].G.kept == 1
    two = [{"params": [model[0].weight], "weight_decay": 0.1}, {"params": [model[0].bias]}]
    assert "with the weight decay of group 1" in repr(KBFGS(model, two))
    with pytest.raises(ValueError, match="Weight and bias of 0 .*have the lr .*Only weight_decay may differ"):
        KBFGS(model, [two[0], {**two[1], "lr": 0.1}])


def unfreezing() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = KBFGS(model, [*model[3].parameters(), *model[5].parameters()], **SETTINGS)
    optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
    before = model[0].weight.detach().clone()
    for _ in range(2):
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
    assert not torch.equal(model[0].weight, before) and "s_G" in optimizer.state[model[0].weight]


def set_to_none() -> None:
    """Both ways of clearing gradients give the same run; a layer without a gradient is neither decayed nor moved."""
    pairs = []
    for to_none in (True, False):
        model = net()
        optimizer = KBFGS(model, weight_decay=0.01, **SETTINGS)

        def closure(model: Any = model, to_none: bool = to_none) -> Tensor:
            model.zero_grad(set_to_none=to_none)
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        pairs.append((model, optimizer))
    close(*pairs, tol=0.0)
    model = nn.ModuleDict({"used": nn.Linear(50, 3), "dead": nn.Linear(50, 3)}).double()
    optimizer, before = KBFGS(model, weight_decay=0.1, **SETTINGS), model["dead"].weight.detach().clone()
    optimizer.step(Minibatch(model["used"], F.cross_entropy, X.flatten(1), Y))
    assert torch.equal(model["dead"].weight, before)


def partial_backward() -> None:
    """backward(inputs=…) of one layer: the others have no gradient and no result; reading one says why."""
    model, moments = extend(net()), KBFGSQuantities()
    with backpack(moments):
        F.cross_entropy(model(X), Y).backward(inputs=list(model[5].parameters()))
    assert model[5] in moments and model[0] not in moments
    with pytest.raises(Exception, match="has no result for Conv2d"):
        moments[model[0]]


# ------------------------------------------------------------------ compilers and functional transforms


def compiled_after() -> None:
    """torch.compile of a model that is extended already: a graph break, and the eager run's quantities."""
    model, eager = net(), net()
    optimizers = [KBFGS(m, **SETTINGS) for m in (model, eager)]
    compiled: Any = torch.compile(model, backend="eager")
    try:
        for _ in range(2):
            with warnings.catch_warnings():  # torch's compiler looks at .grad of what enters it after a graph break
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
                optimizers[0].step(Minibatch(compiled, F.cross_entropy, X, Y))
            optimizers[1].step(Minibatch(eager, F.cross_entropy, X, Y))
        close((model, optimizers[0]), (eager, optimizers[1]))
    finally:
        torch._dynamo.reset()


def compiled_before() -> None:
    """Compiled and run before it is extended, compiled code has no hooks: said by name; it trains by momentum."""
    model = net()
    compiled: Any = torch.compile(model, backend="eager")
    try:
        compiled(X)
        optimizer = KBFGS(model, lr=0.01, damping=1.0, curvature_update_freq=1)
        with pytest.warns(UserWarning) as said:
            optimizer.step(Minibatch(compiled, F.cross_entropy, X, Y))
        assert {str(w.message).split()[1] for w in said} == {"0", "3", "5"}
        assert all("was not measured" in str(w.message) and "compiled before" in str(w.message) for w in said)
    finally:
        torch._dynamo.reset()


def written_down() -> None:
    """torch.export, jit.trace and symbolic_trace take down the model alone; a quantized copy computes as it would."""

    def programs(model: Any) -> list[Any]:
        x = X[:2]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces the end of some of these
            exported, traced = torch.export.export(model, (x,), strict=False).module(), torch.jit.trace(model, x)
            results = [program(x) for program in (exported, traced, torch.fx.symbolic_trace(model))]
            return [*results, torch.ao.quantization.quantize_dynamic(model.float(), {nn.Linear})(x.float())]

    for found, expected in zip(programs(extend(net())), programs(net()), strict=True):
        assert torch.equal(found, expected)


def one_graph() -> None:
    """What allows no break between two graphs names ``unextend``, after which it works."""
    for compile_ in (lambda m: torch.compile(m, fullgraph=True, backend="eager"), torch.jit.script):
        model = extend(net())
        with warnings.catch_warnings(), pytest.raises(Exception, match=r"kfqn_ext.unextend\(model\)"):
            warnings.simplefilter("ignore")
            compile_(model)(X)
        torch._dynamo.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.testing.assert_close(compile_(unextend(model))(X), net()(X))
        torch._dynamo.reset()


def functional_transforms() -> None:
    """torch.func and Hessian-vector products on an extended model, in and out of a measuring context."""
    model, plain = extend(net()), net()
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(p: dict[str, Tensor], m: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(m, p, (x,)), y)

    want = torch.func.grad(loss)(params, plain, X, Y)
    got = torch.func.grad(loss)(params, model, X, Y)
    for key in want:
        torch.testing.assert_close(got[key], want[key])
    out_of_place = copy.deepcopy(model)
    out_of_place[1] = nn.ReLU()  # vmap has no in-place ReLU of what it did not batch
    each = torch.func.vmap(torch.func.grad(lambda p, x, y: loss(p, out_of_place, x[None], y[None])), (None, 0, 0))
    for key, value in each(params, X, Y).items():
        torch.testing.assert_close(value.mean(0), want[key])
    moments = KBFGSQuantities()
    with backpack(moments):
        value = F.cross_entropy(model(X), Y)
        parameters = list(model.parameters())
        grads = torch.autograd.grad(value, parameters, create_graph=True)
        hvp = torch.autograd.grad(sum((g * g).sum() for g in grads), parameters)
    assert all(h.isfinite().all() for h in hvp)
    optimizer = KBFGS(model, **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(Minibatch(model, F.cross_entropy, X, Y))


# ------------------------------------------------------------------ closures and phases


def closure_and_phases_agree() -> None:
    pairs = []
    for form in ("closure", "phases"):
        model = net()
        optimizer = KBFGSL(model, lr=0.1, damping=1.0, curvature_update_freq=2)
        for _ in range(4):
            if form == "closure":
                optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
            else:
                phases(optimizer, lambda model=model: F.cross_entropy(model(X), Y).backward())
        pairs.append((model, optimizer))
    close(*pairs, tol=0.0)


def step_without_a_closure() -> None:
    model = net()
    optimizer = KBFGS(model, **SETTINGS)
    F.cross_entropy(model(X), Y).backward()
    with pytest.raises(RuntimeError, match=r"Pass a closure.*first_pass"):
        optimizer.step()


def ordinary_step_never_waits() -> None:
    """Between curvature updates no number is read from a tensor: a step on a GPU does not wait for it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Reads.count += "local_scalar_dense" in str(func) or "is_nonzero" in str(func)
            return func(*args, **(kwargs or {}))

    model = net()
    optimizer = KBFGS(model, lr=0.1, damping=1.0, curvature_update_freq=3)
    counts = []
    optimizer._bad_batches.note = lambda flag: None  # type: ignore[method-assign]  # reads at once on a CPU only
    for _ in range(6):
        before = Reads.count
        with Reads(), patch.object(gate, "is_on_host", lambda t: False):  # as where the numbers are on a GPU
            optimizer.step(Minibatch(model, F.cross_entropy, X, Y))
        counts.append(Reads.count - before)
    assert counts[1] == counts[3] == counts[4] == 0, counts
