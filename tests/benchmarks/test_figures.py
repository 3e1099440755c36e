"""Figures of the pages can be read at a width of 800 pixels: few lines, letters of 8 points, the legend outside."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from benchmarks import figures
from benchmarks.untuned import heatmaps, pages
from workloads.lines import DPI, MOST, WIDTH

ROOT = Path(__file__).resolve().parents[2]
UNKEPT = {f"{name}.png" for name, (log, _) in figures.FIGURES.items() if not (figures.RESULTS / log).exists()}
FILES = [path for path in (ROOT / "docs").rglob("*.png") if not {"_build", "auto_gallery"} & set(path.parts)]


@pytest.mark.parametrize("path", [path for path in FILES if path.name not in UNKEPT], ids=lambda path: path.stem)
def test_a_file_fills_the_width_of_a_page(path: Path) -> None:
    head = path.read_bytes()[:400]
    (width,) = struct.unpack(">I", head[16:20])
    (per_meter,) = struct.unpack(">I", head[head.index(b"pHYs") + 4 :][:4])
    assert (width, round(per_meter * 0.0254)) == (WIDTH * DPI, DPI)


def untuned(folder: Path) -> None:
    for name, part in pages.PARTS.items():
        if part.draw is not None:
            part.draw(part.lines(), folder / f"{name}.png")


def maps(folder: Path) -> None:
    results = json.loads((ROOT / "results/untuned-heatmaps.jsonl").read_text())
    for name in heatmaps.RATES:
        heatmaps.draw(results, name, folder / f"{name}.png")


def performance(folder: Path) -> None:
    figures.main(folder)
    sweep = {"sizes": [1, 2], "parts": {"gradient": {"seconds": [1.0, 2.0]}}}
    figures.scaling.draw({"sweeps": {name: sweep for name in figures.scaling.SWEEPS}}, folder / "scaling.png")


@pytest.mark.parametrize("draw", [untuned, maps, performance])
def test_few_lines_and_letters_of_eight_points(
    draw: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def keep(figure: Figure, *_: Any, **__: Any) -> None:
        figure.canvas.draw()
        drawn.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    draw(tmp_path)
    assert drawn
    for figure in drawn:
        texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
        assert min(text.get_fontsize() for text in texts) >= 8 and figure.get_figwidth() == WIDTH
        assert all(len(ax.get_lines()) <= MOST and ax.get_legend() is None for ax in figure.axes)
