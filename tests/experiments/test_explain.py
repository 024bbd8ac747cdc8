import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax as sj
from experiments import explain
from experiments.explain import Fate
from spec_jax import Law, Tree, decode, propose, sampling, verify
from spec_jax.growth import Beam
from spec_jax.propose.base import Proposal, Stateless
from spec_jax.testing import HistLM, MarkovLM
from spec_jax.tree import DynamicTree
from tests.toys import text_script

WIDE = Tree.branching((3, 2))


@dataclasses.dataclass(frozen=True)
class Fixed(Stateless):
    """Drafts the same tree of a point mass in every cycle."""

    tokens: tuple[int, ...]
    tree: Any
    valid: tuple[bool, ...] | None = None
    parents: tuple[int, ...] | None = None

    law = Law.POINT_MASS

    def propose(self, params, state, context):
        tokens_BxN = jnp.asarray([self.tokens]).at[:, 0].set(context.root_B)
        valid_BxN = jnp.asarray([self.valid or (True,) * self.tree.size])
        parents_BxN = None if self.parents is None else jnp.asarray([self.parents])
        return Proposal(tokens_BxN, valid_BxN, None, self.tree, self.law, parents_BxN), state


@pytest.fixture(scope="module")
def sure():
    """A target that writes 2 behind 0, 5 behind 2 and 6 behind 5; what it does elsewhere must not matter."""
    table = np.full((8, 8), 1 / 8)
    for last, token in ((0, 2), (2, 5), (5, 6)):
        table[last] = np.eye(8)[token]
    return MarkovLM(table)


def cycles(decoder, params, prompt=(3, 0)):
    """Explains every cycle of a text, and holds each to the cycle that is taken then."""
    request = decoder.request([list(prompt)], params)
    state = decode.prefill(decoder.plan, decoder.params, decoder.start(request))
    found = []
    while int(state.status_B[0]) == 0:
        cycle = explain.explain(decoder.plan, decoder.params, state)
        count, accepted = int(state.num_tokens_B[0]), int(state.counters.accepted_B[0])
        state = decode.step(decoder.plan, decoder.params, state)
        emitted = [token.id for token in cycle.emitted]
        assert emitted == np.asarray(state.tokens_BxS)[0, count : int(state.num_tokens_B[0])].tolist()
        assert cycle.num_accepted == int(state.counters.accepted_B[0]) - accepted
        path = [n for n in cycle.nodes if n.fate == Fate.ACCEPTED]
        assert [n.parent for n in path] == [0, *(n.number for n in path)][: len(path)]
        extra = [cycle.extra.token.id] if cycle.extra else []
        assert [n.token.id for n in path] + extra == emitted
        assert cycle.number == int(state.counters.cycles_B[0])
        found.append(cycle)
    return found


def first(target, proposer, rule, **params):
    """The first cycle of a target and a proposer that need no prefill."""
    params = sj.SamplingParams(**{"temperature": 1.0, "seed": 0, "max_new_tokens": 8} | params)
    decoder = sj.Decoder(target, proposer, rule, max_len=32)
    return explain.explain(decoder.plan, decoder.params, decoder.start(decoder.request([[3, 0]], params)))


#  root 0 -> 1 (4, 5), 2 (4, 5), 3 (4, 5)
TOKENS = (0, 1, 2, 3, 4, 5, 4, 5, 4, 5)
BELOW, UNTESTED = "below a rejected node", "below a node that was not tested"
ELDER, DREW_2 = "an elder sibling was accepted", "the target drew <token 2> here"
LOST = "rejected: coin 0 lost"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("rule", "reasons"),
    [
        (verify.Match(), [DREW_2, "accepted", DREW_2, BELOW, BELOW, "the target drew <token 5> here", "accepted"]),
        (verify.Typical(), ["not typical", "accepted", "not typical", BELOW, BELOW, "not typical", "accepted"]),
        (verify.Recursive(), [LOST, "accepted", ELDER, BELOW, BELOW, LOST, "accepted"]),
        (verify.Traversal(), [LOST, "accepted", ELDER, LOST, LOST, LOST, "accepted"]),
    ],
)
def test_fates_of_a_tree(sure, rule, reasons, temperature):
    cycle = first(sure, Fixed(TOKENS, WIDE), rule, temperature=temperature)
    last = [UNTESTED if rule.name in ("recursive", "traversal") else BELOW] * 2
    assert [node.reason for node in cycle.nodes[1:]] == reasons + last
    assert [node.number for node in cycle.nodes if node.fate == Fate.ACCEPTED] == [2, 7]
    refused = {DREW_2, "the target drew <token 5> here", "not typical", LOST}
    assert all((node.fate == Fate.REJECTED) == (node.reason in refused) for node in cycle.nodes)
    assert (cycle.extra.kind, cycle.extra.parent, cycle.extra.token.id) == ("bonus", 7, 6)
    assert (cycle.num_valid, cycle.num_accepted, cycle.finish_reason) == (9, 2, None)
    assert cycle.before == "3" and cycle.law == "point_mass"


@pytest.mark.parametrize("rule", [verify.Rejection(), verify.Block()])
def test_fates_of_a_chain(sure, rule):
    cycle = first(sure, Fixed((0, 2, 5, 1, 4), Tree.chain(4)), rule)
    below = {"rejection": BELOW, "block": LOST}[rule.name]  # Block tosses the coin of every node, the last one first.
    assert [node.reason for node in cycle.nodes[1:]] == ["accepted", "accepted", LOST, below]
    assert (cycle.extra.kind, cycle.extra.parent, cycle.extra.target_prob) == ("correction", 2, 1.0)


@pytest.mark.parametrize("rule", [verify.Match(), verify.Typical()])
def test_a_tree_grown_from_data(sure, rule):
    tokens, valid = (0, 2, 1, 5, 0), (True, True, True, True, False)
    cycle = first(sure, Fixed(tokens, DynamicTree(5, 3), valid, (-1, 0, 0, 1, 0)), rule)
    assert [node.fate for node in cycle.nodes[1:]] == ["accepted", "rejected", "accepted", "invalid"]
    assert [node.parent for node in cycle.nodes] == [None, 0, 0, 1, 0]
    assert cycle.num_valid == 3


def test_equal_siblings_of_which_one_is_kept(sure):
    tree = Tree((-1, 0, 0, 1, 2))
    cycle = first(sure, Fixed((0, 2, 2, 5, 5), tree), verify.Match())
    assert [node.reason for node in cycle.nodes[1:]] == ["accepted", "passed, but another path was kept"] * 2


@pytest.mark.parametrize(
    ("params", "fates", "finish"),
    [
        ({"max_new_tokens": 1}, ["accepted", "cut", "rejected"], "length"),
        ({"max_new_tokens": 2}, ["accepted", "accepted", "rejected"], "length"),
        ({"stop_token_ids": (2,)}, ["accepted", "cut", "rejected"], "stop"),
    ],
)
def test_what_a_stop_or_the_budget_cuts_off(sure, params, fates, finish):
    cycle = first(sure, Fixed((0, 2, 5, 1), Tree.chain(3)), verify.Recursive(), **params)
    assert [node.fate for node in cycle.nodes[1:]] == fates
    assert cycle.extra is None and cycle.finish_reason == finish


def test_logits_that_are_no_numbers():
    table = np.full((8, 8), 1 / 8)
    table[0], table[2] = np.eye(8)[2], np.nan
    cycle = first(MarkovLM(table), Fixed((0, 2, 5), Tree.chain(2)), verify.Match())
    assert [node.fate for node in cycle.nodes[1:]] == ["accepted", "rejected"]
    assert cycle.nodes[2].target_prob is None and cycle.extra is None and cycle.finish_reason == "error"


TARGET, DRAFT = HistLM(11, seed=0, sharpness=1.0), HistLM(11, seed=1, sharpness=0.5)
LAWS = [Law.IID, Law.WITHOUT_REPLACEMENT, Law.TOP_AND_SAMPLE, Law.POINT_MASS]


def law_behind(model, tokens, params):
    """The law of the next token, by a forward pass over the whole text."""
    tokens_1xN = jnp.asarray([tokens])
    positions_1xN = jnp.arange(len(tokens))[None, :]
    logits, _, _ = model.forward(model.params, tokens_1xN, positions_1xN, model.init_kv(1, 64), None)
    return np.asarray(sampling.law(logits[:, -1:], sampling.SamplingRows.create([params], [0])))[0, 0]


@pytest.mark.parametrize("law", LAWS)
def test_probabilities_are_those_of_the_laws(law):
    params = sj.SamplingParams(temperature=0.9, top_k=5, seed=3, max_new_tokens=12)
    decoder = sj.Decoder(TARGET, propose.DraftModel(DRAFT, WIDE, law), verify.Recursive(), max_len=32)
    prompt = [1, 2, 3]
    for cycle in cycles(decoder, params, prompt)[:2]:
        for node in cycle.nodes[1:]:
            path, above = [], node.parent
            while above:
                path, above = [cycle.nodes[above].token.id, *path], cycle.nodes[above].parent
            token = node.token.id
            assert node.target_prob == pytest.approx(law_behind(TARGET, prompt + path, params)[token], abs=1e-6)
            q = law_behind(DRAFT, prompt + path, params)
            if law == Law.POINT_MASS:
                assert node.draft_prob is None
            elif law != Law.TOP_AND_SAMPLE:
                assert node.draft_prob == (pytest.approx(q[token], abs=1e-6) if q[token] else None)
            elif node.number != min(n.number for n in cycle.children(node.parent)):
                assert node.draft_prob is None  # One of the draft's most likely tokens: chosen, not drawn.
        prompt = prompt + [token.id for token in cycle.emitted]


@pytest.mark.parametrize("rule", [verify.Recursive(), verify.Traversal(), verify.Typical(), verify.Match()])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_cycle_of_a_text(rule, temperature):
    proposer = propose.DraftModel(TARGET, Tree.branching((2, 2)), Law.WITHOUT_REPLACEMENT)
    decoder = sj.Decoder(TARGET, proposer, rule, max_len=64)
    params = sj.SamplingParams(temperature=temperature, seed=5, max_new_tokens=24)
    for cycle in cycles(decoder, params):
        for node in cycle.nodes[1:]:
            if node.fate == Fate.REJECTED and node.coin is not None:
                assert node.toss >= node.coin
            if node.fate == Fate.ACCEPTED and rule.name == "recursive":
                assert node.toss < node.coin
            if node.fate == Fate.ACCEPTED and rule.name == "match":
                assert cycle.nodes[node.parent].drawn == node.token
            assert node.fate != Fate.INVALID


@pytest.mark.parametrize("proposer", [propose.DraftModel(DRAFT, Beam(8, 3, 3), Law.POINT_MASS), propose.Plain()])
def test_grown_trees_and_plain_decoding(proposer):
    decoder = sj.Decoder(TARGET, proposer, verify.Match(), max_len=32)
    found = cycles(decoder, sj.SamplingParams(temperature=1.0, seed=1, max_new_tokens=8))
    assert {len(cycle.nodes) for cycle in found} == {proposer.tree.size}
    assert found[0].nodes[0].fate == Fate.ROOT


def test_the_state_stays_and_an_ended_row_is_refused(sure):
    decoder = sj.Decoder(sure, Fixed((0, 2), Tree.chain(1)), verify.Match(), max_len=8)
    state = decoder.start(decoder.request([[3, 0]], sj.SamplingParams(seed=0, max_new_tokens=2)))
    state = decode.prefill(decoder.plan, decoder.params, state)
    before = jax.device_get(state)
    explain.explain(decoder.plan, decoder.params, state)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state))
    state = decode.step(decoder.plan, decoder.params, state)
    with pytest.raises(ValueError, match="row 0 has ended .length.: there is no next cycle"):
        explain.explain(decoder.plan, decoder.params, state)


def test_texts_of_tokens():
    target = text_script(b"abc")
    assert explain.token_of(target, ord("a")) == explain.Token(97, "'a'")
    assert explain.token_of(target, ord("\n")).text == "'\\n'"
    assert explain.token_of(target, 0xE2).text == "b'\\xe2'"
    assert explain.token_of(MarkovLM(np.eye(2)), 1).text == "<token 1>"


def test_shares_never_look_like_certainty():
    values = {0.0: "0", 1.0: "1", 0.0001: "<.01", 0.9999: ">.99", 0.314: ".31", 0.5: ".50"}
    assert {value: explain.share(value) for value in values} == values
