"""Public toys with a known law, and the harness that judges a proposer, a tree or a rule.

Targets: `MarkovLM` (exact law), `ScriptLM` (a wrong position shows as a wrong token), `HistLM` (a hole or a stale row
shows), `TinyTransformer` (a real one, random), and `Poisoned`, which fills every uncommitted row with a value that
must not reach the output. Judges: `cycle_law` (the joint law of a cycle by enumeration), `total_variation`,
`chi_square_p`, `assert_same_tokens`, `assert_invariants`.

Whoever adds a proposer runs `assert_same_tokens`; whoever adds a rule made of coins runs `cycle_law` over
`all_drafts` against `plain_law`, and both run the chi-square test on the compiled decoder.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.attention import attend
from spec_jax.contract import Law
from spec_jax.cycle import DecodeState
from spec_jax.kv import KVBuffer
from spec_jax.propose.base import Proposal
from spec_jax.target import Target
from spec_jax.tree import Tree
from spec_jax.verify.base import CoinRule
from spec_jax.verify.match import Match


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
        seen_BxNxS = kv.visible(tokens_BxN.shape[1], words_BxNxW)
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
    """A target whose unwritten KV rows are filled with `value` before every forward: no output may change."""

    def __init__(self, target: Target, value: float = math.nan):
        self._target, self._value = target, value
        self.params = target.params

    def __getattr__(self, name):
        return getattr(self._target, name)

    def init_kv(self, batch: int, capacity: int) -> KVBuffer:
        return self._target.init_kv(batch, capacity)

    def forward(self, params, tokens_BxN, positions_BxN, kv, words_BxNxW, taps=()):
        committed_BxS = jnp.arange(kv.capacity)[None, :] < kv.length_B[:, None] + kv.tail

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


@dataclasses.dataclass(frozen=True)
class Draft:
    """One drafted tree, as a proposer hands it to a rule, and the probability that it is drafted.

    Attributes:
      tokens: of every node; the root's is 0.
      laws: N rows; row n is the law its children were drawn from, as `Proposal.draft_probs_BxNxV` records it (zeros for
        a leaf).
      mass: its probability.
      valid: which nodes are valid; all of them by default.
    """

    tokens: TokenTuple
    laws: tuple[tuple[float, ...], ...]
    mass: float
    valid: tuple[bool, ...] | None = None


@functools.cache
def _lines(tree: Tree) -> tuple[TokenTuple, ...]:
    """The nodes from below the root to each node."""
    above = (np.flatnonzero(row[1:]) + 1 for row in tree.ancestors_NxN)
    return tuple(tuple(nodes[np.argsort(tree.depth_N[nodes])].tolist()) for nodes in above)


def all_drafts(tree: Tree, q: Callable[[TokenTuple], np.ndarray], law: Law) -> list[Draft]:
    """Every tree that a draft of law q(prefix) can produce, with its probability.

    For POINT_MASS, of which any choice is right, siblings are independent draws that the rule is not told about.
    """

    def child(prefix: TokenTuple, elders: TokenTuple, num_siblings: int):
        """The recorded law behind a prefix, and the tokens that the next child may be, with their probabilities."""
        full = recorded = chances = q(prefix)
        order = np.argsort(-full, kind="stable")
        one_hot = np.eye(len(full))
        if law == Law.TOP_AND_SAMPLE:
            left = np.where(np.isin(np.arange(len(full)), order[: num_siblings - 1]), 0.0, full)
            recorded = left / left.sum() if left.sum() else left
            chances = one_hot[order[len(elders) - 1 if elders else num_siblings - 1]]
            chances = recorded if not elders and left.sum() else chances
        elif law == Law.WITHOUT_REPLACEMENT:
            left = np.where(np.isin(np.arange(len(full)), elders), 0.0, full)
            rest = [token for token in order if token not in elders] or [0]
            chances = left / left.sum() if left.sum() else one_hot[rest[0]]
        return tuple(recorded.tolist()), [(int(token), float(chances[token])) for token in np.flatnonzero(chances)]

    none = (0.0,) * len(q(()))
    found = [((0,), (none,), 1.0)]
    for node in range(1, tree.size):
        parent, rank = tree.parents[node], int(tree.rank_N[node])
        siblings, line, known, grown = tree.children[parent], _lines(tree)[parent], {}, []
        for tokens, laws, mass in found:
            key = tuple([tokens[n] for n in line]), tuple([tokens[n] for n in siblings[:rank]])
            if key not in known:
                known[key] = child(*key, len(siblings))
            recorded, choices = known[key]
            laws = (*laws[:parent], recorded, *laws[parent + 1 :], none)
            grown.extend(((*tokens, token), laws, mass * chance) for token, chance in choices)
        found = grown
    return [Draft(*parts) for parts in found]


def proposal_of(tree: Tree, drafts: Sequence[Draft], law: Law, dtype=None) -> Proposal:
    """Drafts as the rows of one proposal."""
    valid = [draft.valid or (True,) * tree.size for draft in drafts]
    laws = None if law == Law.POINT_MASS else jnp.asarray(np.asarray([draft.laws for draft in drafts]), dtype)
    tokens = jnp.asarray(np.asarray([draft.tokens for draft in drafts], np.int32))
    return Proposal(tokens, jnp.asarray(np.asarray(valid)), laws, tree, law)


def cycle_law(
    rule: CoinRule | Match, p: Callable[[TokenTuple], np.ndarray], tree: Tree, drafts: Sequence[Draft], law: Law
) -> tuple[dict[TokenTuple, float], float]:
    """The exact joint law of what one cycle of a rule emits, and its expected accepted tokens.

    Every draft, every outcome of the rule's randomness and every next token is enumerated with its probability, in
    float64; the rule's own functions decide. A cycle that emits n tokens is continued by plain decoding up to
    D + 1 tokens, D being the tree's depth, so an exact rule gives `plain_law(p, D + 1)`.

    Args:
      p: the target's law behind a prefix of drafted tokens; give tables with p != q that depend on it.
      drafts: see `all_drafts`; a planted bug changes them.
      law: what the rule is told about them.
    """
    heads: dict[TokenTuple, np.ndarray] = {}
    expected = 0.0
    outcomes = _match_outcomes if isinstance(rule, Match) else _coin_outcomes
    for start in range(0, len(drafts), 2048):
        chunk = list(drafts[start : start + 2048])
        # Few sizes, few programs.
        chunk += [dataclasses.replace(chunk[0], mass=0.0)] * (max(64, 1 << (len(chunk) - 1).bit_length()) - len(chunk))
        paths = [[tuple([draft.tokens[n] for n in line]) for line in _lines(tree)] for draft in chunk]
        chances = outcomes(rule, tree, chunk, paths, law, p)
        for draft, row, chance_NxV in zip(chunk, paths, chances, strict=True):
            for node in np.flatnonzero(chance_NxV.any(1)):
                mass_V = draft.mass * chance_NxV[node]
                heads[row[node]] = heads.get(row[node], 0.0) + mass_V
                expected += len(row[node]) * float(mass_V.sum())
    emitted: dict[TokenTuple, float] = {}
    for head, mass_V in heads.items():
        for token in np.flatnonzero(mass_V):
            begun = (*head, int(token))
            tail = plain_law(lambda rest, begun=begun: p((*begun, *rest)), tree.max_depth + 1 - len(begun))
            for rest, chance in tail.items():
                emitted[(*begun, *rest)] = emitted.get((*begun, *rest), 0.0) + float(mass_V[token]) * chance
    return emitted, expected


@functools.partial(jax.jit, static_argnums=(0, 1))
def _call(rule, method: str, *args):
    return getattr(rule, method)(*args)


def _coin_outcomes(rule: CoinRule, tree: Tree, drafts, paths, law: Law, p) -> np.ndarray:
    """[drafts, N, V]: the probability that node n is the last accepted one and token v comes behind it."""
    p_rows = np.asarray([[p(path) for path in row] for row in paths])
    with jax.enable_x64(True):
        verdict = _call(rule, "judge", proposal_of(tree, drafts, law), jnp.asarray(p_rows))
        coins, weights = np.asarray(verdict.coins_BxN)[:, 1:], np.asarray(verdict.weights_BxNxV)
    passed = np.asarray(list(itertools.product([False, True], repeat=tree.size - 1)), bool)
    blank = Draft((0,) * tree.size, ((),) * tree.size, 1.0)
    given = proposal_of(tree, [blank] * len(passed), Law.POINT_MASS)
    tossed = jnp.asarray(np.concatenate([np.ones((len(passed), 1), bool), passed], axis=1))
    last = np.asarray(_call(rule, "select", given, tossed))
    chance_of_node = np.zeros((len(drafts), tree.size))
    for outcome, node in zip(passed, last, strict=True):
        chance_of_node[:, node] += np.prod(np.where(outcome, coins, 1.0 - coins), axis=1)
    return chance_of_node[..., None] * weights / weights.sum(-1, keepdims=True)


def _match_outcomes(rule: Match, tree: Tree, drafts, paths, law: Law, p) -> np.ndarray:
    """The same for the target's draws, by the text that they make: every text of D + 1 tokens with its probability.

    Nodes that lie on the text draw its next token; what others draw must not matter, and they get any token.
    """
    masses = plain_law(p, tree.max_depth + 1)
    texts, V = np.asarray(list(masses)), len(p(()))
    filler = np.random.default_rng(0).integers(0, V, (len(drafts), len(texts), tree.size))
    begins = {path: (texts[:, : len(path)] == np.asarray(path, int)).all(1) for row in paths for path in row}
    on_text = np.asarray([[begins[path] for path in row] for row in paths])
    on_text = on_text.transpose(0, 2, 1)
    drawn = np.where(on_text, texts[None, :, tree.depth_N], filler).reshape(-1, tree.size)
    proposal = proposal_of(tree, [draft for draft in drafts for _ in texts], law)
    made = _call(rule, "walk", proposal, jnp.asarray(drawn, jnp.int32))
    last = np.take_along_axis(np.asarray(made.path_BxP), np.asarray(made.num_accepted_B)[:, None], axis=1)[:, 0]
    chances = np.zeros((len(drafts), tree.size, V))
    index = np.repeat(np.arange(len(drafts)), len(texts))
    np.add.at(chances, (index, last, np.asarray(made.next_token_B)), np.tile(list(masses.values()), len(drafts)))
    return chances


def optimal_acceptance(p: np.ndarray, siblings: dict[TokenTuple, float]) -> float:
    """The most that any exact rule can accept of one level of siblings: 1 + min over H of P(H) - Pr(all in H).

    Args:
      p: the target's law.
      siblings: the probability of every tuple of sibling tokens.

    (Hu et al., arXiv 2502.18779: the optimal transport between the draft's tuples and the target's tokens.)
    """
    V = len(p)
    gaps = []
    for bits in itertools.product([False, True], repeat=V):
        inside = np.asarray(bits)
        gaps.append(p[inside].sum() - sum(mass for tokens, mass in siblings.items() if inside[list(tokens)].all()))
    return 1.0 + min(gaps)


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

    @functools.cache
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
