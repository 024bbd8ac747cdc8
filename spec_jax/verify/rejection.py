"""Token-by-token speculative sampling."""

import dataclasses
from typing import ClassVar

from spec_jax.contract import Law, Shapes
from spec_jax.verify.recursive import Recursive


@dataclasses.dataclass(frozen=True)
class Rejection(Recursive):
    """Recursive rejection of a chain: accept token x with probability min(1, p(x)/q(x)); at the first rejection draw
    from (p - q)+.

    Exact when the tokens were drawn from the recorded q; for a point mass q is all weight on the drafted token, so
    x is accepted with probability p(x). Expected accepted tokens: the sum over depths of the product of
    1 - TV(p, q). (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318.)
    """

    name: ClassVar[str] = "rejection"
    laws: ClassVar[frozenset[Law]] = frozenset({Law.IID, Law.POINT_MASS})
    shapes: ClassVar[Shapes] = Shapes.CHAIN
