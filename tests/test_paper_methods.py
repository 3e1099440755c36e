"""The methods that are compared, and the paper's own values."""

import pytest
import torch
from torch import nn

from examples.paper import paper_values
from examples.paper.cell import Cell
from examples.paper.defaults import differs_from_paper, frequencies, make_cell, paper_cell
from examples.paper.tables import TABLES, cells_of, grid, parse_changes
from workloads.losses import CROSS_ENTROPY
from workloads.methods import METHODS, MOMENTUM, Settings
from workloads.objective import minibatch


def batch(net: nn.Module):
    return minibatch(net, CROSS_ENTROPY, torch.rand(8, 4), torch.arange(8) % 3)


def test_sgdm_decays_outside_its_momentum() -> None:
    net = nn.Linear(4, 3)
    optimizer = METHODS["sgdm"].build(net, Settings(lr=0.1, weight_decay=0.5))
    W, M = net.weight.detach().clone(), torch.zeros(3, 4)
    for _ in range(3):
        optimizer.step(batch(net))
        M = MOMENTUM * M + net.weight.grad
        W = W - 0.1 * (M + 0.5 * W)
    torch.testing.assert_close(net.weight.detach(), W)


def test_adam_takes_damping_for_epsilon_and_decays_outside_its_momentum() -> None:
    net = nn.Linear(4, 3)
    optimizer = METHODS["adam"].build(net, Settings(lr=0.1, damping=0.01, weight_decay=0.5))
    W = net.weight.detach().clone()
    optimizer.step(batch(net))
    g = net.weight.grad
    torch.testing.assert_close(net.weight.detach(), W - 0.1 * (g / (g.abs() + 0.01) + 0.5 * W))


def test_the_code_of_2020_takes_the_second_moment_of_the_average() -> None:
    net = nn.Linear(4, 3).double()
    optimizer = METHODS["adam-2020"].build(net, Settings(lr=0.1, damping=0.01, weight_decay=0.5))
    closure = minibatch(net, CROSS_ENTROPY, torch.rand(8, 4, dtype=torch.float64), torch.arange(8) % 3)
    W, m, v = net.weight.detach().clone(), torch.zeros(3, 4), torch.zeros(3, 4)
    for k in range(1, 6):
        loss = optimizer.step(closure)
        m = 0.9 * m + 0.1 * net.weight.grad
        m_hat = m / (1 - 0.9**k)
        v = 0.9 * v + 0.1 * m_hat**2
        W = W - 0.1 * (m_hat / ((v / (1 - 0.9**k)).sqrt() + 0.01) + 0.5 * W)
        torch.testing.assert_close(net.weight.detach(), W)
    assert loss < 1.5


@pytest.mark.parametrize("method", METHODS)
def test_each_method_lowers_the_loss_with_a_schedule_of_learning_rates(method: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    settings = Settings(lr=0.01, damping=1.0, update_freq=1)
    optimizer = METHODS[method].build(net, settings)
    closure = batch(net)
    first = optimizer.step(closure)
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    for _ in range(10):
        last = optimizer.step(closure)
    assert last < first


def test_every_cell_of_the_paper_can_be_made() -> None:
    for problem, row in paper_values.BEST.items():
        for method, best in row.items():
            cell = paper_cell(problem, method, seed=3)
            assert (cell.lr, cell.damping, cell.weight_decay) == (best.lr, best.damping, best.weight_decay)
            assert differs_from_paper(cell) == {}


def test_the_paper_s_settings_are_the_defaults() -> None:
    assert frequencies("mnist", "kbfgs-dagger") == {"update_freq": 20}
    assert frequencies("vgg16-cifar10", "kfac") == {"update_freq": 100, "stats_update_freq": 10}
    assert frequencies("resnet32-cifar100", "kbfgs") == {"update_freq": 20}
    assert (paper_cell("mnist", "adam").seconds, paper_cell("faces", "kfac").seconds) == (500, 2000)
    cnn = paper_cell("vgg16-cifar10", "sgdm"), paper_cell("vgg16-cifar10", "kbfgs")
    assert [(c.epochs, c.decay_every) for c in cnn] == [(200, 60), (150, 50)]
    assert [cnn[1].lr_at(e) / 30 for e in (0, 49, 50, 149)] == pytest.approx([1, 1, 0.1, 0.01])


@pytest.mark.parametrize("end", [{"epochs": 150}, {"seconds": 9}, {"steps": 3}, {"epochs": 2, "seconds": 9}])
def test_a_budget_leaves_the_paper_s_decay(end: dict[str, int]) -> None:
    for problem, decay in (("vgg16-cifar10", 50), ("vgg8-mnist", 50), ("mnist", 0)):
        cell = paper_cell(problem, "kbfgs", **end)
        assert cell.decay_every == decay and cell.epochs == end.get("epochs") and cell.seconds == end.get("seconds")
        assert paper_cell(problem, "kbfgs", **end, decay_every=7).decay_every == 7
        assert paper_cell(problem, "kbfgs", **end, decay_every=0).decay_every == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_frequencies_that_its_optimizer_has(method: str) -> None:
    if METHODS[method].first_order:
        assert frequencies("vgg16-cifar10", method) == {}
        return
    found = frequencies("vgg16-cifar10", method)
    optimizer = METHODS[method].build(nn.Linear(4, 3), Settings(lr=0.1, damping=1.0, **found))
    group = optimizer.param_groups[0]
    kfac = {"update_freq": 100, "stats_update_freq": 10}
    assert found == (kfac if type(optimizer).__name__ == "KFAC" else {"update_freq": 20})
    names = {"stats_update_freq": "stats_update_freq", "inverse_update_freq": "update_freq"}
    if METHODS[method].is_kfac:
        assert {name: group[name] for name in names} == {name: kfac[ours] for name, ours in names.items()}


def test_adam_2020_steps_without_a_closure() -> None:
    nets = nn.Linear(4, 3), nn.Linear(4, 3)
    nets[1].load_state_dict(nets[0].state_dict())
    closures = [minibatch(net, CROSS_ENTROPY, torch.ones(8, 4), torch.arange(8) % 3) for net in nets]
    optimizers = [METHODS["adam-2020"].build(net, Settings(lr=0.1, damping=0.01)) for net in nets]
    for _ in range(2):
        loss = closures[0]()
        assert optimizers[0].step() is None
        assert optimizers[1].step(closures[1]) == loss
    torch.testing.assert_close(nets[0].weight, nets[1].weight)


def test_grids_have_the_paper_s_sizes() -> None:
    assert len(grid("mnist", "kbfgs")) == 10 * 7
    assert len(grid("curves", "adam")) == 10 * 5
    assert len(grid("faces", "sgdm")) == 10
    assert len(grid("vgg16-cifar10", "kbfgsl")) == 11 * 7 * 6
    assert len(grid("resnet32-cifar100", "kfac")) == 6 * 4 * 7


@pytest.mark.parametrize("name", TABLES)
def test_the_cells_of_a_table_are_different(name: str) -> None:
    table = TABLES[name]
    cells = cells_of(table, values=table.values, seeds=range(2), budget={"epochs": 1}, changes={}, found={})
    assert len({cell.key for cell in cells}) == len(cells) > 0


def test_changes_replace_the_paper_s_values() -> None:
    changes = parse_changes(["kfac.damping=1", "kfac.update_freq=geometric", "kfac.lr=0.1"])
    cells = cells_of(TABLES["table-1"], values="paper", seeds=[0], budget={}, changes=changes, found={})
    (kfac,) = [c for c in cells if c.method == "kfac" and c.problem == "mnist"]
    assert (kfac.lr, kfac.damping, kfac.update_freq) == (0.1, 1.0, "geometric")
    assert differs_from_paper(kfac) == {"lr": (0.1, 0.3), "damping": (1.0, 10.0), "update_freq": ("geometric", 20)}
    for wrong in ("kfac", "kfac.momentum=1", "nobody.lr=1"):
        with pytest.raises(ValueError, match="METHOD.FIELD=VALUE"):
            parse_changes([wrong])


def test_a_cell_says_what_is_wrong_with_it() -> None:
    with pytest.raises(ValueError, match="No problem 'mnst'"):
        Cell("mnst", "adam", 0.1, 0.1, epochs=1)
    with pytest.raises(ValueError, match="needs a damping"):
        Cell("mnist", "adam", 0.1, epochs=1)
    with pytest.raises(ValueError, match="budget"):
        Cell("mnist", "sgdm", 0.1)


def test_30_and_30_0_are_one_cell_and_the_key_tells_cells_apart() -> None:
    values = {"damping": 1, "epochs": 2}
    assert (
        make_cell("mnist", "kbfgs", {"lr": 30, **values}).key == make_cell("mnist", "kbfgs", {"lr": 30.0, **values}).key
    )
    assert make_cell("mnist", "kbfgs", {"lr": 3, **values}).key != make_cell("mnist", "kbfgs", {"lr": 30, **values}).key
