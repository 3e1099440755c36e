"""``recorded``: KFAC with the initial weights, the order of data and the averages of the authors' code of 2020."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from examples.paper.cli import main
from examples.paper.commands import recorded
from kfqn_ext.linalg import damped_inverse
from tests.test_examples import write_mnist
from workloads import environment, records
from workloads.nets import autoencoder

DOCS = Path(__file__).parents[1] / "docs"


def test_the_page_has_the_table_of_the_log() -> None:
    table = recorded.render(DOCS.parent / "results" / "kfac-beside-the-record.jsonl")
    assert table.count("| 9999 |") == 6  # five runs and their mean
    assert table in (DOCS / "results.md").read_text()


def test_the_order_is_numpy_s_with_the_code_s_seed() -> None:
    """As a loop over a data set that is shuffled in place, and draws an order for the second pass."""
    np.random.seed(9999)
    images = np.arange(10)
    expected = []
    for _ in range(3):
        order = np.arange(10)
        np.random.shuffle(order)
        images = images[order]
        for start in (0, 4):  # the rest of each epoch is dropped
            np.random.permutation(4)
            expected.append(images[start : start + 4].tolist())
    found = [x.tolist() for x in recorded.batches(torch.arange(10), seed=9999, epochs=3, batch_size=4)]
    assert found == expected


def test_inverses_are_new_at_the_code_s_steps() -> None:
    due = [i for i in range(90) if (i + 1) % recorded.inverse_frequency(i + 1) == 0]  # the code counts from 0
    assert due == [i for i in range(90) if i <= 20 or i % 20 == 0]


def test_three_steps_are_those_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written out in float64: averages, π = 1, momentum 0.9 M + 0.1 g with a rate of 1."""
    monkeypatch.setattr(recorded, "MNIST_WIDTHS", (6, 5, 3, 5, 6))
    images = torch.rand(12, 6, dtype=torch.float64)
    torch.set_default_dtype(torch.float64)
    try:
        result = recorded.train(images, seed=3, targets=1, epochs=1, batch_size=4)
        torch.manual_seed(3)
        net = autoencoder((6, 5, 3, 5, 6))
    finally:
        torch.set_default_dtype(torch.float32)
    linear = [layer for layer in net if isinstance(layer, torch.nn.Linear)]
    torch.manual_seed(1)
    state = [[torch.zeros(())] * 3 for _ in linear]  # Ω, Γ, momentum

    for i, x in enumerate(recorded.batches(images, 3, 1, 4)):
        directions = []
        for layer, values, (a, g, dW) in zip(linear, state, _passes(net, linear, x), strict=True):
            rho = min(1 - 1 / (i + 1), 0.9)
            values[0] = rho * values[0] + (1 - rho) * a.T @ a / 4
            values[1] = rho * values[1] + (1 - rho) * g.T @ g / 4
            values[2] = 0.9 * values[2] + 0.1 * dW
            H_A, H_G = (damped_inverse(factor, torch.tensor(3.0).sqrt().double()) for factor in values[:2])
            directions.append((layer, H_G @ values[2] @ H_A))
        with torch.no_grad():
            for layer, p in directions:
                layer.weight -= p[:, :-1]
                layer.bias -= p[:, -1]
    assert result["diverged_at"] is None
    assert result["losses"] == pytest.approx([recorded.evaluate(net, images, 4)], rel=1e-10)


def _passes(net, linear, x):
    """[a, 1] and the sampled ∂h of each datum, [4, ·], and the gradient of the mean loss, for each layer."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    hooks = [
        layer.register_forward_hook(lambda m, inputs, output: kept.append((inputs[0], output))) for layer in linear
    ]
    output = net(x)
    for hook in hooks:
        hook.remove()
    parameters = [p for layer in linear for p in (layer.weight, layer.bias)]
    loss = F.binary_cross_entropy_with_logits(output, x, reduction="sum") / len(x)
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
    generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
    sampled = torch.bernoulli(output.detach().sigmoid(), generator=generator)
    total = F.binary_cross_entropy_with_logits(output, sampled, reduction="sum")
    dh = torch.autograd.grad(total, [h for _, h in kept])
    for (a, _), g, dW, db in zip(kept, dh, gradients[::2], gradients[1::2], strict=True):
        yield torch.cat([a.detach(), torch.ones(len(x), 1)], dim=1), g, torch.cat([dW, db[:, None]], dim=1)


def test_a_run_is_kept_continued_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mnist(tmp_path / "MNIST/raw")
    out = tmp_path / "log.jsonl"
    command = ["recorded", "--data-root", str(tmp_path), "--batch-size", "100", "--out", str(out), "--epochs", "1"]
    main([*command, "--targets", "0"])
    first = records.read(out)
    main([*command, "--targets", "0", "1"])
    main([*command, "--targets", "0", "--seed", "1"])
    assert records.read(out)[0] == first[0]
    assert [(r["seed"], r["targets"]) for r in records.read(out)] == [(9999, 0), (9999, 1), (1, 0)]
    assert len(first[0]["losses"]) == 1 and first[0]["losses"][0] < 543
    assert torch.__version__.startswith(first[0]["environment"]["versions"]["torch"])
    assert "the record" in capsys.readouterr().out


def test_the_table_says_where_a_run_left_all_bounds(tmp_path: Path) -> None:
    path, about = tmp_path / "log.jsonl", {"environment": environment.describe(torch.device("cpu"))}
    records.append(path, {"seed": 5, "targets": 1, "losses": [181.17], "diverged_at": 73, **about})
    records.append(path, {"seed": 5, "targets": 0, "losses": [184.83, 137.7], "diverged_at": None, **about})
    records.append(path, {"seed": 9999, "targets": 1, "losses": [183.0, 135.0], "diverged_at": None, **about})
    records.append(path, {"seed": 9999, "targets": 0, "losses": [185.0, 136.0], "diverged_at": None, **about})
    assert recorded.render(path).splitlines()[2:8] == [
        "| the record |  | 183 | 135 |",
        "| 9999 | 0 | 185.00 (+1.1%) | 136.00 (+0.7%) |",
        "| 9999 | 1 | 183.00 (+0.0%) | 135.00 (+0.0%) |",
        "| 5 | 0 | 184.83 (+1.0%) | 137.70 (+2.0%) |",
        "| 5 | 1 | 181.17 (-1.0%) | diverged at step 73 |",
        "| 9999 | mean | 184.00 (+0.5%) | 135.50 (+0.4%) |",
    ]


def test_a_loss_without_bounds_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MNIST_WIDTHS", (6, 5, 3, 5, 6))
    monkeypatch.setattr(recorded, "evaluate", lambda *args: 0.01)  # the first loss is more than ten times this
    result = recorded.train(torch.rand(12, 6), seed=0, targets=0, epochs=1, batch_size=4)
    assert result == {"losses": [], "diverged_at": 1}
