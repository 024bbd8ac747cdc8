"""Rules: exact joint laws by enumeration, the measured acceptance, and planted bugs that must be caught."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import ContractError, Law, SamplingParams, contract, sampling, testing, verify
from spec_jax.propose import DraftModel, PromptLookup
from spec_jax.sampling import SamplingRows
from spec_jax.tree import Tree
from spec_jax.verify.base import chain_length, chain_ratios, positive_part, rows_at

SUPPORTS = [("full", "full"), ("low", "high"), ("even", "odd"), ("full", "low")]
EXACT_RULES = [verify.Rejection(), verify.Block()]
# float32 tables: each probability is right to about 6e-8.
EXACT = 1e-6


def laws(supports, V=3):
    return testing.random_laws(V, 1, supports[0]), testing.random_laws(V, 2, supports[1])


@pytest.mark.smoke
@pytest.mark.parametrize("law", [Law.IID, Law.POINT_MASS])
@pytest.mark.parametrize("supports", SUPPORTS, ids="-".join)
@pytest.mark.parametrize("rule", EXACT_RULES, ids=lambda rule: rule.name)
def test_the_joint_law_of_a_cycle_is_plain_decodings(rule, supports, law):
    p, q = laws(supports)
    assert any(abs(p(prefix) - q(prefix)).max() > 0.05 for prefix in [(), (0,), (1, 2)]), "the test needs p != q"
    for depth in (1, 2, 3) if supports == ("full", "full") else (2,):
        emitted, _ = testing.cycle_law(rule, p, q, depth, law)
        assert testing.total_variation(emitted, testing.plain_law(p, depth + 1)) < EXACT


@pytest.mark.parametrize("rule", EXACT_RULES, ids=lambda rule: rule.name)
def test_equal_laws_accept_everything(rule):
    p, _ = laws(("full", "full"))
    emitted, expected = testing.cycle_law(rule, p, p, 3)
    assert expected == pytest.approx(3.0, abs=1e-5)
    assert testing.total_variation(emitted, testing.plain_law(p, 4)) < EXACT


@pytest.mark.parametrize("valid", [0, 1, 2])
@pytest.mark.parametrize("rule", EXACT_RULES, ids=lambda rule: rule.name)
def test_shorter_drafts_in_a_longer_chain(rule, valid):
    p, q = laws(("full", "full"))
    emitted, expected = testing.cycle_law(rule, p, q, 3, valid=valid)
    assert testing.total_variation(emitted, testing.plain_law(p, 4)) < EXACT
    assert expected <= valid + EXACT


def test_acceptance_is_what_theory_says():
    for seed in range(4):
        p, q = testing.random_laws(3, seed), testing.random_laws(3, seed + 50)
        _, token = testing.cycle_law(verify.Rejection(), p, q, 3)
        _, block = testing.cycle_law(verify.Block(), p, q, 3)
        assert block >= token - EXACT
        # One token: no rule accepts more than 1 - TV(p, q), and both reach it.
        overlap = np.minimum(p(()), q(())).sum()
        for rule in EXACT_RULES:
            assert testing.cycle_law(rule, p, q, 1)[1] == pytest.approx(overlap, abs=1e-6)


def test_the_block_verification_toy():
    p, q = lambda _: np.array([1 / 3, 2 / 3]), lambda _: np.array([2 / 3, 1 / 3])
    assert testing.cycle_law(verify.Rejection(), p, q, 2)[1] == pytest.approx(10 / 9, abs=1e-6)
    assert testing.cycle_law(verify.Block(), p, q, 2)[1] == pytest.approx(11 / 9, abs=1e-6)


@pytest.mark.parametrize("supports", SUPPORTS, ids="-".join)
def test_the_joint_law_of_match(supports, monkeypatch):
    """Every draft, and a uniform from the middle of every interval that draws a token, with its probability."""
    p, q = laws(supports)
    cases = []
    for chain in itertools.product(range(3), repeat=2):
        rows = [p(chain[:depth]) for depth in range(3)]
        for drawn in itertools.product(range(3), repeat=3):
            mass = (
                q(())[chain[0]] * q(chain[:1])[chain[1]] * np.prod([row[y] for row, y in zip(rows, drawn, strict=True)])
            )
            if mass > 0.0:
                middle = [row[:y].sum() + row[y] / 2 for row, y in zip(rows, drawn, strict=True)]
                cases.append((chain, rows, middle, mass))
    u = jnp.asarray([middle for _, _, middle, _ in cases], jnp.float32)
    monkeypatch.setattr(sampling, "uniforms", lambda seed, purpose, position, lane=None: u)
    proposal = verify.base.Proposal(
        jnp.asarray([(0, *chain) for chain, *_ in cases], jnp.int32),
        jnp.ones(u.shape, bool),
        None,
        Tree.chain(2),
        Law.IID,
    )
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log([rows for _, rows, _, _ in cases]), jnp.float32)
    sampled = SamplingRows.create([SamplingParams()] * len(cases), range(len(cases)))
    made = verify.Match().verify(proposal, logits, sampled, jnp.zeros(len(cases), jnp.int32))
    emitted = {}
    for (chain, _, _, mass), accepted, token in zip(
        cases, np.asarray(made.num_accepted_B), np.asarray(made.next_token_B), strict=True
    ):
        head = (*chain[:accepted], int(token))
        for rest, chance in testing.plain_law(lambda rest, head=head: p((*head, *rest)), 3 - len(head)).items():
            emitted[(*head, *rest)] = emitted.get((*head, *rest), 0.0) + mass * chance
    assert testing.total_variation(emitted, testing.plain_law(p, 3)) < EXACT


# --- planted bugs -------------------------------------------------------------------------------------------------


class NoScale(verify.Block):
    """Residual of block verification without the factor w."""

    def residual(self, proposal, p_BxNxV, q_BxNxV, node_B):
        rejected_B = node_B < chain_length(proposal)
        return positive_part(rows_at(p_BxNxV, node_B), rows_at(q_BxNxV, node_B), rejected_B)


class StopsAtFirstFailure(verify.Block):
    def select(self, proposal, passed_BxN):
        return verify.Rejection().select(proposal, passed_BxN)


class ResidualIsP(verify.Rejection):
    """Draws from p again after a rejection (and so gives p a second chance)."""

    def residual(self, proposal, p_BxNxV, q_BxNxV, node_B):
        return rows_at(p_BxNxV, node_B)


class ResidualOfNextRow(verify.Rejection):
    def residual(self, proposal, p_BxNxV, q_BxNxV, node_B):
        return super().residual(proposal, p_BxNxV, jnp.roll(q_BxNxV, 1, axis=1), node_B)


class SharpenedQ(verify.Rejection):
    """The ratio test uses another q than the one sampled from."""

    def coins(self, proposal, p_BxNxV, q_BxNxV):
        q_BxNxV = q_BxNxV**2 / jnp.maximum((q_BxNxV**2).sum(-1, keepdims=True), 1e-9)
        return super().coins(proposal, p_BxNxV, q_BxNxV)


class ForgetsTheRoot(verify.Rejection):
    """Every coin is judged by the root's law."""

    def coins(self, proposal, p_BxNxV, q_BxNxV):
        p_BxNxV = jnp.broadcast_to(p_BxNxV[:, :1], p_BxNxV.shape)
        return jnp.minimum(chain_ratios(proposal, p_BxNxV, q_BxNxV), 1.0)


class AlwaysBonusFromP(verify.Rejection):
    """Drops a drafted token that the draft found unlikely and draws a bonus from p instead."""

    def coins(self, proposal, p_BxNxV, q_BxNxV):
        child_BxNx1 = jnp.roll(proposal.tokens_BxN, -1, axis=1)[..., None]
        kept_BxN = jnp.roll(jnp.take_along_axis(q_BxNxV, child_BxNx1, axis=-1)[..., 0] > 0.3, 1, axis=1)
        return jnp.where(kept_BxN, super().coins(proposal, p_BxNxV, q_BxNxV), 0.0)

    def residual(self, proposal, p_BxNxV, q_BxNxV, node_B):
        child_B = jnp.take_along_axis(jnp.roll(proposal.tokens_BxN, -1, axis=1), node_B[:, None], axis=1)
        dropped_B = jnp.take_along_axis(rows_at(q_BxNxV, node_B), child_B, axis=1)[:, 0] <= 0.3
        residual_BxV = super().residual(proposal, p_BxNxV, q_BxNxV, node_B)
        return jnp.where(dropped_B[:, None], rows_at(p_BxNxV, node_B), residual_BxV)


PLANTED = [
    NoScale,
    StopsAtFirstFailure,
    ResidualIsP,
    ResidualOfNextRow,
    SharpenedQ,
    ForgetsTheRoot,
    AlwaysBonusFromP,
]


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_enumeration_catches(rule):
    p, q = laws(("full", "full"))
    emitted, _ = testing.cycle_law(rule(), p, q, 3)
    assert testing.total_variation(emitted, testing.plain_law(p, 4)) > 1e-3


def filtered(logits, **options):
    """`sampling.law` of one row of logits."""
    rows = SamplingRows.create([SamplingParams(**options)], [0])
    return np.asarray(sampling.law(jnp.asarray(logits, jnp.float32)[None, None], rows))[0, 0].astype(np.float64)


def test_filters_stand_on_both_sides():
    """p=(.5,.3,.15,.05), top-p .8, q uniform: acceptance .5, or .875 with q filtered too; the law is p' in both."""
    p = filtered(np.log([0.5, 0.3, 0.15, 0.05]), top_p=0.8)
    half = np.array([0.5, 0.5, 0.0, 0.0])
    for rule in EXACT_RULES:
        for q, acceptance in ((np.full(4, 0.25), 0.5), (half, 0.875)):
            emitted, expected = testing.cycle_law(rule, lambda _: p, lambda _, q=q: q, 1)
            assert expected == pytest.approx(acceptance, abs=1e-5)
            assert testing.total_variation(emitted, testing.plain_law(lambda _: p, 2)) < EXACT
    # The planted bug: coins and residual by the unfiltered p.
    raw = np.array([0.5, 0.3, 0.15, 0.05])
    emitted, _ = testing.cycle_law(verify.Rejection(), lambda _: raw, lambda _: half, 1)
    assert testing.total_variation(emitted, testing.plain_law(lambda _: p, 2)) > 0.1


def test_enumeration_catches_an_argmax_draft_scored_with_a_soft_q():
    """p=(.4,.35,.05,.2), q=(.1,.1,.6,.2): judged by the soft q the law is (.5,.4167,.0833,0), as a point mass p."""
    p, q = (np.array(v) for v in ((0.4, 0.35, 0.05, 0.2), (0.1, 0.1, 0.6, 0.2)))

    def law_of(law):
        proposal = testing.chain_proposal_of([int(q.argmax())], jnp.asarray([q, q], jnp.float32), law)
        rule, p_rows = verify.Rejection(), jnp.asarray([[p, p]], jnp.float32)
        q_rows = verify.base.draft_law(proposal, 4)
        coin = float(rule.coins(proposal, p_rows, q_rows)[0, 1])
        residual = np.asarray(rule.residual(proposal, p_rows, q_rows, jnp.array([0], jnp.int32)))[0]
        return coin * np.eye(4)[q.argmax()] + (1 - coin) * residual / residual.sum()

    np.testing.assert_allclose(law_of(Law.POINT_MASS), p, atol=1e-6)
    np.testing.assert_allclose(law_of(Law.IID), (0.5, 0.41667, 0.08333, 0.0), atol=1e-4)


# --- edges of a single decision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", EXACT_RULES, ids=lambda rule: rule.name)
def test_an_impossible_token_is_never_accepted(rule, monkeypatch):
    """p(x) = 0 with a uniform of exactly 0, and q(x) = 0 without a division by zero."""
    monkeypatch.setattr(sampling, "uniforms", lambda seed, purpose, position, lane=None: jnp.zeros(position.shape))
    rows = SamplingRows.create([SamplingParams()], [0])
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log([[[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]]]), jnp.float32)
    q = jnp.asarray([[0.0, 0.5, 0.5], [0.0, 0.0, 0.0]], jnp.float32)
    proposal = testing.chain_proposal_of([0], q, Law.IID)
    accepted = rule.verify(proposal, logits, rows, jnp.array([3], jnp.int32))
    assert int(accepted.num_accepted_B[0]) == 0 and int(accepted.next_token_B[0]) != 0


@pytest.mark.parametrize("rule", EXACT_RULES, ids=lambda rule: rule.name)
def test_an_empty_residual_falls_back_to_p(rule):
    p = jnp.asarray([[[0.25, 0.75], [0.5, 0.5]]], jnp.float32)
    proposal = testing.chain_proposal_of([1], p[0], Law.IID)
    np.testing.assert_allclose(rule.residual(proposal, p, p, jnp.array([0], jnp.int32))[0], p[0, 0])


def test_typical_is_relaxed_and_greedy_rows_stay_greedy():
    rule = verify.Typical(epsilon=0.1, delta=0.5)
    assert not rule.exact and contract.Contract.of(rule, 0.7).promise == contract.Promise.RELAXED
    logits = jnp.log(jnp.asarray([[[0.05, 0.15, 0.8], [0.3, 0.3, 0.4]]], jnp.float32))
    for token, temperature, accepted in [(0, 1.0, 0), (1, 1.0, 1), (2, 1.0, 1), (1, 0.0, 0), (2, 0.0, 1)]:
        proposal = testing.chain_proposal_of([token], None, Law.POINT_MASS)
        rows = SamplingRows.create([SamplingParams(temperature=temperature)], [0])
        assert int(rule.verify(proposal, logits, rows, jnp.array([0], jnp.int32)).num_accepted_B[0]) == accepted
    with pytest.raises(ValueError, match="epsilon"):
        verify.Typical(epsilon=1.5)


def test_match_keeps_validity_and_depth():
    """A padded node that happens to equal the target's choice is not accepted."""
    rule = verify.Match()
    rows = SamplingRows.create([SamplingParams(temperature=0)], [0])
    logits = jnp.zeros((1, 4, 5)).at[:, :, 0].set(1.0)  # the target always says 0
    proposal = testing.chain_proposal_of([0, 0, 0], None, Law.POINT_MASS, valid=1)
    acceptance = rule.verify(proposal, logits, rows, jnp.array([0], jnp.int32))
    assert int(acceptance.num_accepted_B[0]) == 1
    np.testing.assert_array_equal(acceptance.path_BxP[0], [0, 1, 4, 4])


def test_match_walks_a_tree():
    tree = Tree((-1, 0, 0, 1, 1, 2))  # root; a, b; aa, ab, ba
    tokens = jnp.asarray([[0, 1, 2, 1, 2, 1]], jnp.int32)
    proposal = verify.base.Proposal(tokens, jnp.ones((1, 6), bool), None, tree, Law.POINT_MASS)
    logits = jax.nn.one_hot(jnp.asarray([[2, 0, 1, 0, 0, 4]]), 5)
    rows = SamplingRows.create([SamplingParams(temperature=0)], [0])
    acceptance = verify.Match().verify(proposal, logits, rows, jnp.array([0], jnp.int32))
    np.testing.assert_array_equal(acceptance.path_BxP[0], [0, 2, 5])
    assert int(acceptance.num_accepted_B[0]) == 2 and int(acceptance.next_token_B[0]) == 4


# --- the table of legal pairs -------------------------------------------------------------------------------------


def test_the_table_of_legal_pairs():
    assert verify.TABLE == {
        (law, name) for law in ("iid", "point_mass") for name in ("match", "rejection", "block", "typical")
    } | {("without_replacement", "match"), ("without_replacement", "typical")}


def test_illegal_pairs_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Siblings(PromptLookup):
        law = Law.WITHOUT_REPLACEMENT

    @dataclasses.dataclass(frozen=True)
    class Branches(PromptLookup):
        tree = Tree((-1, 0, 0))

    for rule in EXACT_RULES:
        with pytest.raises(ContractError, match=f"'{rule.name}' cannot judge proposals of law 'without_replacement'"):
            contract.check_pair(Siblings(), rule)
        with pytest.raises(ContractError, match="judges chains"):
            contract.check_pair(Branches(), rule)
    contract.check_pair(Siblings(), verify.Match())
    contract.check_pair(Branches(), verify.Match())
    contract.check_pair(DraftModel(testing.HistLM()), verify.Block())
