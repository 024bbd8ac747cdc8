"""Proposers, against plain-Python models of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import ContractError, Decoder, DynamicTree, Law, SamplingParams, Tree, testing
from spec_jax.growth import Beam
from spec_jax.propose import Context, DraftModel, PromptLookup, Synthetic
from spec_jax.sampling import SamplingRows
from tests.toys import BYTES, ByteTokenizer, run_cycles, step

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=30)


def context_of(texts, capacity=16, junk=7):
    tokens = np.full((len(texts), capacity), junk, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    rows = SamplingRows.create([GREEDY] * len(texts), range(len(texts)))
    return Context(jnp.asarray(tokens), jnp.asarray([len(t) for t in texts], jnp.int32), rows)


def lookup(texts, **options):
    proposer = PromptLookup(**options)
    proposal, _ = jax.jit(lambda context: proposer.propose(None, None, context))(context_of(texts))
    return [
        tokens[1 : 1 + valid[1:].sum()].tolist()
        for tokens, valid in zip(np.asarray(proposal.tokens_BxN), np.asarray(proposal.valid_BxN), strict=True)
    ]


@pytest.mark.smoke
def test_prompt_lookup_ties():
    """The longest suffix wins; among its occurrences the most recent or the leftmost, as asked."""
    text = [1, 2, 3, 9, 1, 2, 3, 7, 2, 3]
    assert lookup([text], length=3, max_ngram=3) == [[7, 2, 3]]
    assert lookup([text], length=3, max_ngram=3, pick="leftmost") == [[9, 1, 2]]
    assert lookup([[5], [5, 5], [1, 2, 3], [7, 7]], length=3) == [[], [5], [], [7]]
    assert lookup([[4, 5, 4, 6, 4]], length=3, min_ngram=2) == [[]]


def test_prompt_lookup_equals_a_plain_model():
    rng = np.random.default_rng(0)

    def model(text, length, max_ngram, pick):
        for n in range(min(max_ngram, len(text) - 1), 0, -1):
            ends = [j for j in range(n - 1, len(text) - 1) if text[j - n + 1 : j + 1] == text[-n:]]
            if ends:
                end = ends[-1] if pick == "recent" else ends[0]
                return text[end + 1 : end + 1 + length]
        return []

    for pick in ("recent", "leftmost"):
        texts = [rng.integers(0, 3, rng.integers(1, 17)).tolist() for _ in range(200)]
        got = lookup(texts, length=4, max_ngram=3, pick=pick)
        assert got == [model(text, 4, 3, pick) for text in texts]


def test_prompt_lookup_branches():
    """Other occurrences draft beside the first, each with a first token of its own; the text's end cuts them."""
    rng = np.random.default_rng(1)

    def model(text, lengths, max_ngram, min_ngram, pick):
        drafts, begun = [], set()
        for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
            ends = [j for j in range(n - 1, len(text) - 1) if text[j - n + 1 : j + 1] == text[-n:]]
            for end in reversed(ends) if pick == "recent" else ends:
                if text[end + 1] not in begun and len(drafts) < len(lengths):
                    begun.add(text[end + 1])
                    drafts.append(text[end + 1 : end + 1 + lengths[len(drafts)]])
        return drafts + [[]] * (len(lengths) - len(drafts))

    texts = [rng.integers(0, 3, rng.integers(1, 17)).tolist() for _ in range(100)]
    for pick, min_ngram in (("recent", 1), ("leftmost", 2)):
        proposer = PromptLookup(3, 3, min_ngram, pick, branches=[2, 1])
        assert proposer.tree == Tree((-1, 0, 1, 2, 0, 4, 0))
        proposal, _ = jax.jit(lambda context, p=proposer: p.propose(None, None, context))(context_of(texts))
        for text, tokens, valid in zip(
            texts, np.asarray(proposal.tokens_BxN), np.asarray(proposal.valid_BxN), strict=True
        ):
            got = [tokens[1:][place][valid[1:][place]].tolist() for place in (slice(0, 3), slice(3, 5), slice(5, 6))]
            assert got == model(text, (3, 2, 1), 3, min_ngram, pick)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PromptLookup(length=0), "length must be >= 1"),
        (lambda: PromptLookup(branches=(2, 0)), "a branch must have a length >= 1"),
        (lambda: PromptLookup(max_ngram=0), "min_ngram <= max_ngram"),
        (lambda: DraftModel(testing.HistLM(), 0), "no node to draft"),
        (lambda: DraftModel(testing.HistLM(), Beam(8, 3, 2), Law.IID), "no sample: its law is 'point_mass', got 'iid'"),
        (lambda: Beam(8, 3, 0), "width must be between 1 and 128"),
        (lambda: DraftModel(testing.HistLM(), 10**9), "between 1 and 128 nodes"),
        (lambda: PromptLookup(100, branches=(60,)), "between 1 and 128 nodes"),
        (lambda: Beam(8, 3, 2, -1.0), "threshold must be >= 0"),
        (lambda: Synthetic([[1]], []), "one probability"),
        (lambda: Synthetic([[1]], [1.5]), "one probability"),
        (lambda: Synthetic([[]], [1.0]), "none of them empty"),
    ],
)
def test_bad_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_values_of_another_type_are_refused():
    """By the constructors' own checks, or here by those of the annotations."""
    for make, name in [
        (lambda: PromptLookup(pick="middle"), "pick"),
        (lambda: DraftModel(testing.HistLM(), "3x2"), "tree"),
        (lambda: DraftModel(testing.HistLM(), DynamicTree(5, 2), Law.POINT_MASS), "tree"),
        (lambda: DraftModel(testing.HistLM(), 3, "nope"), "law"),
    ]:
        with pytest.raises(Exception, match=name):
            make()


SHAPES = {
    "chain": (3, Law.IID),
    "chain of the likeliest": (3, Law.POINT_MASS),
    "top k": (Tree.branching((2, 2, 2)), Law.POINT_MASS),
    "independent": (Tree.branching((2, 2, 1)), Law.IID),
    "without replacement": (Tree((-1, 0, 1, 0, 2, 2, 3, 1)), Law.WITHOUT_REPLACEMENT),
    "top and sample": (Tree.branching((3, 2, 1)), Law.TOP_AND_SAMPLE),
    "beam": (Beam(14, 3, 4), Law.POINT_MASS),
    "beam that stops early": (Beam.opt_tree(10, 4), Law.POINT_MASS),
}


@pytest.fixture(params=SHAPES)
def shape(request):
    return SHAPES[request.param]


class TestDraftModel:
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1, 2, 3, 4]]

    def test_a_target_as_its_own_draft_is_accepted_to_the_last_level(self, shape):
        """The bonus token's row must be there after full acceptance, or the hash of the history changes."""
        model = testing.Poisoned(testing.HistLM(sharpness=9.0))
        draft = DraftModel(model, *shape)
        decoder = Decoder(model, draft, max_len=64, prefill_chunk=4)
        depth = draft.tree.max_depth
        budget = 7 * (depth + 1) + 1
        results = decoder.generate(self.prompts, SamplingParams(temperature=0.0, max_new_tokens=budget))
        if shape[0] == SHAPES["beam that stops early"][0]:
            assert results.stats.tokens_per_cycle > 1.5  # how deep it grows is its own choice
        elif shape[1] != Law.IID and depth == 3 and not isinstance(draft.tree, Beam):
            for result in results:
                assert result.stats.cycles == 8 and result.stats.corrections == 0
                assert result.stats.accepted_histogram[1:] in [(0, 0, 7), (1, 0, 7)]
        testing.assert_same_tokens(
            decoder,
            Decoder(model, max_len=64, prefill_chunk=4),
            self.prompts,
            SamplingParams(seed=3, max_new_tokens=30),
        )

    def test_its_kv_equals_a_fresh_prefill(self, shape):
        target, draft = testing.HistLM(seed=1), testing.TinyTransformer(vocab_size=11)
        decoder = Decoder(target, DraftModel(testing.Poisoned(draft), *shape), max_len=64, prefill_chunk=4)
        state = run_cycles(decoder, self.prompts, [True] * 6)
        assert_draft_rows_fresh(decoder, state, draft)
        accepted = int(np.asarray(state.counters.accepted_B).sum())
        assert accepted > 0, "the test needs rows that were moved"

    @pytest.mark.parametrize("shape", [SHAPES["chain"], SHAPES["top k"]], ids=["chain", "tree"])
    def test_plain_steps_leave_it_up_to_date(self, shape):
        model = testing.HistLM()
        decoder = Decoder(model, DraftModel(model, *shape), max_len=64, prefill_chunk=4)
        state = run_cycles(decoder, self.prompts, [True] * 5 + [False] * 5)
        before = np.asarray(state.counters.accepted_B)
        state = step(decoder, state, True)
        np.testing.assert_array_equal(np.asarray(state.counters.accepted_B) - before, [3, 3, 3])

    def test_a_draft_with_fewer_positions_stops_drafting(self):
        target, draft = testing.HistLM(), testing.HistLM()
        draft.max_positions = 16
        plain = Decoder(target, max_len=48, prefill_chunk=4)
        decoder = Decoder(target, DraftModel(draft, 3), max_len=48, prefill_chunk=4)
        testing.assert_same_tokens(decoder, plain, self.prompts, GREEDY)
        stats = decoder.generate([[1, 2, 3]], GREEDY).stats
        assert stats.accepted >= 9 and stats.accepted_histogram[0] >= 14
        for tree in (3, Tree.branching((2, 2)), Beam(8, 3, 3)):
            decoder = Decoder(target, DraftModel(draft, tree, Law.POINT_MASS), max_len=48, prefill_chunk=4)
            assert decoder.generate([[1, 2, 3] * 6], GREEDY).stats.drafted == 0

    def test_a_beam_has_room_for_its_scratch(self):
        target, beam = testing.HistLM(), Beam(4, 3, 8)
        decoder = Decoder(target, DraftModel(target, beam, Law.POINT_MASS), max_len=16, prefill_chunk=1)
        state = decoder.start(decoder.request([[1]], GREEDY))
        assert state.proposer.kv.capacity >= decoder.max_len + beam.num_expanded
        testing.assert_same_tokens(decoder, Decoder(target, max_len=16, prefill_chunk=1), self.prompts, GREEDY)

    def test_foreign_drafts_are_refused(self):
        target = testing.HistLM()
        with pytest.raises(ContractError, match="vocabulary of 12 tokens and the target one of 11"):
            Decoder(target, DraftModel(testing.HistLM(vocab_size=12)))
        draft = testing.HistLM()
        target.tokenizer, draft.tokenizer = (ByteTokenizer(BYTES, name) for name in ("one", "other"))
        with pytest.raises(ContractError, match="tokenizer"):
            Decoder(target, DraftModel(draft))
        draft.tokenizer = target.tokenizer
        draft.max_positions = 4
        with pytest.raises(ContractError, match="4 positions, too few"):
            Decoder(target, DraftModel(draft, 3))


def assert_draft_rows_fresh(decoder, state, draft):
    """The draft's committed rows equal those of one pass over the whole text."""
    for row, count in enumerate(np.asarray(state.num_tokens_B)):
        fed = int(count) - 2
        tokens = state.tokens_BxS[row : row + 1, :fed]
        _, _, fresh = draft.forward(
            draft.params, tokens, jnp.arange(fed)[None, :], draft.init_kv(1, decoder.capacity), None
        )
        for kept, new in zip(state.proposer.kv.keys + state.proposer.kv.values, fresh.keys + fresh.values, strict=True):
            np.testing.assert_allclose(kept[row, :, :fed], new[0, :, :fed], rtol=1e-4, atol=1e-5)


def test_synthetic_forces_the_acceptance_it_is_given():
    target, prompt = testing.HistLM(), [3, 1]
    plain = Decoder(target, max_len=64, prefill_chunk=4)
    reference = prompt + plain.generate([prompt], GREEDY)[0].tokens
    for depth in range(4):
        acceptance = [1.0] * depth + [0.0] * (3 - depth)
        decoder = Decoder(target, Synthetic([reference], acceptance), max_len=64, prefill_chunk=4)
        testing.assert_same_tokens(decoder, plain, [prompt], GREEDY)
        stats = decoder.generate([prompt], GREEDY).stats
        assert stats.accepted_histogram[depth] >= stats.cycles - 1
    decoder = Decoder(target, Synthetic([reference] * 2, [0.8]), max_len=64)
    with pytest.raises(ContractError, match="references for 2 rows, and the batch has 1"):
        decoder.generate([prompt], GREEDY)


def test_synthetic_acceptance_is_the_chosen_probability():
    target, rng = testing.HistLM(), np.random.default_rng(0)
    prompts = rng.integers(0, 11, (64, 2)).tolist()
    params = SamplingParams(temperature=0.0, max_new_tokens=60)
    plain = Decoder(target, max_len=64, prefill_chunk=4).generate(prompts, params)
    references = [prompt + result.tokens for prompt, result in zip(prompts, plain, strict=True)]
    wanted = (0.85, 0.75, 0.60, 0.40)
    stats = Decoder(target, Synthetic(references, wanted), max_len=64, prefill_chunk=4).generate(prompts, params).stats
    # About 1300 cycles; the last cycle of a row is cut by the budget.
    np.testing.assert_allclose(stats.conditional_acceptance, wanted, atol=0.06)
