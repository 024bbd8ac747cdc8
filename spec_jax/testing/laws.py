"""Laws by enumeration: of plain decoding, of drafts, and of a whole cycle of a rule; and how far two are apart."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.contract import Law
from spec_jax.propose.base import Proposal
from spec_jax.tree import Tree
from spec_jax.verify.base import CoinRule
from spec_jax.verify.match import Match

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
