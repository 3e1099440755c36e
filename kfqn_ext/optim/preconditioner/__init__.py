"""The curvature of all layers, in their states: made, learned, recomputed, applied, saved and described."""
