"""How ranks count: like micro-batches whose losses are divided by the number of ranks R.

That is what the mean of ``DistributedDataParallel`` makes of the gradient, so |T| ∂h̄ stays the gradient of the bias
whatever data a rank had. A warm start's batches are no shares of one loss, and count by their data.
"""

from collections.abc import Callable, Mapping

from kfqn_ext.extensions.pooling import DATA, GRADIENTS, LOCATIONS, SQUARES, Counted, Mean

Weight = Callable[[Counted, int], float]
"""(a rank's counts, R) ↦ what its mean is multiplied with, before ranks are summed over."""
Share = Callable[[Counted], float]
"""The counts of all ranks together ↦ what the sum is multiplied with."""
Table = Mapping[Mean, tuple[Weight, Share]]


def _terms(counts: Counted) -> float:
    """Σ_n |T|: how many vectors a_t, or ∂h_t, there are."""
    return counts.num_data * counts.num_locations


_BY_TERMS: tuple[Weight, Share] = (lambda part, R: _terms(part), lambda whole: 1 / _terms(whole))
_BY_DATA: tuple[Weight, Share] = (lambda part, R: part.num_data, lambda whole: 1 / whole.num_data)
_INPUTS: Table = {LOCATIONS: _BY_TERMS, DATA: _BY_DATA}

OF_A_SUM: Table = {**_INPUTS, GRADIENTS: _BY_TERMS, SQUARES: _BY_TERMS}
OF_A_MEAN: Table = {
    **_INPUTS,
    GRADIENTS: (lambda part, R: part.num_locations / R, lambda whole: whole.num_data / _terms(whole)),
    SQUARES: (
        lambda part, R: part.num_locations / (part.num_data * R**2),
        lambda whole: whole.num_data**2 / _terms(whole),
    ),
}
OF_BATCHES: Table = dict.fromkeys(Mean, _BY_DATA)
