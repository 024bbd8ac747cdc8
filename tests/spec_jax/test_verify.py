"""Rules: exact joint laws by enumeration, the measured acceptance, and planted bugs that must be caught."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import ContractError, Law, SamplingParams, contract, growth, sampling, testing, verify
from spec_jax.propose import DraftModel, PromptLookup, Proposal
from spec_jax.sampling import SamplingRows
from spec_jax.tree import DynamicTree, Tree
from spec_jax.verify import siblings

SUPPORTS = [("full", "full"), ("low", "high"), ("even", "odd"), ("full", "low")]
CHAIN_RULES = [verify.Rejection(), verify.Block()]
TREE_RULES = [verify.Match(), verify.Recursive(), verify.Traversal()]
TREES = {
    "one": Tree.branching((1,)),
    "three": Tree.branching((3,)),
    "chain": Tree.chain(3),
    "2,2": Tree.branching((2, 2)),
    "2,1,1": Tree.branching((2, 1, 1)),
    "ragged": Tree((-1, 0, 0, 1, 1, 2)),
    "not in level order": Tree((-1, 0, 1, 0, 3, 1)),
}
EXACT = 1e-12


def laws(supports, V=3):
    return testing.random_laws(V, 1, supports[0]), testing.random_laws(V, 2, supports[1])


def distance(rule, p, tree, drafts, law):
    """Total variation between what one cycle emits and plain decoding."""
    emitted, _ = testing.cycle_law(rule, p, tree, drafts, law)
    return testing.total_variation(emitted, testing.plain_law(p, tree.max_depth + 1))


def expected(rule, p, q, tree, law=Law.IID):
    return testing.cycle_law(rule, p, tree, testing.all_drafts(tree, q, law), law)[1]


def named(value):
    return getattr(value, "name", str(value))


@pytest.mark.smoke
@pytest.mark.parametrize("law", list(Law))
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("rule", TREE_RULES, ids=named)
def test_the_joint_law_of_a_cycle_is_plain_decodings(rule, tree, law):
    tree = TREES[tree]
    for supports in SUPPORTS if tree.size < 6 else SUPPORTS[:2]:
        p, q = laws(supports)
        assert any(abs(p(prefix) - q(prefix)).max() > 0.05 for prefix in [(), (0,), (1, 2)]), "the test needs p != q"
        drafts = testing.all_drafts(tree, q, law)
        assert sum(draft.mass for draft in drafts) == pytest.approx(1.0, abs=EXACT)
        assert distance(rule, p, tree, drafts, law) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("law", list(Law))
@pytest.mark.parametrize("rule", TREE_RULES, ids=named)
def test_the_joint_law_of_a_three_by_two_tree(rule, law):
    tree = Tree.branching((3, 2))
    # Without replacement three children of three tokens hold everything: a fourth token makes it a test.
    p, q = laws(("full", "full"), V=4 if law == Law.WITHOUT_REPLACEMENT and not isinstance(rule, verify.Match) else 3)
    assert distance(rule, p, tree, testing.all_drafts(tree, q, law), law) < EXACT


@pytest.mark.parametrize("law", [Law.IID, Law.POINT_MASS])
@pytest.mark.parametrize("rule", CHAIN_RULES, ids=named)
def test_rules_for_chains(rule, law):
    for supports, depth in itertools.product(SUPPORTS, (1, 2, 3)):
        p, q = laws(supports)
        tree = Tree.chain(depth)
        assert distance(rule, p, tree, testing.all_drafts(tree, q, law), law) < EXACT


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("rule", TREE_RULES[1:], ids=named)
def test_equal_laws_accept_everything(rule, tree):
    p, _ = laws(("full", "full"))
    tree = TREES[tree]
    assert distance(rule, p, tree, testing.all_drafts(tree, p, Law.IID), Law.IID) < EXACT
    if tree.is_chain:
        assert expected(rule, p, p, tree) == pytest.approx(tree.max_depth, abs=EXACT)


@pytest.mark.parametrize("law", [Law.IID, Law.WITHOUT_REPLACEMENT, Law.POINT_MASS])
@pytest.mark.parametrize("rule", TREE_RULES, ids=named)
def test_invalid_nodes(rule, law):
    """Whatever stands in an invalid node without younger siblings, the law stays and the node is never accepted."""
    p, q = laws(("full", "full"))
    for tree, invalid in [(Tree.chain(3), {2, 3}), (Tree.chain(3), {1, 2, 3}), (TREES["2,2"], {2, 5, 6})]:
        valid = tuple(n not in invalid for n in range(tree.size))
        drafts = [
            dataclasses.replace(
                draft,
                tokens=tuple(token if ok else 0 for token, ok in zip(draft.tokens, valid, strict=True)),
                valid=valid,
            )
            for draft in testing.all_drafts(tree, q, law)
        ]
        assert distance(rule, p, tree, drafts, law) < EXACT
        told = [dataclasses.replace(draft, valid=None) for draft in drafts]
        assert distance(rule, p, tree, told, law) > 1e-3 or isinstance(rule, verify.Match) or law == Law.POINT_MASS


# --- how much is accepted -----------------------------------------------------------------------------------------


def test_acceptance_is_what_theory_says():
    for seed in range(4):
        p, q = testing.random_laws(3, seed), testing.random_laws(3, seed + 50)
        assert (
            expected(verify.Block(), p, q, Tree.chain(3)) >= expected(verify.Rejection(), p, q, Tree.chain(3)) - EXACT
        )
        # One token: no rule accepts more than 1 - TV(p, q), and both reach it.
        overlap = np.minimum(p(()), q(())).sum()
        for rule in CHAIN_RULES:
            assert expected(rule, p, q, Tree.chain(1)) == pytest.approx(overlap, abs=EXACT)


def test_the_block_verification_toy():
    p, q = lambda _: np.array([1 / 3, 2 / 3]), lambda _: np.array([2 / 3, 1 / 3])
    assert expected(verify.Rejection(), p, q, Tree.chain(2)) == pytest.approx(10 / 9, abs=EXACT)
    assert expected(verify.Block(), p, q, Tree.chain(2)) == pytest.approx(11 / 9, abs=EXACT)


@pytest.mark.parametrize("tree", [name for name in TREES if name not in ("one", "three")])
def test_traversal_accepts_no_less_than_recursive_rejection(tree):
    tree = TREES[tree]
    for seed, law in itertools.product(range(3), (Law.IID, Law.WITHOUT_REPLACEMENT, Law.TOP_AND_SAMPLE)):
        p, q = testing.random_laws(3, seed), testing.random_laws(3, seed + 50)
        assert expected(verify.Traversal(), p, q, tree, law) >= expected(verify.Recursive(), p, q, tree, law) - EXACT


def block_coins(p_rows, q_rows, tokens):
    """Block verification as its paper writes it, for a whole chain."""
    w, coins = 1.0, []
    for i, token in enumerate(tokens):
        w = min(w * p_rows[i][token] / q_rows[i][token], 1.0)
        surplus = np.maximum(w * p_rows[i + 1] - q_rows[i + 1], 0.0).sum() if i + 1 < len(tokens) else None
        coins.append(w if surplus is None else surplus / (surplus + 1.0 - w))
    return coins


@pytest.mark.parametrize("rule", [verify.Traversal(), verify.Block()], ids=named)
def test_traversal_of_a_chain_is_block_verification(rule):
    tree, (p, q) = Tree.chain(3), laws(("full", "full"))
    drafts = testing.all_drafts(tree, q, Law.IID)
    rows = [[p(draft.tokens[1 : n + 1]) for n in range(4)] for draft in drafts]
    with jax.enable_x64(True):
        verdict = rule.judge(testing.proposal_of(tree, drafts, Law.IID), jnp.asarray(np.asarray(rows)))
        coins = np.asarray(verdict.coins_BxN)
    for draft, p_rows, ours in zip(drafts, rows, coins, strict=True):
        theirs = block_coins(p_rows, [np.asarray(law) for law in draft.laws], draft.tokens[1:])
        np.testing.assert_allclose(ours[1:], theirs, atol=EXACT)
    select = rule.select(
        testing.proposal_of(tree, drafts[:1] * 3, Law.IID), jnp.asarray([[1, 0, 0, 1], [1, 1, 0, 0], [0] * 4]) == 1
    )
    np.testing.assert_array_equal(select, [3, 1, 0])


def siblings_of(drafts):
    """The probability of every tuple of a one-level tree's tokens."""
    return {key: sum(d.mass for d in drafts if d.tokens[1:] == key) for key in {d.tokens[1:] for d in drafts}}


@pytest.mark.parametrize("law", [Law.IID, Law.WITHOUT_REPLACEMENT, Law.TOP_AND_SAMPLE])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_acceptance_never_exceeds_the_optimal_transport(law, k):
    for seed in range(6):
        p, q = testing.random_laws(4, seed), testing.random_laws(4, seed + 50)
        tree = Tree.branching((k,))
        bound = testing.optimal_acceptance(p(()), siblings_of(testing.all_drafts(tree, q, law)))
        for rule in TREE_RULES:
            accepted = expected(rule, p, q, tree, law)
            assert accepted <= bound + EXACT
            if law == Law.TOP_AND_SAMPLE and rule.name == "recursive":
                # The greedy draft reaches its bound: P(top) + sum of min(p, q') over the rest.
                top = np.argsort(-q(()))[: k - 1]
                rest = np.setdiff1d(np.arange(4), top)
                other = q(())[rest] / q(())[rest].sum()
                assert accepted == pytest.approx(bound, abs=1e-9)
                assert accepted == pytest.approx(p(())[top].sum() + np.minimum(p(())[rest], other).sum(), abs=1e-9)


# --- planted bugs -------------------------------------------------------------------------------------------------


class ResidualIsP(verify.Recursive):
    """Draws from p again after a rejection (and so gives p a second chance)."""

    def judge(self, proposal, p_BxNxV):
        return verify.Verdict(super().judge(proposal, p_BxNxV).coins_BxN, p_BxNxV)


class StopsAtFirstFailure(verify.Traversal):
    """Bottom-up coins walked from the top."""

    def select(self, proposal, passed_BxN):
        return verify.Recursive().select(proposal, passed_BxN)


class NoScale(verify.Traversal):
    """Residual of bottom-up verification without the factor w."""

    def judge(self, proposal, p_BxNxV):
        residual_BxNxV = verify.Recursive().judge(proposal, p_BxNxV).weights_BxNxV
        return verify.Verdict(super().judge(proposal, p_BxNxV).coins_BxN, residual_BxNxV)


class SharpenedQ(verify.Recursive):
    """The ratio test uses another q than the one sampled from."""

    def judge(self, proposal, p_BxNxV):
        q = proposal.draft_probs_BxNxV**2
        q = q / jnp.maximum(q.sum(-1, keepdims=True), 1e-9)
        return super().judge(dataclasses.replace(proposal, draft_probs_BxNxV=q), p_BxNxV)


class ForgetsTheRoot(verify.Recursive):
    """Every node is judged by the root's law."""

    def judge(self, proposal, p_BxNxV):
        verdict = super().judge(proposal, p_BxNxV)
        wrong = super().judge(proposal, jnp.broadcast_to(p_BxNxV[:, :1], p_BxNxV.shape))
        return verify.Verdict(wrong.coins_BxN, verdict.weights_BxNxV)


class AnyChildWhoseCoinPasses(verify.Recursive):
    """Takes the deepest path whose coins passed, although an elder child was accepted before."""

    def select(self, proposal, passed_BxN):
        return verify.base.deepest(proposal, passed_BxN)


PLANTED_RULES = [ResidualIsP, StopsAtFirstFailure, NoScale, SharpenedQ, ForgetsTheRoot, AnyChildWhoseCoinPasses]


@pytest.mark.parametrize("rule", PLANTED_RULES, ids=lambda rule: rule.__name__)
def test_enumeration_catches(rule):
    p, q = laws(("full", "full"))
    trees = TREES["2,2"], TREES["chain"]
    assert max(distance(rule(), p, tree, testing.all_drafts(tree, q, Law.IID), Law.IID) for tree in trees) > 1e-3


def resorted(drafts, key):
    """A single level of siblings, sorted again after they were drawn."""
    return [
        dataclasses.replace(draft, tokens=(0, *sorted(draft.tokens[1:], key=lambda token: key(draft, token))))
        for draft in drafts
    ]


def pruned(drafts):
    """Two siblings drawn, the likelier one kept."""
    return [
        dataclasses.replace(
            draft, tokens=(0, max(draft.tokens[1:], key=lambda token: draft.laws[0][token])), laws=draft.laws[:2]
        )
        for draft in drafts
    ]


def top_two(q):
    """The two likeliest tokens, chosen, as if they had been drawn."""
    best = tuple(int(token) for token in np.argsort(-q(()))[:2])
    return [testing.Draft((0, *best), (tuple(q(())), (0.0,) * 4, (0.0,) * 4), 1.0)]


def invalid_where(tree, drafts, is_bad):
    """Drafts in which a node that `is_bad` finds, and everything below it, is marked as not drafted."""
    marked = []
    for draft in drafts:
        valid = [True] * tree.size
        for node in range(1, tree.size):
            valid[node] = valid[tree.parents[node]] and not is_bad(draft, node)
        marked.append(dataclasses.replace(draft, valid=tuple(valid)))
    return marked


def drafted_chance(tree, draft, node):
    """The draft's probability of a node's token behind its parent."""
    return draft.laws[tree.parents[node]][draft.tokens[node]]


def not_among_the_best(tree, draft, node, num_kept=3):
    """Whether a node is outside the tree's most likely ones by the product along its path."""
    values = [1.0]
    for n in range(1, tree.size):
        values.append(values[tree.parents[n]] * drafted_chance(tree, draft, n))
    return node not in sorted(range(1, tree.size), key=lambda n: -values[n])[:num_kept]


FOUR = Tree.branching((2, 2))
TWO, ONE = Tree.branching((2,)), Tree.chain(1)
WOR = Law.WITHOUT_REPLACEMENT
PLANTED_DRAFTS = {
    "children sorted by token": lambda q: (TWO, resorted(testing.all_drafts(TWO, q, WOR), lambda _, token: token), WOR),
    "children sorted by q": lambda q: (
        TWO,
        resorted(testing.all_drafts(TWO, q, WOR), lambda d, token: -d.laws[0][token]),
        WOR,
    ),
    "pruned by value": lambda q: (ONE, pruned(testing.all_drafts(TWO, q, WOR)), Law.IID),
    "top k as if sampled": lambda q: (TWO, top_two(q), WOR),
    "independent draws judged as without replacement": lambda q: (TWO, testing.all_drafts(TWO, q, Law.IID), WOR),
    "draws without replacement judged as independent": lambda q: (TWO, testing.all_drafts(TWO, q, WOR), Law.IID),
    "duplicates skipped without touching q": lambda q: (
        TWO,
        invalid_where(TWO, testing.all_drafts(TWO, q, Law.IID), lambda d, n: n == 2 and d.tokens[1] == d.tokens[2]),
        Law.IID,
    ),
    "unlikely tokens dropped": lambda q: (
        Tree.chain(2),
        invalid_where(
            Tree.chain(2),
            testing.all_drafts(Tree.chain(2), q, Law.IID),
            lambda d, n: drafted_chance(Tree.chain(2), d, n) < 0.3,
        ),
        Law.IID,
    ),
    "the best nodes of a tree by path": lambda q: (
        FOUR,
        invalid_where(FOUR, testing.all_drafts(FOUR, q, WOR), lambda d, n: not_among_the_best(FOUR, d, n)),
        WOR,
    ),
    "a chosen sibling judged as drawn": lambda q: (TWO, testing.all_drafts(TWO, q, Law.TOP_AND_SAMPLE), Law.IID),
}


@pytest.mark.parametrize("rule", TREE_RULES, ids=named)
@pytest.mark.parametrize("bug", PLANTED_DRAFTS)
def test_enumeration_catches_drafts_that_are_not_their_law(bug, rule):
    """Ratio rules are wrong then, and `match`, which does not ask how tokens were drawn, is right."""
    worst = 0.0
    for seed in range(3):
        p, q = testing.random_laws(4, seed), testing.random_laws(4, seed + 50)
        tree, drafts, law = PLANTED_DRAFTS[bug](q)
        worst = max(worst, distance(rule, p, tree, drafts, law))
    assert worst < EXACT if isinstance(rule, verify.Match) else worst > 5e-3


def test_siblings_without_replacement_need_q_renormalised(monkeypatch):
    """p=(.4,.3,.2,.1), q=(.1,.2,.3,.4), two siblings: without renormalising the law is (.3566,.3434,.2,.1)."""
    p, q = lambda _: np.array([0.4, 0.3, 0.2, 0.1]), lambda _: np.array([0.1, 0.2, 0.3, 0.4])
    drafts = testing.all_drafts(TWO, q, WOR)
    assert distance(verify.Recursive(), p, TWO, drafts, WOR) < EXACT
    with monkeypatch.context() as patch:
        patch.setattr(siblings, "slot_law", lambda law, rank, q_BxMxV, one_hot: q_BxMxV)
        jax.clear_caches()
        emitted, _ = testing.cycle_law(verify.Recursive(), p, TWO, drafts, WOR)
    jax.clear_caches()  # nothing may find the planted program again
    first = [sum(mass for tokens, mass in emitted.items() if tokens[0] == token) for token in range(4)]
    np.testing.assert_allclose(first, [0.3566, 0.3434, 0.2, 0.1], atol=1e-4)


def test_one_sample_for_all_candidates_of_a_node():
    """Candidates ab, ac, ad, ef with P(a) = P(e) = .5: one draw a node gives a .5 (a draw a path gave .875)."""
    p = lambda prefix: np.array([0.5, 0.5]) if not prefix else np.array([1.0, 0.0])  # noqa: E731
    drafts = [testing.Draft((0, 0, 0, 0, 1), ((0.0, 0.0),) * 5, 1.0)]
    emitted, _ = testing.cycle_law(verify.Match(), p, Tree.branching((4,)), drafts, Law.POINT_MASS)
    assert sum(mass for tokens, mass in emitted.items() if tokens[0] == 0) == pytest.approx(0.5, abs=EXACT)


@pytest.mark.parametrize("rule", [*TREE_RULES, *CHAIN_RULES, verify.Typical()], ids=named)
def test_a_law_that_is_no_number_behind_an_impossible_token_matters_to_nobody(rule):
    logits = np.log([[[0.5, 0.5 - 1e-9, 1e-30]] * 3])
    logits[0, 0, 2], logits[0, 1] = -np.inf, np.nan
    q = jnp.asarray([[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0] * 3]], jnp.float32)
    made = one_row(rule, Tree.chain(2), [0, 2, 0], logits, law=Law.IID, q=q)
    assert int(made.num_accepted_B[0]) == 0 and int(made.next_token_B[0]) in (0, 1)


def test_nothing_deeper_than_declared_is_accepted():
    logits = np.zeros((1, 4, 5))
    logits[:, :, 0] = 1.0
    rows = SamplingRows.create([SamplingParams(temperature=0)], [0])
    parents = jnp.asarray([[-1, 0, 1, 2]], jnp.int32)
    proposal = Proposal(
        jnp.zeros((1, 4), jnp.int32), jnp.ones((1, 4), bool), None, DynamicTree(4, 2), Law.POINT_MASS, parents
    )
    made = verify.Match().verify(proposal, jnp.asarray(logits, jnp.float32), rows, jnp.array([3], jnp.int32))
    np.testing.assert_array_equal(made.path_BxP, [[0, 1, 2]])
    assert int(made.num_accepted_B[0]) == 2


def filtered(logits, **options):
    """`sampling.law` of one row of logits."""
    rows = SamplingRows.create([SamplingParams(**options)], [0])
    return np.asarray(sampling.law(jnp.asarray(logits, jnp.float32)[None, None], rows))[0, 0].astype(np.float64)


def test_filters_stand_on_both_sides():
    """p=(.5,.3,.15,.05), top-p .8, q uniform: acceptance .5, or .875 with q filtered too; the law is p' in both."""
    p = filtered(np.log([0.5, 0.3, 0.15, 0.05]), top_p=0.8)
    p /= p.sum()
    half = np.array([0.5, 0.5, 0.0, 0.0])
    for rule in CHAIN_RULES:
        for q, acceptance in ((np.full(4, 0.25), 0.5), (half, 0.875)):
            assert expected(rule, lambda _: p, lambda _, q=q: q, ONE) == pytest.approx(acceptance, abs=1e-6)
            drafts = testing.all_drafts(ONE, lambda _, q=q: q, Law.IID)
            assert distance(rule, lambda _: p, ONE, drafts, Law.IID) < EXACT
    # The planted bug: coins and residual by the unfiltered p.
    raw = np.array([0.5, 0.3, 0.15, 0.05])
    drafts = testing.all_drafts(ONE, lambda _: half, Law.IID)
    emitted, _ = testing.cycle_law(verify.Rejection(), lambda _: raw, ONE, drafts, Law.IID)
    assert testing.total_variation(emitted, testing.plain_law(lambda _: p, 2)) > 0.1


def test_enumeration_catches_an_argmax_draft_scored_with_a_soft_q():
    """p=(.4,.35,.05,.2), q=(.1,.1,.6,.2): judged by the soft q the law is (.5,.4167,.0833,0), as a point mass p."""
    p, q = (np.array(v) for v in ((0.4, 0.35, 0.05, 0.2), (0.1, 0.1, 0.6, 0.2)))
    drafts = [testing.Draft((0, int(q.argmax())), (tuple(q), (0.0,) * 4), 1.0)]

    def law_of(law):
        emitted, _ = testing.cycle_law(verify.Rejection(), lambda _: p, ONE, drafts, law)
        return [sum(mass for tokens, mass in emitted.items() if tokens[0] == token) for token in range(4)]

    np.testing.assert_allclose(law_of(Law.POINT_MASS), p, atol=EXACT)
    np.testing.assert_allclose(law_of(Law.IID), (0.5, 0.41667, 0.08333, 0.0), atol=1e-4)


# --- edges of a single decision -----------------------------------------------------------------------------------


def one_row(rule, tree, tokens, logits, *, law=Law.POINT_MASS, q=None, valid=None, temperature=1.0):
    """What a rule makes of one proposal."""
    rows = SamplingRows.create([SamplingParams(temperature=temperature)], [0])
    valid = jnp.ones((1, tree.size), bool) if valid is None else jnp.asarray([valid])
    proposal = Proposal(jnp.asarray([tokens], jnp.int32), valid, q, tree, law)
    return rule.verify(proposal, jnp.asarray(logits, jnp.float32), rows, jnp.array([3], jnp.int32))


@pytest.mark.parametrize("rule", [*CHAIN_RULES, *TREE_RULES[1:]], ids=named)
def test_an_impossible_token_is_never_accepted(rule, monkeypatch):
    """p(x) = 0 with a uniform of exactly 0, and q(x) = 0 without a division by zero."""
    monkeypatch.setattr(sampling, "uniforms", lambda seed, purpose, position, lane=None: jnp.zeros(position.shape))
    with np.errstate(divide="ignore"):
        logits = np.log([[[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]]])
    q = jnp.asarray([[[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]]], jnp.float32)
    accepted = one_row(rule, ONE, [0, 0], logits, law=Law.IID, q=q)
    assert int(accepted.num_accepted_B[0]) == 0 and int(accepted.next_token_B[0]) != 0


@pytest.mark.parametrize("rule", [*CHAIN_RULES, *TREE_RULES[1:]], ids=named)
def test_an_empty_residual_falls_back_to_p(rule):
    p = jnp.asarray([[[0.25, 0.75], [0.5, 0.5]]], jnp.float32)
    proposal = Proposal(jnp.asarray([[0, 1]], jnp.int32), jnp.ones((1, 2), bool), p, ONE, Law.IID)
    np.testing.assert_allclose(rule.judge(proposal, p).weights_BxNxV[0, 0], p[0, 0])


def test_typical_is_relaxed_and_greedy_rows_stay_greedy():
    rule = verify.Typical(epsilon=0.1, delta=0.5)
    assert not rule.exact and contract.Contract.of(rule, 0.7).promise == contract.Promise.RELAXED
    logits = np.log([[[0.05, 0.15, 0.8], [0.3, 0.3, 0.4]]])
    for token, temperature, accepted in [(0, 1.0, 0), (1, 1.0, 1), (2, 1.0, 1), (1, 0.0, 0), (2, 0.0, 1)]:
        made = one_row(rule, ONE, [0, token], logits, temperature=temperature)
        assert int(made.num_accepted_B[0]) == accepted
    with pytest.raises(ValueError, match="epsilon"):
        verify.Typical(epsilon=1.5)


def test_typical_keeps_the_deepest_typical_path_of_a_tree():
    rule, tree = verify.Typical(epsilon=0.1, delta=0.5), Tree((-1, 0, 0, 0, 2, 4))
    likely = np.log([0.05, 0.15, 0.8])
    logits = np.broadcast_to(likely, (1, 6, 3))
    # Children: 2 (typical leaf), 1 (typical), 0 (not typical, though everything below it would be).
    made = one_row(rule, tree, [0, 2, 1, 0, 2, 0], logits)
    np.testing.assert_array_equal(made.path_BxP[0], [0, 2, 4, 6])
    made = one_row(rule, tree, [0, 2, 1, 0, 2, 2], logits, valid=[True] * 4 + [False, False])
    np.testing.assert_array_equal(made.path_BxP[0], [0, 1, 6, 6])


def test_match_keeps_validity_and_depth():
    """A padded node that happens to equal the target's choice is not accepted."""
    logits = np.zeros((1, 4, 5))
    logits[:, :, 0] = 1.0  # the target always says 0
    valid = [True, True, False, False]
    acceptance = one_row(verify.Match(), Tree.chain(3), [0, 0, 0, 0], logits, valid=valid, temperature=0)
    assert int(acceptance.num_accepted_B[0]) == 1
    np.testing.assert_array_equal(acceptance.path_BxP[0], [0, 1, 4, 4])


@pytest.mark.parametrize("rule", TREE_RULES, ids=named)
def test_a_greedy_row_walks_a_tree(rule):
    tree = Tree((-1, 0, 0, 1, 1, 2))  # root; a, b; aa, ab, ba
    logits = np.asarray(jax.nn.one_hot(jnp.asarray([[2, 0, 1, 0, 0, 4]]), 5))
    acceptance = one_row(rule, tree, [0, 1, 2, 1, 2, 1], logits, temperature=0)
    np.testing.assert_array_equal(acceptance.path_BxP[0], [0, 2, 5])
    assert int(acceptance.num_accepted_B[0]) == 2 and int(acceptance.next_token_B[0]) == 4


# --- the table of legal pairs -------------------------------------------------------------------------------------


def test_the_table_of_legal_pairs():
    everything = {(law, name) for law in Law for name in ("match", "recursive", "traversal", "typical")}
    assert verify.TABLE == everything | {
        (law, name) for law in ("iid", "point_mass") for name in ("rejection", "block")
    }


def test_illegal_pairs_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Siblings(PromptLookup):
        law = WOR

    @dataclasses.dataclass(frozen=True)
    class Branches(PromptLookup):
        tree = Tree((-1, 0, 0))

    grown = DraftModel(testing.HistLM(), growth.Beam(8, 3, 2), Law.POINT_MASS)
    for rule in CHAIN_RULES:
        with pytest.raises(ContractError, match=f"'{rule.name}' cannot judge proposals of law 'without_replacement'"):
            contract.check_pair(Siblings(), rule)
        for proposer in (Branches(), grown):
            with pytest.raises(ContractError, match="judges chains"):
                contract.check_pair(proposer, rule)
    for rule in TREE_RULES[1:]:
        contract.check_pair(Branches(), rule)
        with pytest.raises(ContractError, match="judges static trees"):
            contract.check_pair(grown, rule)
    contract.check_pair(Siblings(), verify.Match())
    contract.check_pair(grown, verify.Match())
    contract.check_pair(DraftModel(testing.HistLM()), verify.Block())


def test_a_pruned_sample_is_no_sample_any_more():
    """Cut by value, a sampled tree has the law of a point mass, and a proposer that says otherwise is refused."""
    tree = Tree.branching((2, 2))
    drafts = testing.all_drafts(tree, testing.random_laws(3, 0), WOR)[:5]
    proposal = testing.proposal_of(tree, drafts, WOR)
    values = -jnp.broadcast_to(jnp.asarray([0.0, 2.0, 1.0, 4.0, 5.0, 2.0, 3.0])[None], (5, 7))
    cut = proposal.pruned(values, 4)
    assert cut.law == Law.POINT_MASS and cut.draft_probs_BxNxV is None
    np.testing.assert_array_equal(cut.parents_BxN[0], [-1, 0, 0, 2])
    np.testing.assert_array_equal(cut.tokens_BxN, np.asarray(proposal.tokens_BxN)[:, [0, 1, 2, 5]])

    @dataclasses.dataclass(frozen=True)
    class Liar(PromptLookup):
        law = WOR

    with pytest.raises(ContractError, match="pruned or sorted by value"):
        contract.check_proposal(cut, Liar())
    with pytest.raises(ContractError, match="draft_probs"):
        contract.check_proposal(
            dataclasses.replace(proposal, draft_probs_BxNxV=None),
            dataclasses.replace(DraftModel(testing.HistLM()), tree=tree, law=WOR),
        )
