"""Whether two greedy outputs are the same, and if not, how near the tie was at which they parted."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import Decoder, SamplingParams, cycle, decode
from spec_jax.cycle import DecodeState, Params, Plan
from spec_jax.propose.plain import root_only

# Programs of another shape round differently. A top-2 gap of less than this share of the greatest logit is a tie that
# rounding may decide; bfloat16 keeps 8 bits of the hidden state. In float32 it is the gap itself that counts.
_TIE = {"float32": 1e-4, "bfloat16": 2.0**-7}


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where an output leaves the plain one.

    Attributes:
      index: of the first new token that differs.
      gap: between the two greatest logits there, by the plain decoder; None where the output was sampled.
      near_tie: the gap is within rounding, so that either token is the argmax.
    """

    index: int
    gap: float | None
    near_tie: bool

    def __str__(self) -> str:
        gap = "" if self.gap is None else f", top-2 gap {self.gap:.2g}" + (" (a tie)" if self.near_tie else "")
        return f"differs from token {self.index} on{gap}"


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two outputs differ, one ending early included; None if they are equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def compare(
    prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], dtype: str, plain: Decoder | None
) -> Difference | None:
    """The difference of an output from the plain one, or None.

    Args:
      prompt: token ids.
      dtype: of the target, which says what is within rounding.
      plain: the decoder that gave `expected` greedily; None if it was sampled, where no gap explains a difference.
    """
    index = first_difference(expected, got)
    if index is None:
        return None
    if plain is None:
        return Difference(index, None, False)
    logits_V = _next_logits(plain, [*prompt, *expected[:index]])
    second, first = np.sort(logits_V)[-2:]
    gap = float(first - second)
    scale = 1.0 if dtype == "float32" else float(np.abs(logits_V).max())
    # Both outputs must hold one of the two tokens that tie: an early end or a third token is no rounding.
    tied = set(np.argsort(logits_V)[-2:].tolist())
    held = {output[index] for output in (expected, got) if index < len(output)}
    return Difference(index, gap, gap < _TIE[dtype] * scale and held == tied)


def _next_logits(plain: Decoder, tokens: list[int]) -> np.ndarray:
    request = plain.request([tokens], SamplingParams(temperature=0.0, max_new_tokens=1))
    state = decode.prefill(plain.plan, plain.params, plain.start(request))
    return np.asarray(_root_logits(plain.plan, plain.params, state))


@functools.partial(jax.jit, static_argnames="plan")
def _root_logits(plan: Plan, params: Params, state: DecodeState) -> jax.Array:
    logits_BxNxV, _, _ = cycle.score(plan, params, state, root_only(state.context))
    return jnp.asarray(logits_BxNxV[0, 0], jnp.float32)
