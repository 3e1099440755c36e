"""What `diagnostics()` reports, against counts and eigenvalues found otherwise."""

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from kfqn_ext.geometry import geometry_of
from kfqn_ext.linalg import damped_inverse
from kfqn_ext.optim import KBFGS, Minibatch, splits
from tests import reference as ref
from tests.cases import FEW_EXAMPLES, IGNORE_EVEN_SAME, Case, random_cases
from tests.optim.family import FAMILY, rows
from tests.optim.twins import TWINS

pytestmark = IGNORE_EVEN_SAME
F64 = torch.float64
COMMON: dict[str, Any] = {"lr": 0.1, "damping": 0.5, "curvature_update_freq": 1}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 3, groups=2), nn.Tanh(), nn.Flatten(),
        nn.Linear(24, 3),
    ).double()  # fmt: skip


def batch(model: nn.Module, k: int, size: int = 8) -> Minibatch:
    generator = torch.Generator().manual_seed(k)
    return Minibatch(
        model, F.cross_entropy, torch.randn(size, 2, 8, 8, dtype=F64, generator=generator), torch.arange(size) % 3
    )


def by_name(optimizer: Any) -> dict[str, Any]:
    return {d.name: d for d in optimizer.diagnostics(eigenvalues=True)}


def test_before_the_first_step_there_is_nothing_to_describe() -> None:
    for d in KBFGS.as_printed(net()).diagnostics():
        assert (d.A, d.G, d.leverage) == (None, None, None)


def counting(reference: type) -> type:
    """A reference that counts the pairs that Powell's damping changes, sᵀy < μ₁ yᵀHy, per block."""

    class Counting(reference):  # type: ignore[misc, valid-type]
        def update_H_G(self, st: Any, first: ref.Layer, second: ref.Layer) -> None:
            H = st.H_G0 if self.pair_damping == "algo_6" else st.H_G
            super().update_H_G(st, first, second)
            if torch.is_tensor(st.s_G):
                sy = torch.einsum("...i,...i->...", st.s_G, st.y_G)
                yHy = torch.einsum("...i,...ij,...j->...", st.y_G, H, st.y_G)
                st.damped = getattr(st, "damped", 0) + int((sy < self.mu1 * yHy).sum())

    return Counting


@pytest.mark.parametrize("name", rows(lambda member: not member.computed))  # factors are no pairs
def test_counts_and_eigenvalues(name: str) -> None:
    model, twin, steps = net(), net(), 12
    member, dense = FAMILY[name], TWINS[name].derived(counting)
    optimizer, reference = (one.make(m, lr=0.1, damping=0.5) for one, m in ((member, model), (dense, twin)))
    for k in range(steps):
        optimizer.step(batch(model, k))
        reference.step(batch(twin, k).x, batch(twin, k).y)
    damped = 0
    for layer, d in by_name(optimizer).items():
        want: Any = reference.state[layer]
        blocks = 2 if layer == "2" else 1  # pairs of channel groups count one by one
        of_layer = getattr(want, "damped", 0)
        assert (d.A.kept, d.A.damped, d.A.skipped) == (blocks * member.pairs_of_A(steps), 0, 0)
        pairs_G = steps if member.secant_G else 4 * (steps - 1) if member.action_G else 0
        assert (d.G.kept, d.G.damped, d.G.skipped) == (blocks * pairs_G, of_layer, 0)
        damped += of_layer
        for side, H in ((d.A, want.H_A), (d.G, want.H_G)):
            eigenvalues = torch.linalg.eigvalsh(H)
            assert side.smallest == pytest.approx(float(eigenvalues.min()), rel=1e-8)
            assert side.largest == pytest.approx(float(eigenvalues.max()), rel=1e-8)
            assert 0 < side.smallest <= side.largest
        largest = [float(torch.as_tensor(damping).max()) for damping in (want.lambda_A, want.lambda_G)]
        assert (d.A.damping, d.G.damping) == pytest.approx(largest)
    assert 0 < damped < 4 * steps or not member.secant_G  # some pairs and not all


def test_updates_that_are_not_due_are_not_counted() -> None:
    model = net()
    optimizer = KBFGS.as_printed(model, **{**COMMON, "curvature_update_freq": 3})
    for k in range(7):
        optimizer.step(batch(model, k))
    assert [d.A.kept for d in optimizer.diagnostics() if d.A] == [2, 4, 2]


def test_pairs_that_say_nothing_are_not_formed() -> None:
    """Before BatchNorm Δ∂h̄ is rounding noise: H_G learns nothing there, H_A does."""
    model: Any = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    model = model.double()
    optimizer = KBFGS.as_printed(model, **COMMON)
    for k in range(5):
        optimizer.step(batch(model, k))
    conv, linear = optimizer.diagnostics(eigenvalues=True)
    assert conv.G is not None and conv.A is not None and linear.G is not None
    assert (conv.G.kept, conv.G.damped, conv.G.skipped) == (0, 0, 0) and conv.A.kept == 4
    assert conv.G.smallest == conv.G.largest == pytest.approx(1 / conv.G.damping)
    assert (linear.G.kept, linear.G.skipped) == (5, 0)


def test_a_bad_batch_is_not_counted() -> None:
    """It changes nothing, and has its own warning."""
    model = net()
    optimizer = KBFGS.as_printed(model, **COMMON)
    optimizer.step(batch(model, 0))
    before, bad = optimizer.diagnostics(), batch(model, 1)
    bad.x[0] = float("nan")
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step(bad)
    assert optimizer.diagnostics() == before


# ------------------------------------------------------------------ leverage


@FEW_EXAMPLES
@given(case=random_cases(), seed=st.integers(0, 2**31), exponent=st.integers(-6, 4))
def test_leverage_of_an_exact_inverse_is_at_most_1(case: Case, seed: int, exponent: int) -> None:
    """|T| āᵀ (A + λI)⁻¹ ā ≤ 1 for every layer: A ⪰ |T| ā āᵀ, a mean square is not less than the square of the mean."""
    torch.manual_seed(seed)
    layer, x = case.layer(), case.input()
    geometry = geometry_of(layer)
    assert geometry is not None
    x, T = geometry.as_batch(x), geometry.num_locations(geometry.as_batch(layer(x)))
    a_bar, H = geometry.mean_patch(x), damped_inverse(geometry.gram(x), 10.0**exponent)
    assert (T * torch.einsum("...i,...ij,...j->...", a_bar, H, a_bar) <= 1 + 1e-8).all()


def explicit_leverage(optimizer: Any, model: nn.Module, minibatch: Minibatch) -> dict[str, float]:
    """|T| āᵀ H_A ā with the H_A before the step."""
    found = {}
    for name, layer in ref.capture(model, minibatch.loss_fn, minibatch.x, minibatch.y).layers.items():
        state = optimizer.state[model.get_submodule(name).weight]
        s = optimizer.recipe.input_inverse.precondition(state, layer.a_bar.unsqueeze(-2)).squeeze(-2)
        found[name] = float((layer.num_locations * (s * layer.a_bar).sum(-1)).max())
    return found


@pytest.mark.parametrize("name", rows(lambda member: member.action_A))
def test_leverage_is_that_of_the_inverse_before_its_update(name: str) -> None:
    model = net()
    optimizer = FAMILY[name].make(model, lr=0.1, damping=0.5)
    optimizer.step(batch(model, 0))
    if not FAMILY[name].pairs_A:
        # The first inverse is exact for the first minibatch.
        assert all(0 < d.leverage <= 1 + 1e-12 for d in optimizer.diagnostics())
    for k in range(1, 4):
        want = explicit_leverage(optimizer, model, batch(model, k))
        optimizer.step(batch(model, k))
        assert {d.name: d.leverage for d in optimizer.diagnostics()} == pytest.approx(want, rel=1e-8)


@pytest.mark.filterwarnings("ignore:A batch had a gradient")
def test_leverage_of_micro_batches_is_that_of_the_batch() -> None:
    """Where the first H_A is known only after the pass, also of a layer that was seen before, in a bad batch."""
    # Both halves are alike, so that ā is: A is looked at along that of the first.
    x, y, found = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)).repeat(2, 1), torch.arange(6) % 3, []
    for parts in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = FAMILY["L-BFGS for H_A"].make(model, lr=0.1, damping=100.0, T=1)
        for batch in (x * float("nan"), x):
            optimizer.zero_grad()
            with optimizer.first_pass():
                for some, targets in zip(batch.chunk(parts), y.chunk(parts), strict=True):
                    (F.cross_entropy(model(some), targets) / parts).backward()
            optimizer.step()
            if optimizer.second_pass_due:
                with optimizer.second_pass():
                    for some, targets in zip(batch.chunk(parts), y.chunk(parts), strict=True):
                        (F.cross_entropy(model(some), targets) / parts).backward()
        found.append(optimizer.diagnostics()[0].leverage)
    assert 0 < found[0] < 1
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_leverage_tells_a_stale_inverse() -> None:
    """Activations that grow tenfold after the warm start: H_A is a hundred times too large for them."""
    model = net()
    optimizer = KBFGS.as_printed(model, **COMMON)
    small = batch(model, 0)
    small.x.mul_(0.1).add_(0.1)
    optimizer.step(small)
    small.x.mul_(10)
    optimizer.step(small)
    assert by_name(optimizer)["0"].leverage > 2


# ------------------------------------------------------------------ every member


def eigen(H: Tensor) -> tuple[float, float]:
    eigenvalues = torch.linalg.eigvalsh(H)
    return float(eigenvalues.min()), float(eigenvalues.max())


@pytest.mark.parametrize("name", FAMILY)
def test_every_member_has_diagnostics(name: str) -> None:
    model, member = net(), FAMILY[name]
    given = {"damping_A": 0.3, "damping_G": 0.6} if member.given_damping else {}
    optimizer = member.make(model, lr=0.1, damping=0.5, **given)
    for k in range(3):
        optimizer.step(batch(model, k))
    found = optimizer.diagnostics(eigenvalues=True)
    assert [d.name for d in found] == ["0", "2", "5"]
    for d in found:
        state, layer = optimizer.state[model.get_submodule(d.name).weight], model.get_submodule(d.name)
        assert d.A is not None and d.G is not None
        for side, key in ((d.A, "H_A"), (d.G, "H_G")):
            assert 0 < side.smallest <= side.largest
            if key in state:
                assert (side.smallest, side.largest) == pytest.approx(eigen(state[key]))
        T = {"0": 16, "2": 4, "5": 1}[d.name]
        if member.given_damping:
            assert (d.A.damping, d.G.damping) == pytest.approx((0.3, 0.6))
        elif member.recipe.split is splits.spatial:
            assert (d.A.damping, d.G.damping) == pytest.approx(((0.5 * T) ** 0.5, (0.5 / T) ** 0.5))
        elif not member.reads_traces:
            assert d.A.damping == d.G.damping == pytest.approx(0.5**0.5)
        elif member.relative:
            assert d.A.damping == pytest.approx(0.5 * float(state["trace_A"].max()))
        elif getattr(layer, "groups", 1) == 1:  # the largest of several groups' otherwise
            assert d.A.damping * d.G.damping == pytest.approx(0.5)
        assert (d.A.kept > 0) == (d.leverage is not None) == member.action_A
        assert (d.G.kept > 0) == (member.secant_G or member.action_G)
    assert "smallest" in str(found[0])  # a line that a person can read


# ------------------------------------------------------------------ printed, logged, cheap


def trained(steps: int = 3) -> Any:
    model = net()
    optimizer = KBFGS.as_printed(model, **COMMON)
    for k in range(steps):
        optimizer.step(batch(model, k))
    return optimizer


def table(optimizer: Any, **options: bool) -> list[list[str]]:
    lines = str(optimizer.diagnostics(**options)).splitlines()
    assert len({len(line) for line in lines}) == 1  # all columns end where their heads do
    return [line.split() for line in lines]


def test_what_it_returns_prints_as_a_table() -> None:
    optimizer = trained()
    found, (head, *rows_) = optimizer.diagnostics(eigenvalues=True), table(optimizer, eigenvalues=True)
    assert head == ["layer", "inverse", "kept", "damped", "skipped", "smallest", "largest", "damping", "leverage"]
    assert [row[:2] for row in rows_] == [[name, side] for name in ("0", "2", "5") for side in ("H_A", "H_G")]
    for d, row_A, row_G in zip(found, rows_[::2], rows_[1::2], strict=True):
        for side, row in ((d.A, row_A), (d.G, row_G)):
            assert [int(cell) for cell in row[2:5]] == [side.kept, side.damped, side.skipped]
            want = [side.smallest, side.largest, side.damping]
            assert [float(cell) for cell in row[5:8]] == pytest.approx(want, rel=6e-3)  # three digits
        assert float(row_A[8]) == pytest.approx(d.leverage, rel=6e-3) and row_G[8] == "-"


def test_a_table_before_the_first_step_has_no_numbers() -> None:
    _, *rows_ = table(KBFGS.as_printed(net()))
    assert len(rows_) == 6 and {cell for row in rows_ for cell in row[2:]} == {"-"}


def test_the_default_finds_no_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take d³ operations, and so does writing out an H that is kept as pairs: neither happens."""
    optimizer = trained()
    whole = optimizer.diagnostics(eigenvalues=True)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("expensive")

    monkeypatch.setattr(torch.linalg, "eigvalsh", never)
    monkeypatch.setattr("kfqn_ext.linalg.operators.Inverses.dense", never)
    cheap = optimizer.diagnostics()
    assert not {"smallest", "largest"} & set(table(optimizer)[0])
    for short, long in zip(cheap, whole, strict=True):
        assert (short.name, short.leverage) == (long.name, long.leverage)
        for a, b in ((short.A, long.A), (short.G, long.G)):
            assert (a.smallest, a.largest) == (None, None)
            assert a == dataclasses.replace(b, smallest=None, largest=None)


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("eigenvalues", [False, True])
def test_as_dict_has_flat_names_and_numbers_of_python(name: str, eigenvalues: bool) -> None:
    model, member = net(), FAMILY[name]
    optimizer = member.make(model, lr=0.1, damping=0.5)
    assert optimizer.diagnostics(eigenvalues).as_dict() == {}
    for k in range(2):
        optimizer.step(batch(model, k))
    found = optimizer.diagnostics(eigenvalues)
    flat = found.as_dict()
    assert {type(value) for value in flat.values()} == {int, float} and json.loads(json.dumps(flat)) == flat
    numbers = {"kept", "damped", "skipped", "damping", *(("smallest", "largest") if eigenvalues else ())}
    for d in found:
        for side, inverse in (("H_A", d.A), ("H_G", d.G)):
            of_side = {key: value for key, value in flat.items() if key.startswith(f"{d.name}/{side}/")}
            assert of_side == {f"{d.name}/{side}/{number}": getattr(inverse, number) for number in numbers}
        assert flat.get(f"{d.name}/leverage") == d.leverage
