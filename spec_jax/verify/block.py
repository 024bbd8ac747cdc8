"""Block verification: the drafted block is judged jointly."""

import dataclasses
from typing import ClassVar

from spec_jax.contract import Law, Shapes
from spec_jax.verify.traversal import Traversal


@dataclasses.dataclass(frozen=True)
class Block(Traversal):
    """Traversal verification of a chain; never fewer accepted tokens than token-by-token rejection.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)), node i's coin passes with probability
    h_i = S_i / (S_i + 1 - w_i), S_i = sum_x (w_i p(x|x_<=i) - q(x|x_<=i))+, and h = w at the last drafted token. The
    *deepest* node whose coin passes is kept, whatever coins failed above it, and the next token is drawn from
    (w_i p - q)+ there. (Sun et al., ICLR 2025, arXiv 2403.10444.)
    """

    name: ClassVar[str] = "block"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID, Law.POINT_MASS})
    shapes: ClassVar[Shapes] = Shapes.CHAIN
