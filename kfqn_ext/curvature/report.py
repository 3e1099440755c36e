"""What a comparison found: rows of numbers by layer and rung, to print, to put into a data frame, to plot."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kfqn_ext.curvature.lazy import need
from kfqn_ext.geometry import LayerGeometry

FLOOR = "nearest Kronecker product"
HELD = "H_A⁻¹ ⊗ H_G⁻¹"
GRADIENT = "λ I (gradient descent)"
_PIXELS = 256


@dataclass
class Row:
    """One rung of one layer. Numbers that were not asked for are NaN. B is the exact block, M the rung, g the gradient.

    Attributes:
        rung: What M is.
        label: Where the paper has it.
        damping: λ: the one that M contains, otherwise the one given.
        error: ‖M - B‖_F / ‖B‖_F.
        spectral_error: ‖M - B‖₂ / ‖B‖₂.
        cosine: ⟨M, B⟩_F / (‖M‖_F ‖B‖_F); the best multiple of M has the error √(1 - cosine²).
        damped_error: ‖M - B‖_F / ‖B + λI‖_F; ‖M - (B + λI)‖_F / ‖B + λI‖_F where M contains λ.
        negative_mass: Share of negative eigenvalues of M, Σ_{λ<0} |λ| / Σ |λ|.
        lowest: Lowest eigenvalue of M.
        highest: Highest eigenvalue of M.
        angle: Angle between d = (M + λI)⁻¹ g, or H_G g H_A, and Newton's (B + λI)⁻¹ g, in degrees.
        decrease: Decrease of gᵀd + ½ dᵀBd along -d at its best step; ∞ where dᵀBd ≤ 0, 0 where d is no descent.
        share: The same with B + λI, as a share of Newton's: 1 is best. NaN where B + λI is not positive definite, for
            then Newton's direction leads to a saddle.
        H_A_error: Relative Frobenius error of a held H_A against the damped inverse it aims at, with this
            minibatch's A: (A + λ_A I)⁻¹.
        H_G_error: The same for H_G and (G + λ_G I)⁻¹; for KFAC, Γ in place of G.
        start_G_error: The same for I / λ_G, from which H_G starts: what H_G must beat to have learned something.
        H_aim_error: The same for H_A ⊗ H_G and the product of both.
        H_error: Relative error of the inverse against (A ⊗ G + λI)⁻¹, of a rung that contains λ.
        H_exact_error: The same against (B + λI)⁻¹.
        error_se: Standard error of ``error`` where that is an estimate.
        cosine_se: Standard error of ``cosine``.
    """

    rung: str
    label: str
    damping: float
    error: float = math.nan
    spectral_error: float = math.nan
    cosine: float = math.nan
    damped_error: float = math.nan
    negative_mass: float = math.nan
    lowest: float = math.nan
    highest: float = math.nan
    angle: float = math.nan
    decrease: float = math.nan
    share: float = math.nan
    H_A_error: float = math.nan
    H_G_error: float = math.nan
    start_G_error: float = math.nan
    H_aim_error: float = math.nan
    H_error: float = math.nan
    H_exact_error: float = math.nan
    error_se: float = math.nan
    cosine_se: float = math.nan


@dataclass
class LayerReport:
    """All rungs of one layer.

    Attributes:
        name: The layer.
        geometry: What it computes.
        num_data: N.
        num_locations: |T|.
        notes: What is out of the ordinary.
        rows: One a rung, in the order of the ladder.
        spectra: Eigenvalues by rung, ascending: all, or the extreme ones.
        images: Matrices by rung, averaged down to at most 256 × 256.
    """

    name: str
    geometry: LayerGeometry
    num_data: int
    num_locations: int
    notes: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    spectra: dict[str, Tensor] = field(default_factory=dict)
    images: dict[str, Tensor] = field(default_factory=dict)

    def add(self, row: Row, spectrum: Tensor | None = None, matrix: Tensor | None = None) -> None:
        """Add a rung: its numbers, its eigenvalues, its matrix [G, p, p]."""
        self.rows.append(row)
        if spectrum is not None:
            self.spectra[row.rung] = spectrum.cpu()
        if matrix is not None:
            self.images[row.rung] = picture(matrix).cpu()

    @property
    def title(self) -> str:
        """The layer in words."""
        g = self.geometry
        groups = f"{g.groups} groups of " if g.groups > 1 else ""
        W = f"{groups}W {g.d_out} × {g.d_in}"
        return f"{self.name or 'the model'}: {W}, {self.num_data} data, {self.num_locations} locations"


def picture(matrix: Tensor) -> Tensor:
    """A block-diagonal matrix [G, p, p] averaged down to at most 256 × 256; the whole of it is not formed."""
    groups, p, _ = matrix.shape
    size, places = min(_PIXELS, groups * p), torch.arange(groups * p, device=matrix.device)
    pixel = torch.arange(size, device=matrix.device).unsqueeze(-1)
    start, end = pixel * len(places) // size, -((pixel + 1) * -len(places) // size)  # overlap where they do not divide
    average = ((start <= places) & (places < end)).float() / (end - start)
    rows = torch.einsum("gpq,sgq->gps", matrix.float(), average.reshape(size, groups, p))
    image: Tensor = average @ rows.flatten(0, 1)
    return image


_COLUMNS: dict[str, tuple[str, str]] = {
    "error": ("error", "{:.3g}"),
    "error_se": ("± se", "{:.1g}"),
    "spectral_error": ("spectral", "{:.3g}"),
    "cosine": ("cosine", "{:.3f}"),
    "cosine_se": ("± se", "{:.1g}"),
    "negative_mass": ("neg. mass", "{:.2f}"),
    "lowest": ("lowest λ", "{:.2g}"),
    "highest": ("highest λ", "{:.2g}"),
    "damping": ("damping", "{:.2g}"),
    "damped_error": ("damped error", "{:.3g}"),
    "angle": ("angle °", "{:.1f}"),
    "decrease": ("decrease", "{:.2g}"),
    "share": ("share", "{:.2f}"),
    "H_A_error": ("H_A", "{:.3g}"),
    "H_G_error": ("H_G", "{:.3g}"),
    "start_G_error": ("I/λ_G", "{:.3g}"),
    "H_aim_error": ("H vs aim", "{:.3g}"),
    "H_error": ("H vs A⊗G", "{:.3g}"),
    "H_exact_error": ("H vs exact", "{:.3g}"),
}


class CurvatureReport(Sequence[LayerReport]):
    """A comparison of approximations with the exact curvature, layer by layer.

    ``print(report)`` shows a table for each layer, ``report["conv1", "A ⊗ G"]`` is one row.
    """

    def __init__(self, layers: list[LayerReport], notes: Sequence[str] = ()) -> None:
        """Hold the reports of some layers.

        Args:
            layers: Their reports.
            notes: On the layers that are left out.
        """
        self.layers, self.notes = layers, list(notes)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def __iter__(self) -> Iterator[LayerReport]:
        """Iterate over layers."""
        return iter(self.layers)

    def __getitem__(self, key: Any) -> Any:
        """Look up a layer by position or name, or a row by (layer, rung).

        Raises:
            KeyError: If there is none; the message names those there are.
        """
        if isinstance(key, (int, slice)):
            return self.layers[key]
        name, rung = key if isinstance(key, tuple) else (key, None)
        layer = next((layer for layer in self.layers if layer.name == name), None)
        if layer is None:
            raise KeyError(f"No layer {name!r}; there are {', '.join(repr(layer.name) for layer in self.layers)}.")
        if rung is None:
            return layer
        row = next((row for row in layer.rows if row.rung == rung), None)
        if row is None:
            raise KeyError(f"No rung {rung!r}; there are {', '.join(repr(row.rung) for row in layer.rows)}.")
        return row

    def __str__(self) -> str:
        """Lay the tables out for a terminal."""
        tables = ["\n".join([layer.title, *_aligned(_cells(layer)), *layer.notes]) for layer in self.layers]
        return "\n\n".join([*tables, *self.notes])

    def to_markdown(self, columns: Sequence[str] = ()) -> str:
        """Lay the tables out as Markdown.

        Args:
            columns: Attributes of :class:`Row` to show, in this order; all that hold a number if empty.

        Returns:
            A title and a table for each layer.

        Raises:
            ValueError: If a column is none of them.
        """
        unknown = [name for name in columns if name not in _COLUMNS]
        if unknown:
            raise ValueError(f"Row has no number {', '.join(unknown)}; choose among {', '.join(_COLUMNS)}.")
        parts = []
        for layer in self.layers:
            head, *body = [[cell.replace("|", "\\|") for cell in row] for row in _cells(layer, columns)]
            lines = [f"| {' | '.join(row)} |" for row in (head, ["---", "---", *["---:"] * (len(head) - 2)], *body)]
            parts.append("\n".join([f"**{layer.title}**", "", *lines, *(f"\n*{note}*" for note in layer.notes)]))
        return "\n\n".join([*parts, *(f"*{note}*" for note in self.notes)])

    def to_dataframe(self) -> Any:
        """All numbers as a ``pandas.DataFrame``, one row for each layer and rung; columns as in :class:`Row`.

        Raises:
            ModuleNotFoundError: If pandas is not installed.
        """
        pandas = need("pandas", "to_dataframe()")
        return pandas.DataFrame([{"layer": layer.name, **asdict(row)} for layer in self.layers for row in layer.rows])

    def plot(self, path: str | Path) -> None:
        """Draw errors by rung, the matrices on one colour scale, and the spectra: a row of pictures a layer.

        Args:
            path: File to write; its ending says the format.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
        """
        from kfqn_ext.curvature.plots import plot_report

        plot_report(self.layers, path)


def _cells(layer: LayerReport, columns: Sequence[str] = ()) -> list[list[str]]:
    """The table of a layer: a head and the rows, columns without any number left out."""
    used = [name for name in columns or _COLUMNS if any(not math.isnan(getattr(row, name)) for row in layer.rows)]
    head = ["rung", "paper", *(_COLUMNS[name][0] for name in used)]
    body = [
        [row.rung, row.label, *(_show(getattr(row, name), _COLUMNS[name][1]) for name in used)] for row in layer.rows
    ]
    return [head, *body]


def _show(value: float, form: str) -> str:
    return "" if math.isnan(value) else "∞" if math.isinf(value) else form.format(value)


def _aligned(cells: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
