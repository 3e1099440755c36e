"""A parameter's step, as it is taken: found here, or by the process that keeps the state of its layer."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kfqn_ext._torch import rows_of
from kfqn_ext.optim.gate import Gate, Rate
from kfqn_ext.optim.groups.plan import Layer, working_dtype
from kfqn_ext.optim.numbers import as_real
from kfqn_ext.optim.preconditioner.owners import Owners, to_be_filled


@dataclass(frozen=True)
class Move:
    """A parameter's step θ ← δ θ - r p.

    Attributes:
        parameter: θ.
        direction: p, shaped like θ, or like its rows where a process has rows alone; of a complex one, like its real
            and imaginary parts.
        momentum: M, shaped like p; None where another process keeps it.
        rate: r.
        lr: α, or what r is where the length of a layer's step is set.
        shrink: δ = 1 - αγ.
    """

    parameter: Tensor
    direction: Tensor
    momentum: Tensor | None
    rate: Rate
    lr: Rate
    shrink: Rate

    def squared_length(self) -> Tensor:
        """α r ⟨p, M⟩: with r p = α H M, the step's squared length α² ⟨M, H M⟩ in the norm of H⁻¹."""
        assert self.momentum is not None
        return (self.direction.flatten() * self.momentum.reshape(-1)).sum() * self.rate * self.lr


def squared_length(moves: Sequence[Move], shared: Mapping[Tensor, Layer], owners: Owners) -> Tensor:
    """Σ α r ⟨p, M⟩ over all parameters, []: those that are shared are summed over their owners, or over rows."""
    return _sum(moves) if not owners.several else _sum_over_owners(moves, shared, owners)


def _sum_over_owners(moves: Sequence[Move], shared: Mapping[Tensor, Layer], owners: Owners) -> Tensor:
    is_part = [owners.rows is not None or move.parameter in shared for move in moves]
    own, rest = ([m for m, part in zip(moves, is_part, strict=True) if part is sought] for sought in (True, False))
    device = next(iter([*shared, *(move.parameter for move in moves)])).device
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return owners.mail.total(_sum(own).to(zero) if own else zero) + (_sum(rest).to(zero) if rest else zero)


def _sum(moves: Sequence[Move]) -> Tensor:
    squares = [move.squared_length() for move in moves]
    return torch.stack([square.to(squares[0].device) for square in squares]).sum()


def shortening(square: Tensor, limit: Tensor) -> Tensor:
    """ν ≤ 1 with ν² Σ α r ⟨p, M⟩ ≤ a limit, []."""
    return (limit.to(square) / square.clamp(min=torch.finfo(square.dtype).tiny)).sqrt().clamp(max=1.0)


def from_owners(
    moves: Sequence[Move], shared: Mapping[Tensor, Layer], owners: Owners, shrinks: Mapping[Tensor, Rate], gate: Gate
) -> list[Move]:
    """The moves of all parameters: of those that are shared, as their owners have found them.

    Each r p is sent once. All apply what was sent, the owner too, so that copies stay equal to the last bit.

    Args:
        moves: What was found here.
        shared: Parameters of layers with curvature, in an order that all processes have.
        owners: Who has found the others.
        shrinks: δ of each parameter.
        gate: Says whether the minibatch is finite.
    """
    if not owners.several:
        return list(moves)
    own = {move.parameter: move for move in moves}
    steps = [(layer, _step(p, own.get(p), gate)) for p, layer in shared.items()]
    sent = zip(shared, owners.spread_steps(steps), strict=True)
    rest = [move for move in moves if move.parameter not in shared]
    return rest + [Move(p, step, None, 1.0, 1.0, shrinks[p]) for p, step in sent]


def _step(p: Tensor, move: Move | None, gate: Gate) -> Tensor:
    if move is None:
        return to_be_filled(p.shape, working_dtype(p), p.device)
    return move.direction * gate.choose(move.rate, 0.0, move.direction)


def apply(moves: Iterable[Move], gate: Gate) -> None:
    """Take moves, unless the batch is not finite; where δ and r are numbers, those that share them at once."""
    together: defaultdict[tuple[float, float], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for move in moves:
        p = as_real(rows_of(move.parameter))
        # A direction comes from M, which is finite whatever the batch was: a rate of zero leaves p alone.
        shrink, rate = gate.choose(move.shrink, 1.0, p), gate.choose(move.rate, 0.0, move.direction)
        if not isinstance(rate, Tensor):
            together[float(shrink), rate].append((p, move.direction))
            continue
        if isinstance(move.shrink, Tensor) or move.shrink != 1.0:
            p.mul_(shrink)
        p.addcmul_(move.direction, rate, value=-1.0)
    for (shrink, rate), pairs in together.items():
        parameters, directions = zip(*pairs, strict=True)
        if shrink != 1.0:
            torch._foreach_mul_(parameters, shrink)
        torch._foreach_add_(parameters, directions, alpha=-rate)
