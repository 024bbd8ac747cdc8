"""Public toys with a known law, and the harness that judges a proposer, a tree or a rule.

Targets: `MarkovLM` (exact law), `ScriptLM` (a wrong position shows as a wrong token), `HistLM` (a hole or a stale row
shows), `TinyTransformer` (a real one, random), and `Poisoned`, which fills every uncommitted row with a value that
must not reach the output. Judges: `cycle_law` (the joint law of a cycle by enumeration), `total_variation`,
`chi_square_p`, `assert_same_tokens`, `assert_invariants`.

Whoever adds a proposer runs `assert_same_tokens`; whoever adds a rule made of coins runs `cycle_law` against
`plain_law`, and both run the chi-square test on the compiled decoder.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.tree_attention import visible
from spec_jax.attention import attend
from spec_jax.contract import Law
from spec_jax.cycle import DecodeState
from spec_jax.kv import KVBuffer
from spec_jax.propose.base import Proposal
from spec_jax.target import Target
from spec_jax.tree import Tree
from spec_jax.verify.base import CoinRule, draft_law


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
    table chosen by the sum over all visible rows. A missing, stale, doubled or misplaced row changes the sum.
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
        seen_BxNxS = visible(kv.length_B, tokens_BxN.shape[1], kv.capacity, words_BxNxW)
        total_BxN = jnp.where(seen_BxNxS, rows_Bx1xS, 0.0).sum(-1)
        is_number_BxN = jnp.isfinite(total_BxN)
        cell_BxN = jnp.where(is_number_BxN, total_BxN, 0.0).astype(jnp.int32) % self._CELLS
        return jnp.where(is_number_BxN[..., None], params[cell_BxN], jnp.nan), (), kv


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
    """A target whose uncommitted KV rows are filled with `value` before every forward: no output may change."""

    def __init__(self, target: Target, value: float = math.nan):
        self._target, self._value = target, value
        self.params = target.params

    def __getattr__(self, name):
        return getattr(self._target, name)

    def init_kv(self, batch: int, capacity: int) -> KVBuffer:
        return self._target.init_kv(batch, capacity)

    def forward(self, params, tokens_BxN, positions_BxN, kv, words_BxNxW, taps=()):
        committed_BxS = jnp.arange(kv.capacity)[None, :] < kv.length_B[:, None]

        def fill(rows_BxKxSxD):
            return jnp.where(committed_BxS[:, None, :, None], rows_BxKxSxD, self._value)

        kv = dataclasses.replace(kv, keys=tuple(map(fill, kv.keys)), values=tuple(map(fill, kv.values)))
        return self._target.forward(params, tokens_BxN, positions_BxN, kv, words_BxNxW, taps=taps)


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


# --- Exact laws by enumeration ------------------------------------------------------------------------------------

TokenTuple = tuple[int, ...]


def plain_law(p: Callable[[TokenTuple], np.ndarray], length: int) -> dict[TokenTuple, float]:
    """The law of the next `length` tokens by plain decoding, p(prefix) being the law of the token behind a prefix."""
    laws = {(): 1.0}
    for _ in range(length):
        laws = {
            (*prefix, token): mass * float(chance)
            for prefix, mass in laws.items()
            for token, chance in enumerate(p(prefix))
        }
    return laws


def chain_proposal_of(tokens: Sequence[int], q_rows, law: Law, valid: int | None = None) -> Proposal:
    """A one-row chain proposal, root token 0, as a rule sees it."""
    tree = Tree.chain(len(tokens))
    valid = len(tokens) if valid is None else valid
    return Proposal(
        tokens_BxN=jnp.asarray([[0, *tokens]], jnp.int32),
        valid_BxN=jnp.arange(tree.size)[None, :] <= valid,
        draft_probs_BxNxV=None if law == Law.POINT_MASS else jnp.asarray(q_rows)[None],
        tree=tree,
        law=law,
    )


def cycle_law(
    rule: CoinRule,
    p: Callable[[TokenTuple], np.ndarray],
    q: Callable[[TokenTuple], np.ndarray],
    depth: int,
    law: Law = Law.IID,
    valid: int | None = None,
) -> tuple[dict[TokenTuple, float], float]:
    """The exact joint law of what one cycle of a rule emits, and its expected accepted tokens.

    Every drafted chain of `depth` tokens, every outcome of the coins and every next token is enumerated with its
    probability; the rule's own functions supply coins, selection and residual. A cycle that emits n tokens is
    continued by plain decoding up to depth + 1 tokens, so an exact rule gives `plain_law(p, depth + 1)`.

    Args:
      p, q: laws of target and draft behind a prefix of drafted tokens; give tables with p != q that depend on it.
      law: IID, or POINT_MASS (tokens still drawn from q here, but the rule is not told q).
      valid: how many of the drafted tokens are valid (all by default).
    """
    V = len(p(()))
    chains = list(itertools.product(range(V), repeat=depth))
    coins_fn, residual_fn, select_fn = _batched_rule(rule, depth, law)
    p_rows = np.stack([[p(chain[:i]) for i in range(depth + 1)] for chain in chains])
    q_rows = np.stack([[*(q(chain[:i]) for i in range(depth)), np.zeros(V)] for chain in chains])
    tokens = np.asarray([(0, *chain) for chain in chains])
    valid_rows = np.broadcast_to(np.arange(depth + 1) <= (depth if valid is None else valid), tokens.shape)
    coins = np.asarray(coins_fn(tokens, valid_rows, p_rows, q_rows), np.float64)
    residuals = np.stack(
        [residual_fn(tokens, valid_rows, p_rows, q_rows, np.full(len(chains), n)) for n in range(depth + 1)], axis=1
    )
    outcomes = np.asarray(list(itertools.product([False, True], repeat=depth)), bool)
    selected = np.asarray(select_fn(np.concatenate([np.ones((len(outcomes), 1), bool), outcomes], axis=1)))

    emitted: dict[TokenTuple, float] = {}
    expected = 0.0
    for i, chain in enumerate(chains):
        drawn = float(np.prod([q(chain[:d])[chain[d]] for d in range(depth)]))
        if drawn == 0.0:
            continue
        for outcome, node in zip(outcomes, selected, strict=True):
            mass = drawn * float(np.prod(np.where(outcome, coins[i, 1:], 1.0 - coins[i, 1:])))
            if mass == 0.0:
                continue
            expected += mass * int(node)
            weights = residuals[i, node].astype(np.float64)
            for token in np.flatnonzero(weights):
                head = (*chain[:node], int(token))
                tail = plain_law(lambda rest, head=head: p((*head, *rest)), depth + 1 - len(head))
                for rest, chance in tail.items():
                    key = (*head, *rest)
                    emitted[key] = emitted.get(key, 0.0) + mass * weights[token] / weights.sum() * chance
    return emitted, expected


def _batched_rule(rule: CoinRule, depth: int, law: Law):
    """The three parts of a rule as functions of plain arrays."""
    tree = Tree.chain(depth)

    def proposal(tokens, valid, q_rows):
        probs = None if law == Law.POINT_MASS else jnp.asarray(q_rows)
        return Proposal(jnp.asarray(tokens, jnp.int32), jnp.asarray(valid), probs, tree, law)

    def given(tokens, valid, p_rows, q_rows):
        made = proposal(tokens, valid, q_rows)
        return made, jnp.asarray(p_rows), draft_law(made, p_rows.shape[-1])

    def coins(*args):
        return rule.coins(*given(*args))

    def residual(tokens, valid, p_rows, q_rows, node):
        return np.asarray(rule.residual(*given(tokens, valid, p_rows, q_rows), jnp.asarray(node, jnp.int32)))

    def select(passed):
        tokens = np.zeros(passed.shape, np.int32)
        return rule.select(proposal(tokens, np.ones_like(passed), np.zeros((*passed.shape, 1))), jnp.asarray(passed))

    return coins, residual, select


def total_variation(a: dict[TokenTuple, float], b: dict[TokenTuple, float]) -> float:
    """Half the sum of the absolute differences of two laws."""
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())


def random_laws(V: int, seed: int, support: str = "full") -> Callable[[TokenTuple], np.ndarray]:
    """A random law of the next token that depends on the whole prefix.

    Args:
      support: "full"; "low" and "high" leave out the last or the first third of the vocabulary (they overlap partly);
        "even" and "odd" are disjoint.
    """
    allowed = {
        "full": np.ones(V, bool),
        "low": np.arange(V) < V - V // 3,
        "high": np.arange(V) >= V // 3,
        "even": np.arange(V) % 2 == 0,
        "odd": np.arange(V) % 2 == 1,
    }[support]

    def law(prefix: TokenTuple) -> np.ndarray:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        weights = rng.gamma(0.7, size=V) * allowed + 1e-3 * allowed
        return weights / weights.sum()

    return law


def chi_square_p(counts: dict[TokenTuple, int], law: dict[TokenTuple, float]) -> float:
    """p-value of counts under a law; cells of expected count below 5 are merged; 0 for a count of probability 0."""
    from scipy import stats  # a test dependency: extra [test]

    total = sum(counts.values())
    if any(law.get(key, 0.0) == 0.0 for key in counts):
        return 0.0
    cells = sorted((total * mass, counts.get(key, 0)) for key, mass in law.items() if mass > 0.0)
    expected, observed = map(np.asarray, zip(*cells, strict=True))
    merged = np.searchsorted(np.cumsum(expected), 5.0) + 1
    expected = np.concatenate([[expected[:merged].sum()], expected[merged:]])
    observed = np.concatenate([[observed[:merged].sum()], observed[merged:]])
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


# --- Judging whole decoders ---------------------------------------------------------------------------------------


def assert_same_tokens(decoder, plain, prompts, params) -> None:
    """Speculation on and off give the same tokens and reasons for the same seeds (rule `match`, or greedy rows)."""
    ours, theirs = decoder.generate(prompts, params), plain.generate(prompts, params)
    for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if (a.tokens, a.finish_reason) != (b.tokens, b.finish_reason):
            raise AssertionError(
                f"row {row}: {a.tokens} ({a.finish_reason}) with speculation, {b.tokens} ({b.finish_reason}) without"
            )


def assert_invariants(before: DecodeState, after: DecodeState) -> None:
    """What must hold between two consecutive states, whatever was proposed and accepted."""
    before, after = jax.device_get((before, after))
    emitted = after.num_tokens_B - before.num_tokens_B
    checks = {
        "KV length is committed tokens - 1": after.kv.length_B == after.num_tokens_B - 1,
        "length fits the buffer": after.num_tokens_B <= after.tokens_BxS.shape[1],
        "an active row emits unless it fails": (emitted > 0) | (before.status_B != 0) | (after.status_B == 3),
        "another row does not": (emitted == 0) | (before.status_B == 0),
        "emitted is taken from the budget": before.budget_B - after.budget_B == emitted,
        "the budget is kept": after.budget_B >= 0,
        "counters count emitted tokens": emitted
        == sum(
            getattr(after.counters, name) - getattr(before.counters, name)
            for name in ("accepted_B", "correction_B", "bonus_B")
        ),
    }
    for what, holds in checks.items():
        if not np.all(holds):
            raise AssertionError(f"{what}: rows {np.flatnonzero(~holds).tolist()}")
    for row, count in enumerate(before.num_tokens_B):
        if (before.tokens_BxS[row, :count] != after.tokens_BxS[row, :count]).any():
            raise AssertionError(f"row {row}: committed tokens changed")
        for old, new in zip(before.kv.keys + before.kv.values, after.kv.keys + after.kv.values, strict=True):
            if not np.array_equal(old[row, :, : count - 1], new[row, :, : count - 1], equal_nan=True):
                raise AssertionError(f"row {row}: committed KV changed")
