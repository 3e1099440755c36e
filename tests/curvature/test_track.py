"""``track_curvature``: measures when it should, changes nothing, and sees H_A learn."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from kfqn_ext import KBFGS, Minibatch
from kfqn_ext.curvature import plot_tracks, track_curvature
from kfqn_ext.linalg import bfgs_update, damped_inverse
from tests.curvature.nets import F64, residual


def run(track: bool, steps: int = 4) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    model, x, y = residual(nn.ReLU(inplace=True))
    model.train()
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0, curvature_update_freq=2)
    tracker = track_curvature(optimizer, model, cross_entropy, x, y, ["last"], steps=2, name="K-BFGS")
    for _ in range(steps):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
        if track:
            tracker()
    return model, tracker


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    """Dropout and BatchNorm in training mode included."""
    (with_, tracker), (without, _) = run(True), run(False)
    for p, q in zip(with_.state_dict().values(), without.state_dict().values(), strict=True):
        assert torch.equal(p, q)
    assert [step for step, _ in tracker.reports] == [2, 4]
    frame = tracker.to_dataframe()
    assert list(frame.columns[:3]) == ["step", "layer", "rung"] and set(frame.step) == {2, 4}
    assert (frame[frame.label == "eq_18"].H_exact_error > 0).all()
    tracker.plot(tmp_path / "track.png")
    plot_tracks({"a": tracker.reports, "b": tracker.reports}, tmp_path / "both.png")
    assert (tmp_path / "track.png").stat().st_size > 5_000 and (tmp_path / "both.png").exists()


def test_chosen_steps_and_hooks() -> None:
    model, x, y = residual(nn.Tanh())
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0, curvature_update_freq=1)
    tracker = track_curvature(optimizer, model, cross_entropy, x, y, ["last"], steps={1, 3})
    optimizer.register_step_post_hook(tracker)
    for _ in range(4):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
    assert [step for step, _ in tracker.reports] == [1, 3]
    assert "KBFGS: H_A⁻¹ ⊗ H_G⁻¹" in str(tracker.reports[0][1])


def test_before_batchnorm_only_h_a_learns() -> None:
    """H_G stays at I / λ_G: what it could learn from is zero there but for rounding."""
    model, x, y = residual(nn.ReLU(inplace=True))
    model.train()
    model.dropout.p = 0.0
    optimizer = KBFGS.as_printed(model, lr=0.1, damping=1.0, curvature_update_freq=1)
    for _ in range(4):
        optimizer.step(Minibatch(model, cross_entropy, x, y))
    damping_G = (1.0 / 16) ** 0.5  # √λ / √|T|
    assert torch.equal(optimizer.state[model.second.weight]["H_G"], torch.eye(4, dtype=F64) / damping_G)
    assert not torch.equal(optimizer.state[model.first.weight]["H_G"], torch.eye(4, dtype=F64) / damping_G)


def test_mistakes_are_named(tmp_path: Path) -> None:
    model, x, y = residual(nn.Tanh())
    optimizer = KBFGS.as_printed(model)
    with pytest.raises(ValueError, match="steps=0"):
        track_curvature(optimizer, model, cross_entropy, x, y, steps=0)
    tracker = track_curvature(optimizer, model, cross_entropy, x, y)
    assert tracker.to_dataframe().empty
    with pytest.raises(ValueError, match="call the tracker after each step"):
        tracker.plot(tmp_path / "empty.png")


def test_errors_follow_hessian_action_bfgs() -> None:
    """On one fixed minibatch, H_A's error is that of BFGS along H_A ā from its start at another A."""
    model, x, y = residual(nn.Tanh())
    optimizer = KBFGS.as_printed(copy.deepcopy(model), lr=1e-12, damping=0.01, curvature_update_freq=1)
    tracked = optimizer._model
    tracker = track_curvature(optimizer, tracked, cross_entropy, x, y, ["first"], steps=1)
    other = torch.randn_like(x)
    optimizer.step(Minibatch(tracked, cross_entropy, other, y))  # H_A starts from another minibatch's A
    start = optimizer.state[tracked.first.weight]["H_A"].clone()
    A, a_bar = gram_and_mean(x)
    damping = (0.01 * 16) ** 0.5
    for _ in range(5):
        optimizer.step(Minibatch(tracked, cross_entropy, x, y))
        s = start @ a_bar
        start = bfgs_update(start, s, A @ s + damping * s)
        tracker()
        exact = damped_inverse(A, damping)
        expected = float((start - exact).norm() / exact.norm())
        row = tracker.reports[-1][1]["first", "KBFGS: H_A⁻¹ ⊗ H_G⁻¹"]
        assert abs(row.H_A_error - expected) < 1e-6 * expected


def gram_and_mean(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.nn.functional.unfold(x, 3, padding=1).mT
    a = torch.cat((a, torch.ones_like(a[..., :1])), -1).to(F64)
    return torch.einsum("nti,ntj->ij", a, a) / len(a), a.mean((0, 1))
