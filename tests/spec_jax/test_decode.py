"""Whole decoders on toys: same tokens with and without speculation, budgets, stops, streams, errors, programs."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import ContractError, Decoder, Law, Promise, SamplingParams, Tree, decode, sampling, testing, verify
from spec_jax.propose import Context, DraftModel, PromptLookup, Proposal, Stateless, Synthetic
from spec_jax.sampling import SamplingRows
from spec_jax.tree import DynamicTree
from tests.toys import run_cycles, step, text_script

PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 7, 8, 9, 1, 2, 3, 4], [0, 0, 0]]
MIXED = [
    SamplingParams(temperature=0.0, max_new_tokens=23),
    SamplingParams(temperature=0.7, seed=5, max_new_tokens=17),
    SamplingParams(temperature=1.3, seed=2**63 + 1, top_p=0.8, max_new_tokens=9),
    SamplingParams(temperature=1.0, seed=5, top_k=3, min_p=0.1, max_new_tokens=30),
]
LEN = {"max_len": 48, "prefill_chunk": 4}


@pytest.fixture(scope="module")
def hist():
    return testing.HistLM()


@pytest.fixture(scope="module")
def plain(hist):
    return Decoder(hist, **LEN)


# --- same seed, same tokens ---------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("kind", ["prompt_lookup", "branching_lookup", "own_draft", "other_draft", "greedy_draft"])
def test_match_gives_plain_tokens_for_the_same_seed(hist, plain, kind, length):
    proposer = {
        "prompt_lookup": lambda: PromptLookup(length, max_ngram=2),
        "branching_lookup": lambda: PromptLookup(length, max_ngram=2, branches=(2, 1)),
        "own_draft": lambda: DraftModel(hist, length),
        "other_draft": lambda: DraftModel(testing.HistLM(seed=3, sharpness=1.0), length),
        "greedy_draft": lambda: DraftModel(hist, length, Law.POINT_MASS),
    }[kind]()
    testing.assert_same_tokens(Decoder(hist, proposer, **LEN), plain, PROMPTS, MIXED)


def test_match_on_a_real_transformer_with_poisoned_scratch():
    target = testing.TinyTransformer()
    draft = testing.Poisoned(testing.TinyTransformer(seed=1, layers=1), 1e4)
    plain = Decoder(target, **LEN)
    for proposer in (DraftModel(draft, 3), DraftModel(testing.Poisoned(target), 4), PromptLookup()):
        testing.assert_same_tokens(Decoder(testing.Poisoned(target), proposer, **LEN), plain, PROMPTS, MIXED)


def test_tokens_do_not_depend_on_batch_or_slot(hist, plain):
    decoder = Decoder(hist, DraftModel(testing.HistLM(seed=3), 3), verify.Rejection(), **LEN)
    for maker in (plain, decoder):
        alone = [maker.generate([prompt], params)[0].tokens for prompt, params in zip(PROMPTS, MIXED, strict=True)]
        for order in [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0)]:
            batch = maker.generate([PROMPTS[i] for i in order], [MIXED[i] for i in order])
            assert [r.tokens for r in batch] == [alone[i] for i in order]


def test_ragged_acceptance_keeps_every_row_at_its_own_position():
    """Rows forced to accept 0, 2 and 4 of 4 write the text of the script at their own positions."""
    script = np.random.default_rng(0).integers(0, 50, 40)
    target = testing.ScriptLM(script.tolist(), 50)
    prompts = [script[:n].tolist() for n in (2, 5, 3)]
    spoiled = []
    for depth in (0, 2, 4):  # a reference that is wrong from `depth` on, cycle after cycle
        reference = script.copy()
        if depth < 4:
            start = len(prompts[len(spoiled)])
            reference[[i for i in range(len(script)) if i >= start and (i - start) % (depth + 1) == depth]] += 1
        spoiled.append(reference.tolist())
    decoder = Decoder(target, Synthetic(spoiled, [1.0] * 4), **LEN)
    state = run_cycles(decoder, prompts, [True] * 4)
    np.testing.assert_array_equal(state.num_tokens_B, [2 + 4, 5 + 12, 3 + 20])
    for row, count in enumerate(np.asarray(state.num_tokens_B)):
        np.testing.assert_array_equal(state.tokens_BxS[row, :count], script[:count])


# --- the law of sampled speculation -------------------------------------------------------------------------------

V, TOKENS = 3, 4


def markov(seed, support="full"):
    law = testing.random_laws(V, seed, support)
    return np.stack([law((token,)) for token in range(V)])


def counts_of(decoder, rows, calls, tokens=TOKENS, **options):
    """Joint counts of the first tokens after prompt [0], over seeds that never repeat."""
    params = SamplingParams(seed=0, max_new_tokens=tokens, **options)
    request = decoder.request([[0]] * rows, params)
    counts = {}
    for call in range(calls):
        state = decoder.start(dataclasses.replace(request, seeds=range(call * rows, (call + 1) * rows)))
        state = decode.prefill(decoder.plan, decoder.params, state)
        state = decode.run(decoder.plan, decoder.params, state)
        keys, numbers = np.unique(np.asarray(state.tokens_BxS[:, 1 : 1 + tokens]), axis=0, return_counts=True)
        for key, number in zip(map(tuple, keys.tolist()), numbers.tolist(), strict=True):
            counts[key] = counts.get(key, 0) + number
    return counts


def p_value(target_table, draft_table, rule, *, tree=3, law=Law.IID, samples=400_000, rows=50_000):
    """chi-square of whole outputs, which take several consecutive cycles, against plain decoding's exact law."""
    target, draft = testing.MarkovLM(target_table), testing.MarkovLM(draft_table)
    decoder = Decoder(target, DraftModel(draft, tree, law), rule, max_len=8, prefill_chunk=1)
    plain = testing.plain_law(lambda prefix: target_table[(0, *prefix)[-1]], TOKENS)
    return testing.chi_square_p(counts_of(decoder, rows, samples // rows), plain)


@pytest.mark.slow
@pytest.mark.parametrize("supports", [("full", "full"), ("low", "high"), ("full", "low")], ids="-".join)
@pytest.mark.parametrize("rule", [verify.Match(), verify.Rejection(), verify.Block()], ids=lambda rule: rule.name)
def test_chi_square_over_consecutive_cycles(rule, supports):
    p, q = markov(1, supports[0]), markov(2, supports[1])
    assert abs(p - q).max() > 0.1
    assert p_value(p, q, rule) > 1e-4


TREES = {"2,2": Tree.branching((2, 2)), "3,2": Tree.branching((3, 2)), "ragged": Tree((-1, 0, 0, 0, 2, 1, 2, 4))}
TREE_RULES = [verify.Match(), verify.Recursive(), verify.Traversal()]


@pytest.mark.slow
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("law", list(Law))
@pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: rule.name)
def test_chi_square_of_trees(rule, law, tree):
    assert p_value(markov(1), markov(2), rule, tree=TREES[tree], law=law, rows=25_000) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: rule.name)
def test_chi_square_of_a_tree_wider_than_the_support_of_the_draft(rule):
    """Siblings beyond the draft's support are chosen, and judged as chosen."""
    tree = Tree.branching((3, 1))
    assert p_value(markov(1), markov(2, "low"), rule, tree=tree, law=Law.WITHOUT_REPLACEMENT, rows=25_000) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rule", [verify.Rejection(), verify.Block()], ids=lambda rule: rule.name)
def test_chi_square_of_an_argmax_draft(rule):
    assert p_value(markov(1), markov(2), rule, law=Law.POINT_MASS) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rule", [verify.Match(), verify.Rejection(), verify.Block()], ids=lambda rule: rule.name)
def test_chi_square_with_filters(rule):
    """Temperature and top-p stand on both sides: the law is that of plain filtered sampling."""
    options = {"temperature": 0.8, "top_p": 0.9}
    p = markov(1)
    rows = SamplingRows.create([SamplingParams(**options)], [0])
    kept = np.asarray(sampling.law(jnp.asarray(np.log(p), jnp.float32)[None], rows))[0].astype(np.float64)
    assert (kept == 0).any() and abs(kept - p).max() > 0.05
    draft = testing.MarkovLM(markov(2))
    decoder = Decoder(testing.MarkovLM(p), DraftModel(draft, 3), rule, max_len=8, prefill_chunk=1)
    law = testing.plain_law(lambda prefix: kept[(0, *prefix)[-1]], TOKENS)
    assert testing.chi_square_p(counts_of(decoder, 50_000, 4, **options), law) > 1e-4


def planted(monkeypatch, remap):
    """Noise whose (purpose, position, lane) are remapped by a bug."""
    honest = sampling.uniforms

    def uniforms(seed, purpose, position, lane=None):
        lane = jnp.zeros_like(position) if lane is None else lane
        return honest(seed, *remap(purpose, position, lane))

    monkeypatch.setattr(sampling, "uniforms", uniforms)


NOISE_BUGS = {
    "accept and residual share a number": lambda purpose, position, lane: (
        (sampling.Purpose.ACCEPT, position, jnp.ones_like(lane))
        if purpose == sampling.Purpose.RESIDUAL
        else (purpose, position, lane)
    ),
    "draft and accept share a key": lambda purpose, position, lane: (
        (sampling.Purpose.ACCEPT, position, lane + 1)
        if purpose == sampling.Purpose.DRAFT
        else (purpose, position, lane)
    ),
    "every cycle meets the same numbers": lambda purpose, position, lane: (purpose, jnp.zeros_like(position), lane),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", NOISE_BUGS)
def test_chi_square_catches(monkeypatch, bug):
    planted(monkeypatch, NOISE_BUGS[bug])
    assert p_value(markov(1), markov(2), verify.Rejection()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["draft and accept share a key", "siblings share a number"])
def test_chi_square_of_trees_catches(monkeypatch, bug):
    def one_number(purpose, position, lane):
        return purpose, position, jnp.zeros_like(lane) if purpose == sampling.Purpose.DRAFT else lane

    planted(monkeypatch, NOISE_BUGS.get(bug, one_number))
    p = p_value(markov(1), markov(2), verify.Recursive(), tree=TREES["2,2"], law=Law.WITHOUT_REPLACEMENT, rows=25_000)
    assert p < 1e-6


@pytest.mark.slow
def test_chi_square_catches_block_noise_keyed_by_token_position(monkeypatch):
    """Block verification looks at coins beyond the token it commits; meeting them again next cycle is biased."""
    planted(
        monkeypatch,
        lambda purpose, position, lane: (
            (purpose, position + lane, jnp.zeros_like(lane))
            if purpose == sampling.Purpose.ACCEPT
            else (purpose, position, lane)
        ),
    )
    assert p_value(markov(1), markov(2), verify.Block()) < 1e-6


@pytest.mark.slow
def test_chi_square_catches_a_draft_that_lies_about_its_law():
    """An argmax draft recorded as if it had been sampled from q."""

    class Liar(DraftModel):
        def propose(self, params, kv, context):
            proposal, kv = super().propose(params, kv, context)
            argmax = jnp.argmax(proposal.draft_probs_BxNxV, axis=-1)[:, :1].astype(jnp.int32)
            tokens = jnp.concatenate([proposal.tokens_BxN[:, :1], argmax], axis=1)
            return dataclasses.replace(proposal, tokens_BxN=tokens), kv

    target = testing.MarkovLM(markov(1))
    decoder = Decoder(target, Liar(testing.MarkovLM(markov(2)), 1), verify.Rejection(), max_len=8, prefill_chunk=1)
    law = testing.plain_law(lambda prefix: markov(1)[(0, *prefix)[-1]], TOKENS)
    assert testing.chi_square_p(counts_of(decoder, 20_000, 1), law) < 1e-6


def test_same_seed_equality_catches_a_match_rule_that_draws_again(hist, plain):
    """The draw that rejects must be the token emitted; a fresh draw is another token."""

    class DrawsAgain(verify.Match):
        def verify(self, proposal, logits, rows, root):
            made = super().verify(proposal, logits, rows, root)
            again = super().verify(proposal, logits, rows, root + 1000)
            return verify.Acceptance(made.path_BxP, made.num_accepted_B, again.next_token_B)

    decoder = Decoder(hist, DraftModel(testing.HistLM(seed=3), 2), DrawsAgain(), **LEN)
    with pytest.raises(AssertionError, match="with speculation"):
        testing.assert_same_tokens(decoder, plain, PROMPTS, MIXED)


def test_same_seed_equality_catches_a_match_rule_without_validity(hist, plain):
    class IgnoresValidity(verify.Match):
        def verify(self, proposal, logits, rows, root):
            all_valid = jnp.ones_like(proposal.valid_BxN)
            made = verify.base.Proposal(proposal.tokens_BxN, all_valid, None, proposal.tree, proposal.law)
            return super().verify(made, logits, rows, root)

    class Padded(PromptLookup):
        """Counts nothing as drafted, but holds the padding the target may happen to predict."""

        may_abstain = False

        def propose(self, params, state, context):
            proposal, state = super().propose(params, state, context)
            root_only = jnp.arange(proposal.tree.size)[None, :] == jnp.zeros_like(proposal.tokens_BxN)
            tokens = jnp.where(root_only, proposal.tokens_BxN, 0)
            return type(proposal)(tokens, root_only, None, self.tree, self.law), state

    honest = Decoder(hist, Padded(), **LEN).generate(PROMPTS, MIXED).stats
    assert honest.accepted == 0
    assert Decoder(hist, Padded(), IgnoresValidity(), **LEN).generate(PROMPTS, MIXED).stats.accepted > 0


# --- budgets and stops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3])
def test_exactly_as_many_tokens_as_asked(hist, plain, length):
    """For every budget up to 2K+3 and every forced acceptance."""
    prompt = [3, 1, 4]
    reference = plain.generate([prompt], SamplingParams(temperature=0.0, max_new_tokens=20))[0].tokens
    for depth in range(length + 1):
        acceptance = [1.0] * depth + [0.0] * (length - depth)
        decoder = Decoder(hist, Synthetic([prompt + reference], acceptance), **LEN)
        for budget in range(2 * length + 4):
            (result,) = decoder.generate([prompt], SamplingParams(temperature=0.0, max_new_tokens=budget))
            assert result.tokens == reference[:budget] and result.finish_reason == "length"
            assert result.stats.tokens == budget


def test_a_budget_of_nothing_runs_no_model(hist, monkeypatch):
    monkeypatch.setattr(decode, "prefill", None)
    monkeypatch.setattr(decode, "run", None)
    (result,) = Decoder(hist, **LEN).generate([[1]], SamplingParams(max_new_tokens=0))
    assert result.tokens == [] and result.finish_reason == "length"


@pytest.mark.parametrize("depth", range(6))
def test_eos_anywhere_in_an_accepted_run(depth):
    script = list(range(10, 30))
    target = testing.ScriptLM(script, 64)
    target.eos_token_ids = (script[2 + depth],)
    for acceptance in ([1.0] * 5, [0.0] * 5):
        decoder = Decoder(target, Synthetic([script], acceptance), **LEN)
        (result,) = decoder.generate([script[:2]], SamplingParams(temperature=0.0, max_new_tokens=9))
        assert result.tokens == script[2 : 3 + depth] and result.finish_reason == "stop"
        (result,) = decoder.generate([script[:2]], SamplingParams(temperature=0.0, max_new_tokens=9, ignore_eos=True))
        assert result.tokens == script[2:11] and result.finish_reason == "length"


def test_a_text_ends_at_the_buffer_and_writes_nothing_beyond(hist):
    prompt = list(np.random.default_rng(0).integers(0, 11, 30))
    plain = Decoder(hist, max_len=32, prefill_chunk=8)
    params = SamplingParams(temperature=0.0, max_new_tokens=9)
    for proposer in (None, PromptLookup(5), DraftModel(hist, 5)):
        decoder = Decoder(hist, proposer, max_len=32, prefill_chunk=8)
        (result,) = decoder.generate([prompt], params)
        assert len(result.tokens) == 2 and result.finish_reason == "length"
        testing.assert_same_tokens(decoder, plain, [prompt, prompt[:29], prompt[:5]], params)


def test_finished_and_idle_rows_never_change(hist):
    decoder = Decoder(hist, DraftModel(hist, 3), **LEN)
    params = [SamplingParams(temperature=0.0, max_new_tokens=n) for n in (0, 30, 5, 0)]
    state = run_cycles(decoder, PROMPTS, [True] * 2, params)
    frozen = jax.device_get(state)
    for _ in range(3):
        state = step(decoder, state)
    for row in (0, 2, 3):
        np.testing.assert_array_equal(state.tokens_BxS[row], frozen.tokens_BxS[row])
        assert int(state.num_tokens_B[row]) == int(frozen.num_tokens_B[row])
    alone = Decoder(hist, **LEN).generate([PROMPTS[1]], params[1])[0].tokens
    np.testing.assert_array_equal(
        state.tokens_BxS[1, 1 : int(state.num_tokens_B[1])], alone[: int(state.num_tokens_B[1]) - 1]
    )


def test_a_nan_row_ends_with_an_error_and_its_mates_do_not_notice(hist, plain):
    class Sick(testing.HistLM):
        """Token 4 makes the logits of its row NaN."""

        def forward(self, params, tokens, positions, kv, words, taps=()):
            logits, taps, kv = super().forward(params, tokens, positions, kv, words, taps)
            return jnp.where((tokens == 4)[..., None], jnp.nan, logits), taps, kv

    params = SamplingParams(temperature=0.0, max_new_tokens=6)
    healthy = plain.generate(PROMPTS, params)
    assert any(4 not in result.tokens for result in healthy), "the test needs a healthy mate"
    for proposer in (None, PromptLookup(3)):
        results = Decoder(Sick(), proposer, **LEN).generate(PROMPTS, params)
        for prompt, sick, well in zip(PROMPTS, results, healthy, strict=True):
            roots = [prompt[-1], *well.tokens[:-1]]
            # What plain decoding gives: everything up to the root behind which there is no law.
            until = roots.index(4) if 4 in roots else len(roots)
            assert sick.tokens == well.tokens[:until]
            assert sick.finish_reason == ("error" if 4 in roots else "length")


@pytest.mark.parametrize("rule", [verify.Match(), verify.Rejection(), verify.Block()], ids=lambda rule: rule.name)
def test_a_draft_without_a_law_proposes_nothing(hist, rule):
    class Lost(testing.HistLM):
        def forward(self, params, tokens, positions, kv, words, taps=()):
            logits, taps, kv = super().forward(params, tokens, positions, kv, words, taps)
            return jnp.full_like(logits, jnp.nan), taps, kv

    results = Decoder(hist, DraftModel(Lost(), 3), rule, **LEN).generate(PROMPTS, MIXED)
    assert {result.finish_reason for result in results} == {"length"}
    # The law of a greedy row is its argmax, whatever the logits are.
    assert [result.stats.drafted > 0 for result in results] == [True, False, False, False]


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_logits_without_a_law_are_an_error(value):
    class Sick(testing.HistLM):
        def forward(self, params, tokens, positions, kv, words, taps=()):
            logits, taps, kv = super().forward(params, tokens, positions, kv, words, taps)
            return jnp.full_like(logits, value), taps, kv

    (result,) = Decoder(Sick(), **LEN).generate([[1, 2]], SamplingParams(seed=1))
    assert result.finish_reason == "error" and result.tokens == []


# --- text and streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stops"),
    [
        ("Grüße, 🌍! Done.", ()),
        ("A \ufffd stays", ()),
        ("one two STOP three", ("STOP",)),
        ("one STO two STO", ("STOP",)),
        ("aab🌍c", ("🌍c", "zz")),
        ("no stop here", ("here!",)),
    ],
)
@pytest.mark.parametrize("length", [1, 3])
def test_streamed_text_is_the_whole_text(text, stops, length):
    """Multi-byte characters and stop strings split over cycles in every way."""
    prompt, data = b"> ", text.encode()
    target = text_script(prompt + data)
    wanted = min((text.split(s)[0] for s in stops if s in text), key=len, default=text)
    params = SamplingParams(temperature=0.0, max_new_tokens=len(data), stop=stops)
    reference = list((prompt + data).ljust(64, b"\0"))
    for depth, proposer in [(0, None), *((d, d) for d in range(length + 1))]:
        if proposer is not None:
            proposer = Synthetic([reference], [1.0] * depth + [0.0] * (length - depth))
        decoder = Decoder(target, proposer, max_len=64, prefill_chunk=4)
        pieces = list(decoder.stream("> ", params))
        (result,) = decoder.generate(["> "], params)
        assert "".join(pieces) == result.text == wanted
        assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
        stopped = wanted != text
        assert result.finish_reason == ("stop" if stopped else "length")
        assert bytes(result.tokens).startswith(wanted.encode()) and result.stats.tokens == len(result.tokens)
        if stopped:
            assert any(bytes(result.tokens).endswith(s.encode()) for s in stops)


def test_an_unfinished_character_at_the_end_is_shown_as_such():
    target = text_script(b"> " + "é".encode()[:1] + b"x")
    decoder = Decoder(target, max_len=16, prefill_chunk=4)
    params = SamplingParams(temperature=0.0, max_new_tokens=1)
    assert list(decoder.stream("> ", params)) == ["\ufffd"]
    assert decoder.generate(["> "], params)[0].text == "\ufffd"


# --- results, programs, errors ------------------------------------------------------------------------------------


def test_results_say_what_they_promise_and_a_drawn_seed_reproduces(hist):
    decoder = Decoder(hist, PromptLookup(), **LEN)
    greedy, drawn = decoder.generate(PROMPTS[:2], [MIXED[0], SamplingParams(max_new_tokens=20)])
    assert greedy.contract.promise == Promise.GREEDY_IDENTICAL and drawn.contract.promise == Promise.EXACT_SAMPLING
    again = decoder.generate([PROMPTS[1]], SamplingParams(max_new_tokens=20, seed=drawn.seed))[0]
    assert again.tokens == drawn.tokens and again.text is None
    relaxed = Decoder(hist, PromptLookup(), verify.Typical(), **LEN).generate(PROMPTS[:1], MIXED[0])[0]
    assert relaxed.contract.promise == Promise.RELAXED and "epsilon=0.09" in relaxed.contract.rule
    assert decoder.generate([]) == []


@pytest.mark.smoke
def test_nothing_compiles_after_warm_up(hist):
    """Ragged prompts, parameters, stops and acceptance are data."""
    decoder = Decoder(hist, DraftModel(testing.HistLM(seed=3), 3), **LEN)
    decoder.generate(PROMPTS, MIXED)
    sizes = decode.prefill._cache_size(), decode.run._cache_size()
    rng = np.random.default_rng(0)
    for _ in range(5):
        prompts = [rng.integers(0, 11, rng.integers(1, 40)).tolist() for _ in range(4)]
        params = [
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.5, 1.0])),
                top_p=float(rng.uniform(0.1, 1)),
                top_k=int(rng.integers(0, 5)),
                max_new_tokens=int(rng.integers(0, 20)),
                stop_token_ids=(int(rng.integers(11)),),
            )
            for _ in range(4)
        ]
        decoder.generate(prompts, params)
    assert (decode.prefill._cache_size(), decode.run._cache_size()) == sizes


def test_decoders_with_equal_parts_share_programs(hist):
    Decoder(hist, PromptLookup(3), **LEN).generate(PROMPTS, MIXED)
    size = decode.run._cache_size()
    Decoder(hist, PromptLookup(3), **LEN).generate(PROMPTS, MIXED)
    assert decode.run._cache_size() == size


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], None, "prompt 0 is empty"),
        ([[1], [11]], None, "prompt 1 has token id 11 at index 0, outside the vocabulary 0..10"),
        ([[1, -1]], None, "token id -1 at index 1"),
        ([[1] * 48], None, "48 tokens and max_len is 48"),
        (["text"], None, "no tokenizer"),
        ("text", None, "must be a list"),
        ([[1], [2]], [SamplingParams()], "2 prompts and 1 SamplingParams"),
        ([[1]], SamplingParams(stop_token_ids=(99,)), "stop token id 99"),
        ([[1]], SamplingParams(stop=("x",)), "need a target with a tokenizer"),
        ([1, 2, 3], None, "must be a list"),
        ([[1.5]], None, "must be text or whole numbers"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(plain, monkeypatch, prompts, params, message):
    monkeypatch.setattr(decode, "prefill", None)
    with pytest.raises(ContractError, match=message):
        plain.generate(prompts, params)


def test_bad_streams_are_refused_at_the_call():
    decoder = Decoder(text_script(b"> text"), max_len=16)
    with pytest.raises(ContractError, match="stop token id 999"):
        decoder.stream("> ", SamplingParams(stop_token_ids=(999,)))


def test_bad_decoders_are_refused(hist):
    for parts in ({"proposer": verify.Match()}, {"rule": PromptLookup()}):
        with pytest.raises((ContractError, TypeError), match="is not a|proposer|rule"):
            Decoder(hist, **parts)
    with pytest.raises(ContractError, match="max_len must hold"):
        Decoder(hist, max_len=1)
    with pytest.raises(ContractError, match="prefill_chunk"):
        Decoder(hist, prefill_chunk=0)
    short = testing.HistLM()
    short.max_positions = 16
    with pytest.raises(ContractError, match="max_len is 17 and the target has 16 positions"):
        Decoder(short, max_len=17)
    with pytest.raises(ContractError, match="needs a target with a tokenizer"):
        Decoder(hist, **LEN).stream([1])


@dataclasses.dataclass(frozen=True)
class RandomTrees(Stateless):
    """Another random tree for every row and cycle, with random tokens of which about one in `choices` is right."""

    tree: Tree | DynamicTree = DynamicTree(12, 11)
    choices: int = 5

    law = Law.POINT_MASS

    def propose(self, params, state, context: Context):
        N = self.tree.size

        def numbers(purpose):
            lanes = sampling.root_lanes(context.root_position_B, jnp.arange(N)[None, :])
            return sampling.uniforms(context.rows.seed_Bx2, purpose, *lanes)

        tokens_BxN = (numbers(sampling.Purpose.DRAFT) * self.choices).astype(jnp.int32)
        tokens_BxN = tokens_BxN.at[:, 0].set(context.root_B)
        share_BxN = numbers(sampling.Purpose.ACCEPT) * jnp.arange(N, dtype=jnp.float32)[None, :]
        parents_BxN = share_BxN.astype(jnp.int32).at[:, 0].set(-1)
        parents_BxN = None if isinstance(self.tree, Tree) else parents_BxN
        valid_BxN = numbers(sampling.Purpose.RESIDUAL) < 0.9
        proposal = Proposal(tokens_BxN, valid_BxN.at[:, 0].set(True), None, self.tree, self.law, parents_BxN)
        # A node below an invalid one is invalid.
        alive_BxN = jnp.all(jnp.where(proposal.topology.ancestors_BxNxN, proposal.valid_BxN[:, None, :], True), axis=-1)
        return dataclasses.replace(proposal, valid_BxN=alive_BxN), state


@pytest.mark.slow
@pytest.mark.parametrize("make", [testing.HistLM, testing.TinyTransformer], ids=lambda make: make.__name__)
def test_a_thousand_random_trees_give_plain_tokens(make):
    """A fresh tree for each row and cycle, rows ragged in prompt, sampling, budget and acceptance."""
    target, rng, trees = make(vocab_size=5), np.random.default_rng(0), 0
    plain = Decoder(target, **LEN)
    decoder = Decoder(testing.Poisoned(target), RandomTrees(), **LEN)
    while trees < 1000:
        prompts = [rng.integers(0, 5, rng.integers(1, 20)).tolist() for _ in range(8)]
        params = [
            SamplingParams(
                temperature=float(rng.choice([0.0, 0.7, 1.3])),
                top_p=float(rng.choice([1.0, 0.8])),
                seed=int(rng.integers(2**32)),
                max_new_tokens=int(rng.integers(1, 28)),
            )
            for _ in range(8)
        ]
        testing.assert_same_tokens(decoder, plain, prompts, params)
        stats = decoder.generate(prompts, params).stats
        assert stats.accepted > 0
        trees += stats.cycles


@pytest.mark.parametrize("size", [1, 2, 33, 100])
def test_static_trees_of_any_shape_give_plain_tokens(size):
    rng = np.random.default_rng(size)
    tree = Tree((-1, *(int(rng.integers(max(0, node - 9), node)) for node in range(1, size))))
    target = testing.HistLM(vocab_size=11)
    decoder = Decoder(testing.Poisoned(target), RandomTrees(tree), **LEN)
    testing.assert_same_tokens(decoder, Decoder(target, **LEN), PROMPTS, MIXED)


@pytest.mark.parametrize("law", list(Law))
def test_drafted_trees_give_plain_tokens(hist, plain, law):
    draft = testing.Poisoned(testing.HistLM(seed=3, sharpness=1.0))
    decoder = Decoder(hist, DraftModel(draft, Tree((-1, 0, 0, 0, 2, 1, 2, 4)), law), **LEN)
    testing.assert_same_tokens(decoder, plain, PROMPTS, MIXED)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=20)
    for rule in (verify.Recursive(), verify.Traversal()):
        other = Decoder(hist, DraftModel(draft, Tree((-1, 0, 0, 0, 2, 1, 2, 4)), law), rule, **LEN)
        testing.assert_same_tokens(other, plain, PROMPTS, greedy)
        assert other.generate(PROMPTS, greedy).stats.cycles == decoder.generate(PROMPTS, greedy).stats.cycles


class Branches(Stateless):
    """Guesses tokens at random; siblings differ."""

    tree = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [2, 0, 0]])
    law = Law.POINT_MASS

    def propose(self, params, state, context: Context):
        start = context.root_B * 3 + context.num_tokens_B
        tokens = (start[:, None] + jnp.arange(self.tree.size)[None, :] * 2) % 5
        tokens = tokens.at[:, 0].set(context.root_B)
        return Proposal(tokens, jnp.ones_like(tokens, bool), None, self.tree, self.law), state


def test_trees_commit_scattered_paths():
    """A static tree of lookups: the same tokens as plain decoding, over many cycles and ragged rows."""
    for make in (lambda: testing.HistLM(vocab_size=5), lambda: testing.TinyTransformer(vocab_size=5)):
        target = make()
        plain = Decoder(target, **LEN)
        decoder = Decoder(testing.Poisoned(target), Branches(), **LEN)
        prompts = [[token % 5 for token in prompt] for prompt in PROMPTS]
        testing.assert_same_tokens(decoder, plain, prompts, MIXED)
        stats = decoder.generate(prompts, MIXED).stats
        assert stats.accepted > 5 and len(list(itertools.chain(stats.accepted_histogram))) == 4


def test_same_seed_equality_catches_a_sample_for_every_node_of_a_tree(monkeypatch):
    """One draw a path instead of one a position: the deepest match picks the luckier of two draws."""
    plain = Decoder(testing.HistLM(vocab_size=5), **LEN)
    prompts, params = [[1, 2], [3]], SamplingParams(temperature=1.0, seed=3, max_new_tokens=20)
    expected = [result.tokens for result in plain.generate(prompts, params)]
    planted(
        monkeypatch, lambda purpose, position, lane: (purpose, position, jnp.arange(position.shape[1])[None, :] + lane)
    )
    decoder = Decoder(testing.HistLM(vocab_size=5), Branches(), **LEN)
    assert [result.tokens for result in decoder.generate(prompts, params)] != expected
