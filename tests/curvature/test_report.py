"""The report of a comparison: what it prints, converts and draws, and what it costs."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy

from kfqn_ext.curvature import CurvatureReport, LayerReport, curvature_ladder, plots
from kfqn_ext.curvature.report import picture
from tests.curvature.nets import CLASSES, F64, N, residual
from tests.curvature.test_ladder import ladder, trained


def test_report_prints_and_converts(tmp_path: Path) -> None:
    model, x, y, optimizer = trained()
    report = ladder(model, x, y, optimizers=optimizer)
    text = str(report)
    assert "second: 2 groups of W 2 × 19, 4 data, 16 locations" in text
    assert text.count("thm_4") == 3 and "KBFGS: H_A⁻¹ ⊗ H_G⁻¹" in text
    frame = report.to_dataframe()
    assert set(frame["layer"]) == {"first", "second", "last"}
    row = frame[(frame.layer == "first") & (frame.rung == "A ⊗ G")].iloc[0]
    assert row.error == report["first", "A ⊗ G"].error
    markdown = report.to_markdown()
    assert markdown.count("| rung | paper |") == 3
    assert report.to_markdown(["angle", "error"]).count("| rung | paper | angle ° | error |") == 3
    with pytest.raises(ValueError, match="Row has no number eror; choose among error, .*share"):
        report.to_markdown(["eror"])
    path = tmp_path / "new folder" / "ladder.png"
    report.plot(path)
    assert path.stat().st_size > 10_000
    assert len(report) == 3 and report[0] is report["first"] and [layer.name for layer in report][1] == "second"


def test_report_names_what_it_has() -> None:
    model, x, y = residual(nn.Tanh())
    report = ladder(model, x, y, ["last"])
    with pytest.raises(KeyError, match="No layer 'first'; there are 'last'"):
        report["first"]
    with pytest.raises(KeyError, match=r"No rung .*A.*; there are .*exact block"):
        report["last", "A"]


def test_mistakes_are_named() -> None:
    model, x, y = residual(nn.Tanh())
    with pytest.raises(MemoryError, match="layer first .*matrices of its size.*estimate_curvature"):
        ladder(model, x, y, memory_budget=1000)
    with pytest.raises(ValueError, match="Sequential has no linear or convolutional layer"):
        ladder(nn.Sequential(nn.Tanh()), x, y)


def test_outputs_that_are_no_tensor_have_no_fisher_rungs() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, CLASSES)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return torch.tanh(self.inner(x)), 0

    x, y = torch.randn(N, 3), torch.arange(N) % CLASSES
    report = curvature_ladder(Pair(), lambda z, y: cross_entropy(z[0], y), x, y, progress=False)
    assert "The model returns a tuple" in str(report) and "Γ" not in str(report)


@pytest.mark.parametrize(("library", "call"), [("pandas", "to_dataframe"), ("matplotlib", "plot")])
def test_missing_libraries_are_named(library: str, call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kfqn_ext.curvature import lazy

    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

    model, x, y = residual(nn.Tanh())
    report = ladder(model, x, y, ["last"])
    monkeypatch.setattr(lazy, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=rf"{library}, .*pip install {library}"):
        report.plot(tmp_path / "x.png") if call == "plot" else report.to_dataframe()


def drawn(report: CurvatureReport, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The three parts of each layer's picture: bars, matrices, spectra."""
    figures: list[Any] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    report.plot("nowhere.png")
    return [(above.subfigs[0], below, above.subfigs[1]) for above, below in (p.subfigs for p in figures[0].subfigs)]


def test_pictures_show_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y, optimizer = trained()
    report = ladder(model, x, y, ["second", "last"], optimizer)
    for layer, (bars, maps, spectra) in zip(report, drawn(report, monkeypatch), strict=True):
        rows = {f"{row.rung}  {row.label}".rstrip(): row for row in layer.rows}
        axes = bars.axes[0]
        names = [label.get_text() for label in axes.get_yticklabels()]
        assert set(names) == {name for name, row in rows.items() if row.rung != "exact block"}
        for name, bar in zip(names, axes.patches, strict=True):
            assert math.isclose(bar.get_width(), max(rows[name].error, 1e-4)), name
        shown = [ax for ax in maps.axes if ax.get_title()]
        told = [row.rung for row in layer.rows if row.rung == "exact block" or row.error > 1e-6]
        assert [ax.get_title() for ax in shown] == plots.telling(layer, told, 4) and len(shown) == min(4, len(told))
        assert shown[0].get_title() == "exact block" and plots.FLOOR in shown[-1].get_title()
        for ax in shown:
            expected = layer.images[ax.get_title()]
            assert expected.any() and torch.equal(torch.as_tensor(ax.images[0].get_array().data), expected)
        lines = {line.get_label(): line for line in spectra.axes[0].lines}
        drawn_rungs = plots.telling(layer, told, 6)
        assert {name for name in lines if not name.startswith("_")} == set(drawn_rungs)
        for row in (row for row in layer.rows if row.rung in drawn_rungs):
            values = layer.spectra[row.rung]
            assert list(lines[row.rung].get_ydata()) == values[values > 0].flip(0).tolist()


def test_what_is_shown_where_not_all_can_be() -> None:
    """The exact block, the paper's, what is held, the floor; in the ladder's order, without what equals the block."""
    model, x, y, optimizer = trained()
    layer = ladder(model, x, y, ["last"], optimizer)["last"]
    names = plots.telling(layer, [row.rung for row in layer.rows], 4)
    assert names == ["exact block", "A ⊗ G", "KBFGS: H_A⁻¹ ⊗ H_G⁻¹", plots.FLOOR]


@pytest.mark.parametrize(("groups", "p"), [(1, 3), (1, 300), (3, 100), (600, 2), (7, 51)])
def test_pictures_average_the_whole_matrix(groups: int, p: int) -> None:
    blocks = torch.randn(groups, p, p, dtype=F64)
    whole = torch.block_diag(*blocks).float()
    torch.testing.assert_close(picture(blocks), adaptive_avg_pool2d(whole[None], min(256, len(whole)))[0])


def test_pictures_of_many_groups_form_no_whole_matrix() -> None:
    """20,000 groups of 4 × 4: the whole of them would take 24 GiB."""
    image = picture(torch.ones(20_000, 4, 4))
    assert image.shape == (256, 256) and float(image.diagonal().min()) > 0


def test_the_budget_counts_what_is_kept_by_location() -> None:
    """G_{t,t} of a small layer at many locations is larger than its block."""
    model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))
    x, y = torch.rand(N, 1, 30, 30), torch.arange(N) % CLASSES
    by_location, block = 2 * N * 30 * 30 * 8 * 8 * 8, 16 * 16**2 * 8
    with pytest.raises(MemoryError, match=r"460800 numbers for the Hessian by its outputs\) takes 3.5\d MiB"):
        curvature_ladder(model, cross_entropy, x, y, ["0"], memory_budget=by_location, progress=False)
    small = x[..., :2, :2]
    report = curvature_ladder(model, cross_entropy, small, y, ["0"], memory_budget=4 * block, progress=False)
    assert isinstance(report[0], LayerReport)
