import pytest

import spec_jax as sj
from experiments import bench, prompts, registry
from experiments.peer import Peer
from models.config import LlamaConfig
from models.target import LlamaTarget
from tests.toys import BYTES, ByteTokenizer

pytestmark = pytest.mark.peer

CONFIG = LlamaConfig("llama", 256, 2, 4, 2, 8, 32, 48, tied_embeddings=True, max_positions=128)
PROMPT = list(b"abcabcab")


@pytest.fixture(scope="module")
def target():
    pytest.importorskip("torch", reason="needs the extra [peer]")
    pytest.importorskip("transformers", reason="needs the extra [peer]")
    return LlamaTarget.random(CONFIG, seed=1)


def test_same_tokens_plainly_and_with_lookup(target):
    peer = Peer(target)
    expected = sj.Decoder(target, max_len=64).generate([PROMPT], sj.SamplingParams(temperature=0.0, max_new_tokens=20))
    for lookup_tokens in (None, 3):
        timed = peer.generate(PROMPT, 20, ignore_eos=False, lookup_tokens=lookup_tokens)
        assert timed.tokens == [expected[0].tokens]
        assert 0.0 < timed.decode_s < timed.wall_s and timed.decode_tokens == 19


def test_the_same_stop(target):
    stop = Peer(target).generate(PROMPT, 20, ignore_eos=False).tokens[0][4]
    stopping = Peer(LlamaTarget(CONFIG, target.params, eos_token_ids=(stop,)))
    (tokens,) = stopping.generate(PROMPT, 20, ignore_eos=False).tokens
    assert tokens[-1] == stop and tokens.index(stop) == len(tokens) - 1 <= 4
    assert len(stopping.generate(PROMPT, 20, ignore_eos=True).tokens[0]) == 20


def test_in_a_bench(target, tmp_path, monkeypatch):
    monkeypatch.setattr(target, "tokenizer", ByteTokenizer(BYTES))
    monkeypatch.setattr(target, "chat", lambda text: list(text.encode()), raising=False)
    monkeypatch.setattr(ByteTokenizer, "save", lambda self, folder: None, raising=False)
    config = bench.Config(
        target="tiny", proposers=(registry.parse_proposer("prompt_lookup"),), repeats=1, max_len=128, peer=True
    )
    made = bench.Bench(config, [prompts.Prompt("p", "c", "abcabc")], tmp_path, lambda name, dtype: target)
    *ours, plain, lookup = made.run()
    assert [row.variant.label for row in (plain, lookup)] == [
        "transformers plain",
        "transformers prompt_lookup:num_tokens=10",
    ]
    assert plain.stats is None and plain.tokens == ours[0].tokens == 96
    assert plain.compared and plain.differences == lookup.differences == 0
    assert plain.speedup.median > 0.0
    assert "transformers" in made.heading()


def test_only_float32_weights_are_handed_over(target):
    with pytest.raises(ValueError, match="float32 weights"):
        Peer("no target")
