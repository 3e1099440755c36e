"""What is compared with the peers: rows as they are built without a word, and the paper's form, which is tuned too."""

from benchmarks.untuned.entry import Entry, closure, loop, of_model, pairs
from kfqn_ext.optim import KBFGS, KBFGSL, KFAC, OnePassKBFGS, OnePassKFAC

_KBFGS = (0.03, 0.3), (0.03, 0.1), (0.03, 0.03), (0.1, 0.1), (0.1, 0.03)

OURS = {
    "onepass": Entry("K-BFGS, one pass", of_model(OnePassKBFGS), step=loop),
    "onepass-kfac": Entry("KFAC, one pass", of_model(OnePassKFAC), step=loop),
    "kbfgs": Entry("K-BFGS", of_model(KBFGS), step=closure),
    "kbfgsl": Entry("K-BFGS(L)", of_model(KBFGSL), step=closure),
    "kfac-untuned": Entry("KFAC", of_model(KFAC), step=closure, samples=True),
    "kbfgs-printed": Entry("K-BFGS as printed", of_model(KBFGS.as_printed), step=closure),
    "kbfgs-tuned": Entry("K-BFGS as printed, α and λ tuned", of_model(KBFGS.as_printed), pairs(*_KBFGS), closure),
}
