"""The paper's own numbers: best hyperparameters, search ranges, results. Keys are LaTeX labels and our names."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Best:
    """Best hyperparameters of one method on one problem."""

    lr: float
    damping: float | None = None
    weight_decay: float = 0.0


_AUTOENCODER_METHODS = ("kbfgs", "kbfgs-dagger", "kbfgsl", "kbfgs20", "kbfgsl20", "kfac", "adam", "sgdm")


def _autoencoder_row(*pairs: tuple[float, float | None]) -> dict[str, Best]:
    return {method: Best(lr, damping) for method, (lr, damping) in zip(_AUTOENCODER_METHODS, pairs, strict=True)}


# table_2: (learning rate, damping), in the order of _AUTOENCODER_METHODS.
TABLE_2: dict[str, dict[str, Best]] = {
    "mnist": _autoencoder_row(
        (0.03, 0.3), (0.3, 30), (0.03, 0.3), (0.01, 0.1), (0.003, 0.1), (0.3, 10), (1e-4, 1e-4), (0.003, None)
    ),
    "faces": _autoencoder_row(
        (0.03, 1), (0.03, 3), (0.03, 1), (0.01, 0.3), (0.01, 0.3), (0.03, 0.1), (1e-4, 1e-4), (0.001, None)
    ),
    "curves": _autoencoder_row(
        (0.03, 0.3), (0.3, 30), (0.1, 3), (0.01, 0.03), (0.003, 0.03), (0.3, 10), (1e-3, 1e-3), (0.003, None)
    ),
}
# table_8 gives no values for its two half-way methods: they take those of K-BFGS, of which one cell is changed.
for _row in TABLE_2.values():
    _row["kfac-printed"] = _row["kfac"]
    _row["kbfgs-no-dpdlm"] = _row["kbfgs-moving-a"] = _row["kbfgs"]


_CNN_METHODS = ("kbfgs", "kbfgsl", "kfac", "adam", "sgdm")


def _cnn_row(*triples: tuple[float, float, float | None]) -> dict[str, Best]:
    return {
        method: Best(lr, damping, weight_decay)
        for method, (lr, weight_decay, damping) in zip(_CNN_METHODS, triples, strict=True)
    }


# table_6: (initial learning rate, weight decay, damping), in the order of _CNN_METHODS.
TABLE_6: dict[str, dict[str, Best]] = {
    "vgg16-cifar10": _cnn_row((30, 1e-5, 1e4), (1, 1e-3, 100), (0.01, 0.1, 10), (0.003, 0.1, 0.1), (0.003, 0.1, None)),
    "resnet32-cifar10": _cnn_row(
        (100, 1e-5, 1e3), (1e3, 1e-6, 1e4), (0.01, 0.1, 0.01), (0.003, 0.1, 0.01), (0.03, 0.01, None)
    ),
    "vgg16-cifar100": _cnn_row((0.1, 0.01, 10), (0.3, 0.001, 100), (0.01, 0.1, 1), (3e-4, 1, 0.01), (0.003, 0.1, None)),
    "resnet32-cifar100": _cnn_row(
        (1e3, 1e-6, 1e4), (10, 1e-4, 100), (0.01, 0.1, 0.001), (0.01, 0.1, 0.01), (0.03, 0.01, None)
    ),
}

for _row in TABLE_6.values():
    _row["kfac-printed"] = _row["kfac"]

BEST: dict[str, dict[str, Best]] = TABLE_2 | TABLE_6


# Results: mean training loss (table_1, table_8) and validation accuracy in percent (table_7) of 5 seeds.
TABLE_1 = {
    "mnist": dict(zip(_AUTOENCODER_METHODS, (51.60, 52.01, 51.53, 52.38, 54.27, 51.33, 52.76, 54.75), strict=True)),
    "faces": dict(zip(_AUTOENCODER_METHODS, (5.00, 4.62, 4.83, 5.46, 4.92, 4.75, 5.33, 6.47), strict=True)),
    "curves": dict(zip(_AUTOENCODER_METHODS, (55.46, 55.06, 55.31, 56.00, 55.94, 54.84, 55.24, 55.97), strict=True)),
}
_ABLATION_METHODS = ("kbfgs", "kbfgs-no-dpdlm", "kbfgs-moving-a", "kbfgs20")
TABLE_8 = {
    "mnist": dict(zip(_ABLATION_METHODS, (51.60, 51.92, 51.45, 52.38), strict=True)),
    "faces": dict(zip(_ABLATION_METHODS, (5.00, 5.39, 5.26, 5.46), strict=True)),
    "curves": dict(zip(_ABLATION_METHODS, (55.46, 55.86, 55.88, 56.00), strict=True)),
}
_TABLE_7_METHODS = ("kbfgs", "kfac", "adam", "sgdm")
TABLE_7 = {
    "vgg16-cifar10": dict(zip(_TABLE_7_METHODS, (94.28, 94.44, 94.28, 94.14), strict=True)),
    "resnet32-cifar10": dict(zip(_TABLE_7_METHODS, (93.45, 93.44, 93.35, 93.13), strict=True)),
    "vgg16-cifar100": dict(zip(_TABLE_7_METHODS, (75.65, 76.32, 75.64, 75.41), strict=True)),
    "resnet32-cifar100": dict(zip(_TABLE_7_METHODS, (71.46, 71.92, 70.35, 70.18), strict=True)),
}

# Search ranges, "Details on the Autoencoder Experiments" (sec_15) and "Details on the CNN Experiments" (sec_5).
_KRONECKER = {
    "lr": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1),
    "damping": (0.03, 0.1, 0.3, 1, 3, 10, 30),
}
AUTOENCODER_GRID: dict[str, dict[str, Any]] = {
    **{
        method: _KRONECKER for method in (*_AUTOENCODER_METHODS[:6], "kbfgs-no-dpdlm", "kbfgs-moving-a", "kfac-printed")
    },
    "adam": {"lr": _KRONECKER["lr"], "damping": (1e-8, 1e-4, 1e-3, 0.01, 0.1)},
    "sgdm": {"lr": _KRONECKER["lr"]},
}
_CNN_KBFGS = {
    "lr": (0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1e3, 3e3),
    "weight_decay": (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1),
    "damping": (1, 10, 100, 1e3, 1e4, 1e5),
}
CNN_GRID: dict[str, dict[str, Any]] = {
    "kbfgs": _CNN_KBFGS,
    "kbfgsl": _CNN_KBFGS,
    "kfac": {
        "lr": (1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3),
        "weight_decay": (0.001, 0.01, 0.1, 1),
        "damping": (1e-4, 0.001, 0.01, 0.1, 1, 10, 100),
    },
    "adam": {
        "lr": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1),
        "weight_decay": (0.01, 0.1, 1, 10),
        "damping": (1e-8, 1e-4, 0.01, 0.1, 1),
    },
    "sgdm": {
        "lr": (3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3),
        "weight_decay": (1e-3, 0.01, 0.1, 1),
    },
}
CNN_GRID["kfac-printed"] = CNN_GRID["kfac"]
