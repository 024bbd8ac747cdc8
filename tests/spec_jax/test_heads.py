"""Proposers with a head, on toy heads: same tokens, drafts as defined, a state that is a fresh prefill's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import Beam, ContractError, Decoder, Law, SamplingParams, Tree, drafting, testing, verify
from spec_jax.propose import Eagle, EagleHead, Medusa, MedusaHeads
from tests.spec_jax.test_decode import LEN, MIXED, PROMPTS, TOKENS, counts_of
from tests.toys import run_cycles, step

TREES = {
    "chain1": Tree.chain(1),
    "chain4": Tree.chain(4),
    "wide": Tree.branching((4,)),
    "ragged": Tree((-1, 0, 0, 0, 2, 1, 2, 4)),
    "beam": Beam(12, 4, 3),
}
HEADS = {"eagle": (Eagle, testing.HistEagle), "medusa": (Medusa, testing.HistMedusa)}
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=20)


@pytest.fixture(scope="module")
def hist():
    return testing.HistLM()


@pytest.fixture(scope="module")
def plain(hist):
    return Decoder(hist, **LEN)


def proposers():
    for kind, (make, _) in HEADS.items():
        for name, tree in TREES.items():
            for law in Law:
                if isinstance(tree, Beam) and law != Law.POINT_MASS:
                    continue
                yield pytest.param(make, kind, tree, law, id=f"{kind}-{name}-{law}")


def test_the_toys_are_heads():
    assert isinstance(testing.HistEagle(), EagleHead) and isinstance(testing.HistMedusa(), MedusaHeads)


@pytest.mark.parametrize(("make", "kind", "tree", "law"), list(proposers()))
def test_same_tokens_as_plain(hist, plain, make, kind, tree, law):
    head = HEADS[kind][1]()
    proposer = make(testing.Poisoned(head) if kind == "eagle" else head, tree, law)
    target = testing.Poisoned(hist)
    testing.assert_same_tokens(Decoder(target, proposer, **LEN), plain, PROMPTS, MIXED)
    # The rules that draw coins promise a law, and the same tokens where it is a point mass.
    rules = [verify.Recursive(), verify.Traversal()] if isinstance(tree, Tree) and not tree.is_chain else []
    rules += [verify.Rejection(), verify.Block()] if isinstance(tree, Tree) and tree.is_chain else []
    for rule in rules:
        if law in rule.laws:
            testing.assert_same_tokens(Decoder(target, proposer, rule, **LEN), plain, PROMPTS, GREEDY)


# --- drafts as defined --------------------------------------------------------------------------------------------


def hidden_of(head, features_N, tokens_N):
    """The toy EAGLE head's hidden states over slots 0..N by its definition."""
    kv = head.init_kv(1, len(tokens_N))
    positions_1xN = jnp.arange(len(tokens_N))[None]
    features = jnp.asarray(features_N, jnp.float32).reshape(1, -1, 1)
    hidden, _ = head.forward(head.params, features, jnp.asarray([tokens_N], jnp.int32), positions_1xN, kv, None)
    return np.asarray(hidden)[0, :, 0]


def taps_of(target, tokens):
    """A target's tap at every position of a text."""
    kv = target.init_kv(1, len(tokens))
    positions_1xN = jnp.arange(len(tokens))[None]
    _, (tap_1xNx1,), _ = target.forward(
        target.params, jnp.asarray([tokens], jnp.int32), positions_1xN, kv, None, taps=(1,)
    )
    return np.asarray(tap_1xNx1)[0, :, 0]


def eagle_ranks(target, head, text, path):
    """The head's tokens from the most likely on, behind a text and drafted tokens: one pass over all slots a step."""
    features = taps_of(target, text)[:-1].tolist()
    for depth in range(len(path) + 1):
        hidden = hidden_of(head, features, [*text[1:], *path[:depth]])
        features.append(hidden[-1])  # in place of the target's, which nobody knows yet
    logits = np.asarray(head.logits(head.params, jnp.asarray(hidden[-1:]).reshape(1, 1, 1)))[0, 0]
    return np.argsort(-logits, kind="stable")


def medusa_ranks(target, head, text, path):
    hidden = taps_of(target, text)[-2]
    logits = np.asarray(head.logits(head.params, jnp.full((1, 1), hidden)))[0, len(path)]
    return np.argsort(-logits, kind="stable")


@pytest.mark.parametrize("kind", HEADS)
def test_drafted_tokens_are_those_of_the_definition(hist, kind):
    """Every node is the token of its rank behind its own path, at the first cycle and after commits of any length."""
    make, make_head = HEADS[kind]
    ranks = {"eagle": eagle_ranks, "medusa": medusa_ranks}[kind]
    head, tree = make_head(), TREES["ragged"]
    decoder = Decoder(hist, make(head, tree), **LEN)
    state = run_cycles(decoder, PROMPTS, [])
    for speculate in (True, True, False, True):
        proposal, _ = decoder.plan.proposer.propose(head.params, state.proposer, state.context)
        tokens = np.asarray(proposal.tokens_BxN)
        for row, count in enumerate(np.asarray(state.num_tokens_B)):
            text = np.asarray(state.tokens_BxS)[row, :count].tolist()
            if count == 1:
                assert not np.asarray(proposal.valid_BxN)[row, 1:].any(), "no hidden state has been seen"
                continue
            assert np.asarray(proposal.valid_BxN)[row].all()
            for parent, children in enumerate(tree.children):
                path = [int(tokens[row, n]) for n in np.flatnonzero(tree.ancestors_NxN[parent]) if n]
                wanted = ranks(hist, head, text, path)[: len(children)]
                np.testing.assert_array_equal(tokens[row, list(children)], wanted)
        state = step(decoder, state, speculate)


@pytest.mark.parametrize("tree", ["chain4", "ragged", "beam"])
@pytest.mark.parametrize("kind", HEADS)
def test_the_state_is_that_of_a_fresh_prefill(hist, kind, tree):
    make, make_head = HEADS[kind]
    head = make_head()
    decoder = Decoder(hist, make(head, TREES[tree]), **LEN)
    state = run_cycles(decoder, PROMPTS, [True, True, False, True])
    texts = [np.asarray(state.tokens_BxS)[row, :n].tolist() for row, n in enumerate(np.asarray(state.num_tokens_B))]
    assert len(set(map(len, texts))) > 2
    fresh = run_cycles(decoder, texts, [])
    ours, theirs = state.proposer, fresh.proposer
    if kind == "medusa":
        np.testing.assert_array_equal(ours, theirs)
    else:
        np.testing.assert_array_equal(ours.hidden_BxE, theirs.hidden_BxE)
        for row, text in enumerate(texts):
            slots = slice(0, len(text) - 1)
            np.testing.assert_array_equal(ours.kv.keys[0][row, :, slots], theirs.kv.keys[0][row, :, slots])
    proposals = [decoder.plan.proposer.propose(head.params, s.proposer, s.context)[0] for s in (state, fresh)]
    jax.tree.map(np.testing.assert_array_equal, *proposals)


# --- sampled laws -------------------------------------------------------------------------------------------------


class MarkovEagle(testing.HistEagle):
    """A head whose law depends on the last token only."""

    def __init__(self, table_VxV, ids=None, vocab_size=None):
        self.vocab_size = vocab_size or len(table_VxV)
        self._ids = ids
        with np.errstate(divide="ignore"):
            self.params = jnp.asarray(np.log(np.asarray(table_VxV)), jnp.float32)

    def vocabulary(self, params):
        return None if self._ids is None else drafting.Vocabulary(jnp.asarray(self._ids), self.vocab_size)

    def forward(self, params, features_BxNxE, tokens_BxN, positions_BxN, kv, words_BxNxW):
        return tokens_BxN.astype(jnp.float32)[..., None], kv

    def logits(self, params, hidden_BxNxE):
        return params[hidden_BxNxE[..., 0].astype(jnp.int32)]


class TappedMarkov(testing.MarkovLM):
    def forward(self, params, tokens_BxN, positions_BxN, kv, words_BxNxW, taps=()):
        logits, _, kv = super().forward(params, tokens_BxN, positions_BxN, kv, words_BxNxW)
        return logits, (jnp.zeros((*tokens_BxN.shape, 1)),) * len(taps), kv


def table(seed, V=3):
    law = testing.random_laws(V, seed)
    return np.stack([law((token,)) for token in range(V)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("law", "rule"),
    [
        (Law.WITHOUT_REPLACEMENT, verify.Recursive()),
        (Law.IID, verify.Traversal()),
        (Law.TOP_AND_SAMPLE, verify.Recursive()),
        (Law.POINT_MASS, verify.Match()),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("known", [None, (0, 2)], ids=["all", "few"])
def test_chi_square(law, rule, known):
    """Whole sampled outputs have the target's law, also where the head knows only some of the tokens."""
    target_table, draft_table = table(1), table(2)
    if known is not None:
        draft_table = draft_table[:, list(known)]
    head = MarkovEagle(draft_table, known, vocab_size=3)
    tree = Tree.branching((2, 2))
    decoder = Decoder(TappedMarkov(target_table), Eagle(head, tree, law), rule, max_len=8, prefill_chunk=1)
    plain = testing.plain_law(lambda prefix: target_table[(0, *prefix)[-1]], TOKENS)
    assert testing.chi_square_p(counts_of(decoder, 25_000, 10), plain) > 1e-4


def test_a_small_vocabulary_is_spread_over_the_targets():
    ids = (1, 4, 6)
    head = MarkovEagle(np.tile([[0.2, 0.5, 0.3]], (8, 1)), ids, vocab_size=8)
    target = TappedMarkov(np.full((8, 8), 1 / 8))
    decoder = Decoder(target, Eagle(head, Tree.branching((2, 1)), Law.WITHOUT_REPLACEMENT), verify.Recursive(), **LEN)
    state = run_cycles(decoder, [[0, 3], [2, 2]], [], SamplingParams(temperature=1.0, seed=1))
    proposal, _ = decoder.plan.proposer.propose(head.params, state.proposer, state.context)
    assert np.isin(np.asarray(proposal.tokens_BxN)[:, 1:], ids).all()
    probs = np.asarray(proposal.draft_probs_BxNxV)[:, 0]
    np.testing.assert_allclose(probs[:, list(ids)], [[0.2, 0.5, 0.3]] * 2, rtol=1e-6)
    assert probs.sum() == pytest.approx(2.0)


# --- refusals -----------------------------------------------------------------------------------------------------


def test_refusals(hist):
    head = testing.HistEagle(vocab_size=7)
    with pytest.raises(ContractError, match="vocabulary of 7 tokens and the target has 11"):
        Decoder(hist, Eagle(head), **LEN)
    with pytest.raises(ValueError, match="5 tokens deep and there are 4 Medusa heads"):
        Medusa(testing.HistMedusa(), 5)
    with pytest.raises(ValueError, match="its law is 'point_mass'"):
        Eagle(head, Beam(8, 3, 2), Law.WITHOUT_REPLACEMENT)
    with pytest.raises(ContractError, match="rule 'recursive' judges static trees"):
        Decoder(hist, Eagle(testing.HistEagle(), Beam(8, 3, 2)), verify.Recursive(), **LEN)
    strange = testing.HistEagle()
    strange.target_fingerprint = "a" * 64
    named = testing.HistLM()
    named.fingerprint = "b" * 64
    with pytest.raises(ContractError, match="trained for another target"):
        Decoder(named, Eagle(strange), **LEN)
    named.fingerprint = "a" * 64
    Decoder(named, Eagle(strange), **LEN)
