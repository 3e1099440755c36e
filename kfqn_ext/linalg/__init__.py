"""Dense mathematics of quasi-Newton matrices: torch in, torch out, batched over leading dimensions."""

from kfqn_ext.linalg.bfgs import bfgs_update, bfgs_update_, bfgs_update_each_, bfgs_updates_each_
from kfqn_ext.linalg.compact import compact_matrix, compact_middle, compact_product, dense_from_pairs
from kfqn_ext.linalg.damping import double_damping_2020, powell_identity_lm, powell_lm
from kfqn_ext.linalg.definite import make_definite_
from kfqn_ext.linalg.kronecker import damped_inverse, kronecker_matmul
from kfqn_ext.linalg.precision import full_precision
from kfqn_ext.linalg.subnormal import flush_

__all__ = [
    "bfgs_update",
    "bfgs_update_",
    "bfgs_update_each_",
    "bfgs_updates_each_",
    "compact_matrix",
    "compact_middle",
    "compact_product",
    "damped_inverse",
    "dense_from_pairs",
    "double_damping_2020",
    "flush_",
    "full_precision",
    "kronecker_matmul",
    "make_definite_",
    "powell_identity_lm",
    "powell_lm",
]
