"""Parameter groups: which parameter gets which treatment, with which hyperparameters."""
