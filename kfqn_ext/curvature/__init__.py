"""How good is each approximation? A layer's exact curvature beside every Kronecker approximation of it."""

from kfqn_ext.curvature.estimates import Estimate
from kfqn_ext.curvature.exact import exact_block, exact_ggn_block, exact_output_hessians
from kfqn_ext.curvature.ladder import curvature_ladder
from kfqn_ext.curvature.large import estimate_curvature
from kfqn_ext.curvature.plots import plot_tracks
from kfqn_ext.curvature.report import CurvatureReport, LayerReport, Row
from kfqn_ext.curvature.track import CurvatureTracker, track_curvature

__all__ = [
    "CurvatureReport",
    "CurvatureTracker",
    "Estimate",
    "LayerReport",
    "Row",
    "curvature_ladder",
    "estimate_curvature",
    "exact_block",
    "exact_ggn_block",
    "exact_output_hessians",
    "plot_tracks",
    "track_curvature",
]
