"""The real model, decoded speculatively: the same text as without."""

import pytest

import spec_jax as sj
from experiments import exactness
from models.target import LlamaTarget
from spec_jax.kernels import Kernels

pytestmark = pytest.mark.slow

PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Natalia sold clips to 48 of her friends in April, and then half as many in May. How many did she sell altogether?",
    "Repeat after me, three times: the quick brown fox jumps over the lazy dog.",
]
GREEDY = sj.SamplingParams(temperature=0.0, max_new_tokens=48)


@pytest.fixture(scope="module")
def prompts(smollm2):
    return [smollm2.chat(prompt) for prompt in PROMPTS] + [smollm2.encode("Once upon a time")]


@pytest.fixture(scope="module")
def plain(smollm2):
    decoder = sj.Decoder(smollm2, max_len=256)
    return decoder


def test_the_interface_as_documented(smollm2):
    decoder = sj.Decoder(smollm2, sj.propose.PromptLookup(length=5, max_ngram=3), sj.verify.Match(), max_len=256)
    results = decoder.generate([smollm2.chat("What is the capital of France?"), "Once upon a time"], GREEDY)
    assert results[0].text == "The capital of France is Paris." and results[0].finish_reason == "stop"
    assert results[1].finish_reason == "length" and len(results[1].tokens) == 48
    assert results.stats.tokens == sum(len(r.tokens) for r in results)
    assert results.stats.tokens_per_cycle > 1 and len(results.stats.survival) == 5
    assert sum(results.stats.accepted_histogram) == results.stats.cycles
    sampled = sj.SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_new_tokens=24)
    text = "".join(decoder.stream("Once upon a time", sampled))
    assert text == decoder.generate(["Once upon a time"], sampled)[0].text


@pytest.mark.parametrize("branches", [(), (4, 2, 2)], ids=["chain", "tree"])
def test_greedy_text_is_plain_greedy_text(smollm2, plain, prompts, branches):
    """In float32 a difference is allowed only at a top-2 gap below 1e-4, and reported."""
    expected = plain.generate(prompts, GREEDY)
    proposer = sj.propose.PromptLookup(7, branches=branches)
    results = sj.Decoder(smollm2, proposer, max_len=256).generate(prompts, GREEDY)
    assert results.stats.accepted > 20
    for prompt, ours, theirs in zip(prompts, results, expected, strict=True):
        difference = exactness.compare(prompt, theirs.tokens, ours.tokens, "float32", plain)
        if difference is not None:
            print(f"{proposer}: {difference}")
            assert difference.near_tie, difference


def test_sampled_text_is_plain_text_for_the_same_seed(smollm2, plain, prompts):
    """Sampling meets rounding at the borders of the running sum; that is rarer than one token in ten thousand."""
    params = [
        sj.SamplingParams(temperature=0.7, seed=1, max_new_tokens=32),
        sj.SamplingParams(temperature=1.0, top_p=0.9, seed=2, max_new_tokens=32),
        sj.SamplingParams(temperature=1.2, top_k=40, seed=3, max_new_tokens=32),
        sj.SamplingParams(temperature=0.0, max_new_tokens=32),
        sj.SamplingParams(temperature=0.5, min_p=0.05, seed=4, max_new_tokens=32),
    ]
    sj.testing.assert_same_tokens(sj.Decoder(smollm2, sj.propose.PromptLookup(4), max_len=256), plain, prompts, params)


@pytest.mark.parametrize(
    "draft",
    # Of the tree the path to the last level is nodes 1, 4, 5: it lies scattered in the buffers of target and draft.
    [(3, sj.Law.IID), (sj.Tree((-1, 0, 0, 2, 1, 4)), sj.Law.WITHOUT_REPLACEMENT)],
    ids=["chain", "tree"],
)
def test_as_its_own_draft_everything_is_accepted(smollm2, plain, draft):
    prompt, params = smollm2.chat(PROMPTS[1]), sj.SamplingParams(temperature=0.0, max_new_tokens=24)
    decoder = sj.Decoder(smollm2, sj.propose.DraftModel(smollm2, *draft), sj.verify.Recursive(), max_len=256)
    (result,) = decoder.generate([prompt], params)
    assert result.stats.corrections == 0 and result.stats.cycles == 6
    assert result.tokens == plain.generate([prompt], params)[0].tokens


def test_stop_strings_cut_text_and_tokens(smollm2):
    decoder = sj.Decoder(smollm2, sj.propose.PromptLookup(), max_len=256)
    params = sj.SamplingParams(temperature=0.0, max_new_tokens=48, stop=("fox jumps",))
    (result,) = decoder.generate([smollm2.chat(PROMPTS[3])], params)
    assert result.finish_reason == "stop" and "fox jumps" not in result.text
    assert "fox jumps" in smollm2.decode(result.tokens) and "fox jumps" not in smollm2.decode(result.tokens[:-1])
    assert "".join(decoder.stream(smollm2.chat(PROMPTS[3]), params)) == result.text


def test_the_kernels_in_interpret_mode_decode_the_same_tokens(smollm2):
    kernels = Kernels.choose("interpret", smollm2.config.head_dim)
    interpreted = LlamaTarget(smollm2.config, smollm2.params, smollm2.tokenizer, kernels=kernels)
    prompts = ["The owl and the cat. The owl and the", "one, two, one, two, one,"]
    params = sj.SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True)
    proposer = sj.propose.PromptLookup(3, branches=(2, 1))
    got, want = (
        sj.Decoder(target, proposer, max_len=96, prefill_chunk=32).generate(prompts, params)
        for target in (interpreted, smollm2)
    )
    assert [r.tokens for r in got] == [r.tokens for r in want]
    assert got.stats.accepted == want.stats.accepted > 0
