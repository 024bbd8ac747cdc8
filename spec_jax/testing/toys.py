"""Targets with a known law, or that show a mistake as a wrong token."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.attention import attend
from spec_jax.kv import KVBuffer
from spec_jax.target import Target


class _Toy:
    """What all toys share: bare token ids, no position limit, a KV buffer of one scalar a position."""

    max_positions: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Any = None
    vocab_size: int
    params: Any

    def init_kv(self, batch: int, capacity: int) -> KVBuffer:
        return KVBuffer.create(1, batch, 1, capacity, 1)


class MarkovLM(_Toy):
    """Next-token logits depend on the last token only, so the law of a sequence is a product of table entries.

    Args:
      table_VxV: row t holds the next-token probabilities after token t.
    """

    def __init__(self, table_VxV):
        table_VxV = np.asarray(table_VxV, np.float64)
        self.vocab_size = len(table_VxV)
        with np.errstate(divide="ignore"):
            self.params = jnp.asarray(np.log(table_VxV), jnp.float32)

    def forward(self, params, tokens_BxN, positions_BxN, kv, words_BxNxW, taps=()):
        return params[tokens_BxN], (), kv


class ScriptLM(_Toy):
    """The argmax behind absolute position i is script[i + 1]: a wrong position shows as a wrong token."""

    def __init__(self, script: Sequence[int], vocab_size: int):
        self.vocab_size = vocab_size
        self.params = jnp.asarray(script, jnp.int32)

    def forward(self, params, tokens_BxN, positions_BxN, kv, words_BxNxW, taps=()):
        next_BxN = params[jnp.clip(positions_BxN + 1, 0, len(params) - 1)]
        return 10.0 * jax.nn.one_hot(next_BxN, self.vocab_size), (), kv


class HistLM(_Toy):
    """Logits are a hash of everything visible: the KV rows of the prefix and of a node's ancestors.

    Every position stores a small whole number made of its token and position; a node's logits are the row of a random
    table chosen by the sum over all visible rows. A missing, stale, doubled or misplaced row changes the sum, which is
    also what every tap shows.
    """

    _CELLS = 997

    def __init__(self, vocab_size: int = 11, seed: int = 0, sharpness: float = 3.0):
        self.vocab_size = vocab_size
        rng = np.random.default_rng(seed)
        self.params = jnp.asarray(sharpness * rng.standard_normal((self._CELLS, vocab_size)), jnp.float32)

    def forward(self, params, tokens_BxN, positions_BxN, kv, words_BxNxW, taps=()):
        code_BxN = (tokens_BxN * 131 + positions_BxN * 37 + tokens_BxN * positions_BxN * 17) % self._CELLS
        code_BxNx1x1 = code_BxN.astype(jnp.float32)[:, :, None, None]
        kv = kv.write(0, code_BxNx1x1, code_BxNx1x1)
        rows_Bx1xS = kv.values[0][:, 0, :, 0][:, None, :]
        seen_BxNxS = kv.visible(tokens_BxN.shape[1], words_BxNxW)
        total_BxN = jnp.where(seen_BxNxS, rows_Bx1xS, 0.0).sum(-1)
        return self._row(params, total_BxN), (total_BxN[..., None],) * len(taps), kv

    def _row(self, table_CxV, total_BxN):
        """The table's row for every sum; NaN where the sum is none."""
        is_number_BxN = jnp.isfinite(total_BxN)
        cell_BxN = jnp.where(is_number_BxN, total_BxN, 0.0).astype(jnp.int32) % self._CELLS
        return jnp.where(is_number_BxN[..., None], table_CxV[cell_BxN], jnp.nan)


class HistEagle(HistLM):
    """An `EagleHead` that is a `HistLM` over pairs of features and token: any mistake in either changes its logits."""

    taps = (1,)
    width = 1
    target_fingerprint = None

    def vocabulary(self, params):
        return None

    def features(self, params, taps):
        return taps[0]

    def forward(self, params, features_BxNxE, tokens_BxN, positions_BxN, kv, words_BxNxW):
        mixed_BxN = tokens_BxN + features_BxNxE[..., 0].astype(jnp.int32) * 7
        _, (hidden_BxNx1,), kv = super().forward(params, mixed_BxN, positions_BxN, kv, words_BxNxW, taps=(1,))
        return hidden_BxNx1 % self._CELLS, kv

    def logits(self, params, hidden_BxNxE):
        return self._row(params, hidden_BxNxE[..., 0])


class HistMedusa:
    """`MedusaHeads` of random tables, whose row the hidden state of a `HistLM` chooses."""

    taps = (1,)
    width = 1
    target_fingerprint = None

    def __init__(self, num_heads: int = 4, vocab_size: int = 11, seed: int = 5):
        self._heads = [HistLM(vocab_size, seed + k, sharpness=1.0) for k in range(num_heads)]
        self.num_heads, self.vocab_size = num_heads, vocab_size
        self.params = [head.params for head in self._heads]

    def vocabulary(self, params):
        return None

    def logits(self, params, hidden_BxE):
        tables = zip(self._heads, params, strict=True)
        return jnp.concatenate([head._row(table_CxV, hidden_BxE) for head, table_CxV in tables], axis=1)


class TinyTransformer(_Toy):
    """A random two-layer pre-norm transformer with grouped queries and rotary positions."""

    def __init__(
        self, vocab_size: int = 17, width: int = 16, layers: int = 2, heads: int = 4, kv_heads: int = 2, seed: int = 0
    ):
        self.vocab_size, self.layers, self.heads, self.kv_heads = vocab_size, layers, heads, kv_heads
        self.head_dim = width // heads
        rng = np.random.default_rng(seed)

        def matrix(*shape):
            return jnp.asarray(rng.standard_normal(shape) / math.sqrt(shape[0]), jnp.float32)

        self.params = {
            "embed": matrix(vocab_size, width) * math.sqrt(vocab_size),
            "head": matrix(width, vocab_size) * 2.0,
            "layers": [
                {
                    "q": matrix(width, heads * self.head_dim),
                    "kv": matrix(width, 2 * kv_heads * self.head_dim),
                    "out": matrix(heads * self.head_dim, width),
                    "up": matrix(width, 4 * width),
                    "down": matrix(4 * width, width),
                }
                for _ in range(layers)
            ],
        }

    def init_kv(self, batch: int, capacity: int) -> KVBuffer:
        return KVBuffer.create(self.layers, batch, self.kv_heads, capacity, self.head_dim)

    def forward(self, params, tokens_BxN, positions_BxN, kv, words_BxNxW, taps=()):
        B, N = tokens_BxN.shape
        x_BxNxE = params["embed"][tokens_BxN]
        stream = [x_BxNxE]
        for index, layer in enumerate(params["layers"]):
            y_BxNxE = _unit(x_BxNxE)
            q_BxNxHxD = (y_BxNxE @ layer["q"]).reshape(B, N, self.heads, self.head_dim)
            k_BxNxKxD, v_BxNxKxD = jnp.split(
                (y_BxNxE @ layer["kv"]).reshape(B, N, 2 * self.kv_heads, self.head_dim), 2, axis=2
            )
            kv = kv.write(index, _rotate(k_BxNxKxD, positions_BxN), v_BxNxKxD)
            out_BxNxHxD = attend(_rotate(q_BxNxHxD, positions_BxN), kv, index, words_BxNxW)
            x_BxNxE = x_BxNxE + out_BxNxHxD.reshape(B, N, -1) @ layer["out"]
            x_BxNxE = x_BxNxE + jax.nn.silu(_unit(x_BxNxE) @ layer["up"]) @ layer["down"]
            stream.append(x_BxNxE)
        stream.append(_unit(x_BxNxE))
        return stream[-1] @ params["head"], tuple(stream[tap] for tap in taps), kv


class Poisoned:
    """A target or head whose unwritten KV rows are filled with `value` before every forward: no output may change."""

    def __init__(self, target: Target, value: float = math.nan):
        self._target, self._value = target, value
        self.params = target.params

    def __getattr__(self, name):
        return getattr(self._target, name)

    def init_kv(self, batch: int, capacity: int) -> KVBuffer:
        return self._target.init_kv(batch, capacity)

    def forward(self, params, *arguments, **options):
        *inputs, kv, words_BxNxW = arguments
        committed_BxS = jnp.arange(kv.capacity)[None, :] < kv.length_B[:, None] + kv.tail

        def fill(rows_BxKxSxD):
            return jnp.where(committed_BxS[:, None, :, None], rows_BxKxSxD, self._value)

        kv = dataclasses.replace(kv, keys=tuple(map(fill, kv.keys)), values=tuple(map(fill, kv.values)))
        return self._target.forward(params, *inputs, kv, words_BxNxW, **options)


def _unit(x_BxNxE):
    return x_BxNxE * jax.lax.rsqrt((x_BxNxE * x_BxNxE).mean(-1, keepdims=True) + 1e-6)


def _rotate(x_BxNxHxD, positions_BxN):
    half = x_BxNxHxD.shape[-1] // 2
    angle_BxNx1xF = positions_BxN.astype(jnp.float32)[:, :, None, None] * (
        100.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)[None, None, None, :]
    )
    a, b = x_BxNxHxD[..., :half], x_BxNxHxD[..., half:]
    cos, sin = jnp.cos(angle_BxNx1xF), jnp.sin(angle_BxNx1xF)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
