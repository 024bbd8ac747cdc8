"""What a request samples from: its parameters, the one transform from logits to the law p, and its randomness.

Target and draft, plain decoding and every rule use `law` and nothing else, so that a filter can never stand on
one side only.
"""

import dataclasses
import enum
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, UInt32

from spec_jax.pytree import pytree

# Slack on the mass that top-p must reach: a boundary that is exact in real numbers (.5 + .3 against .8) must not
# be missed by the last bit of a float32 sum.
TOP_P_SLACK = 1e-6
_SUM_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """What one request asks for.

    Attributes:
      temperature: 0 is greedy decoding; otherwise logits are divided by it.
      top_k: keep the k most likely tokens; 0 keeps all. Tokens that tie with the k-th are kept too.
      top_p: keep the smallest set of most likely tokens whose mass is at least top_p, in (0, 1].
      min_p: keep tokens at least min_p times as likely as the most likely one, in [0, 1].
      seed: 0 <= seed < 2**64. The same seed gives the same tokens, whatever the batch. None draws a fresh seed,
        which the result reports.
      max_new_tokens: budget of generated tokens; 0 runs no model.
      stop_token_ids: tokens that end the text; the one that did is kept as the last token.
      stop: strings that end the text; the text is cut before them.
      ignore_eos: do not stop at the model's own end-of-text tokens.

    Filters apply in the order temperature, top-k, top-p, min-p, each to the law the one before it left.
    """

    temperature: float | int = 1.0
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    seed: int | None = None
    max_new_tokens: int = 128
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] | str = ()
    ignore_eos: bool = False

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(map(operator.index, self.stop_token_ids)))
        for name in ("top_k", "max_new_tokens", "seed"):
            value = getattr(self, name)
            if value is not None and not hasattr(value, "__index__"):
                raise ValueError(f"{name} must be a whole number, got {value!r}")
        # Written so that NaN fails as well. The limits are those of float32.
        if self.temperature != 0.0 and not 1e-37 < self.temperature < 1e38:
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (keep all) or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}; 1 keeps all")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}; 0 keeps all")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be in [0, 2**64) or None, got {self.seed}")
        if self.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be >= 0, got {self.max_new_tokens}")
        if any(not text for text in self.stop):
            raise ValueError("a stop string must not be empty: it would stop before the first token")
        for text in self.stop:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"stop string {text!r} is not valid Unicode: {error.reason}") from None


class Purpose(enum.IntEnum):
    """What a random number is for. No number is ever used for two of these."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    MATCH = 3


@pytree
class SamplingRows:
    """The sampling parameters of a batch, as arrays."""

    temperature_B: Float[Array, "B"]
    top_k_B: Int[Array, "B"]
    top_p_B: Float[Array, "B"]
    min_p_B: Float[Array, "B"]
    seed_Bx2: UInt32[Array, "B 2"]

    @classmethod
    def create(cls, params: Sequence[SamplingParams], seeds: Sequence[int]) -> "SamplingRows":
        seeds_B = np.asarray(seeds, np.uint64)

        def column(values, dtype):  # through NumPy: JAX converts a list element by element
            return jnp.asarray(np.asarray(values, dtype))

        return cls(
            temperature_B=column([p.temperature for p in params], np.float32),
            top_k_B=column([min(p.top_k, np.iinfo(np.int32).max) for p in params], np.int32),
            top_p_B=column([p.top_p for p in params], np.float32),
            min_p_B=column([p.min_p for p in params], np.float32),
            seed_Bx2=column(np.stack([seeds_B >> 32, seeds_B & 0xFFFFFFFF], axis=1), np.uint32),
        )

    @property
    def greedy_B(self) -> Bool[Array, "B"]:
        return self.temperature_B == 0.0


def law(logits_BxNxV: Float[Array, "B N V"], rows: SamplingRows) -> Float[Array, "B N V"]:
    """The law p a request decodes from, float32: temperature, top-k, top-p, min-p; greedy is a one-hot mask."""
    logits_BxNxV = logits_BxNxV.astype(jnp.float32)
    top_BxNx1 = logits_BxNxV.max(-1, keepdims=True)
    greedy_Bx1x1 = rows.greedy_B[:, None, None]
    temperature_Bx1x1 = jnp.where(rows.greedy_B, 1.0, rows.temperature_B)[:, None, None]
    # exp(x - max): the most likely token has weight exactly 1.
    weights_BxNxV = jnp.exp((logits_BxNxV - top_BxNx1) / temperature_Bx1x1)
    filters = rows.top_k_B > 0, rows.top_p_B < 1.0, rows.min_p_B > 0.0
    weights_BxNxV = jax.lax.cond(
        jnp.any((filters[0] | filters[1] | filters[2]) & ~rows.greedy_B),
        _filtered,
        lambda weights_BxNxV, rows: weights_BxNxV,
        weights_BxNxV,
        rows,
    )
    p_BxNxV = weights_BxNxV / weights_BxNxV.sum(-1, keepdims=True)
    argmax_BxNx1 = jnp.argmax(logits_BxNxV, axis=-1, keepdims=True)
    one_hot_BxNxV = (jnp.arange(logits_BxNxV.shape[-1])[None, None, :] == argmax_BxNx1).astype(jnp.float32)
    return jnp.where(greedy_Bx1x1, one_hot_BxNxV, p_BxNxV)


def sample(logits_BxNxV: Float[Array, "B N V"], rows: SamplingRows, u_BxN: Float[Array, "B N"]) -> Int[Array, "B N"]:
    """One token per node from `law`, by the inverse CDF of a uniform; the argmax for greedy rows.

    The law itself is computed only where some row samples.
    """
    greedy_BxN = jnp.argmax(logits_BxNxV, axis=-1).astype(jnp.int32)
    return jax.lax.cond(
        jnp.all(rows.greedy_B),
        lambda: greedy_BxN,
        lambda: jnp.where(rows.greedy_B[:, None], greedy_BxN, inverse_cdf(law(logits_BxNxV, rows), u_BxN)),
    )


def inverse_cdf(weights_BxNxV: Float[Array, "B N V"], u_BxN: Float[Array, "B N"]) -> Int[Array, "B N"]:
    """The token at which the running sum of non-negative weights first exceeds u times their total.

    Exact for a uniform in [0, 1), 0 included: a token of weight 0 is never returned. Sums run over blocks of the
    vocabulary, then inside the chosen block, because a running sum over a whole vocabulary is slow everywhere.
    """
    B, N, V = weights_BxNxV.shape
    block = min(_SUM_BLOCK, V)
    num_blocks = -(-V // block)
    weights_BxNxV = jnp.pad(weights_BxNxV, ((0, 0), (0, 0), (0, num_blocks * block - V)))
    blocks_BxNxCxT = weights_BxNxV.reshape(B, N, num_blocks, block)
    upto_BxNxC = jnp.cumsum(blocks_BxNxCxT.sum(-1), axis=-1)
    wanted_BxNx1 = u_BxN[..., None] * upto_BxNxC[..., -1:]
    chosen_BxNx1 = _first_above(upto_BxNxC, wanted_BxNx1)
    inside_BxNxT = jnp.take_along_axis(blocks_BxNxCxT, chosen_BxNx1[..., None], axis=2)[..., 0, :]
    before_BxNx1 = jnp.take_along_axis(upto_BxNxC, jnp.maximum(chosen_BxNx1 - 1, 0), axis=-1)
    before_BxNx1 = jnp.where(chosen_BxNx1 > 0, before_BxNx1, 0.0)
    # Not below 0, where the first token would be taken whatever its weight: a compiler may contract u * total - before.
    rest_BxNx1 = jnp.maximum(wanted_BxNx1 - before_BxNx1, 0.0)
    offset_BxNx1 = _first_above(jnp.cumsum(inside_BxNxT, axis=-1), rest_BxNx1)
    return (chosen_BxNx1 * block + offset_BxNx1)[..., 0].astype(jnp.int32)


def _first_above(upto_BxNxC, wanted_BxNx1):
    """First index whose running sum exceeds `wanted`; if rounding leaves none, the last that adds anything."""
    last_BxNx1 = jnp.argmax(upto_BxNxC, axis=-1, keepdims=True)  # the first index that reaches the total
    return jnp.minimum((upto_BxNxC <= wanted_BxNx1).sum(-1, keepdims=True), last_BxNx1)


def uniforms(
    seed_Bx2: UInt32[Array, "B 2"],
    purpose: Purpose,
    position_BxN: Int[Array, "B N"],
    lane_BxN: Int[Array, "B N"] | None = None,
) -> Float[Array, "B N"]:
    """Uniforms in [0, 1), a pure function of (request seed, purpose, absolute position, lane).

    Neither the batch slot nor the number of steps enters, so a request's tokens do not depend on its mates.
    `MATCH` noise is keyed by the position of the token it chooses: plain decoding meets the same number there.
    The noise of a drafted cycle (`DRAFT`, `ACCEPT`, `RESIDUAL`) is keyed by the position of the cycle's *root* and
    the node as lane. The root moves every cycle, so a cycle never meets noise again that an earlier one has
    already looked at; block verification, which looks beyond the token it commits, would be biased by that.
    """
    lane_BxN = jnp.zeros_like(position_BxN) if lane_BxN is None else lane_BxN
    # One hash: the seed is the key, (position, purpose and lane) the counter. A tree has at most 128 lanes.
    counter_BxN = lane_BxN.astype(jnp.uint32) * len(Purpose) + jnp.uint32(purpose)
    bits_BxN, _ = threefry2x32_p.bind(
        *(jnp.broadcast_to(word_Bx1, counter_BxN.shape) for word_Bx1 in (seed_Bx2[:, :1], seed_Bx2[:, 1:])),
        position_BxN.astype(jnp.uint32),
        counter_BxN,
    )
    return (bits_BxN >> 9).astype(jnp.float32) * 2.0**-23


def root_lanes(
    root_position_B: Int[Array, "B"], lane_1xN: Int[Array, "1 N"]
) -> tuple[Int[Array, "B N"], Int[Array, "B N"]]:
    """Positions and lanes of a drafted cycle's noise, for `uniforms`."""
    shape = (root_position_B.shape[0], lane_1xN.shape[1])
    return jnp.broadcast_to(root_position_B[:, None], shape), jnp.broadcast_to(lane_1xN, shape)


def _filtered(weights_BxNxV, rows: SamplingRows):
    """Zeroes what top-k, top-p and min-p remove; weights are exp((logit - max) / temperature), in [0, 1]."""
    V = weights_BxNxV.shape[-1]
    count_B = jnp.where(rows.top_k_B > 0, jnp.minimum(rows.top_k_B, V), V).astype(jnp.float32)
    kept_BxNxV = weights_BxNxV >= jax.lax.cond(
        jnp.any(rows.top_k_B > 0),
        lambda: _threshold(weights_BxNxV, jnp.float32(1.0), count_B[:, None, None]),
        lambda: jnp.zeros_like(weights_BxNxV[..., :1]),
    )
    weights_BxNxV = jnp.where(kept_BxNxV, weights_BxNxV, 0.0)
    mass_BxNx1 = weights_BxNxV.sum(-1, keepdims=True) * (rows.top_p_B - TOP_P_SLACK)[:, None, None]
    kept_BxNxV = weights_BxNxV >= jax.lax.cond(
        jnp.any(rows.top_p_B < 1.0),
        lambda: jnp.where(
            (rows.top_p_B < 1.0)[:, None, None], _threshold(weights_BxNxV, weights_BxNxV, mass_BxNx1), 0.0
        ),
        lambda: jnp.zeros_like(weights_BxNxV[..., :1]),
    )
    kept_BxNxV &= weights_BxNxV >= rows.min_p_B[:, None, None]
    return jnp.where(kept_BxNxV, weights_BxNxV, 0.0)


def _threshold(weights_BxNxV, amount_BxNxV, wanted_BxNx1):
    """The largest threshold t with `sum(amount where weights >= t) >= wanted`, exactly, by bisection.

    Non-negative floats are ordered as their bits, so halving an interval of integers ends at the exact value.
    """
    bits_BxNxV = jax.lax.bitcast_convert_type(weights_BxNxV, jnp.int32)
    low_BxNx1 = jnp.zeros_like(bits_BxNxV[..., :1])
    high_BxNx1 = bits_BxNxV.max(-1, keepdims=True) + 1

    def halve(_, bounds):
        low_BxNx1, high_BxNx1 = bounds
        middle_BxNx1 = low_BxNx1 + (high_BxNx1 - low_BxNx1) // 2
        reached_BxNx1 = jnp.where(bits_BxNxV >= middle_BxNx1, amount_BxNxV, 0.0).sum(-1, keepdims=True)
        enough_BxNx1 = reached_BxNx1 >= wanted_BxNx1
        return jnp.where(enough_BxNx1, middle_BxNx1, low_BxNx1), jnp.where(enough_BxNx1, high_BxNx1, middle_BxNx1)

    low_BxNx1, _ = jax.lax.fori_loop(0, 31, halve, (low_BxNx1, high_BxNx1))
    return jax.lax.bitcast_convert_type(low_BxNx1, jnp.float32)
