"""The models against transformers, on the same random weights."""

import dataclasses

import numpy as np
import pytest

import models
from models import hf
from models.checkpoint import HF, flat_params, stored_name
from tests.models.common import TINY, VARIANTS, commit, forward, noisy_target, some_tokens

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore"),  # torch and transformers warn about themselves.
]
torch = pytest.importorskip("torch", reason="needs the extra [peer]")
transformers = pytest.importorskip("transformers", reason="needs the extra [peer]")

PROMPTS = (
    "Once upon a time, there was a little",
    "The capital of France is",
    "def quicksort(arr):\n",
    "Water boils at",
    "1, 2, 3, 4,",
    "Dear Sir or Madam,",
    "The three primary colours are",
    "In the year 1969,",
    "To make an omelette, first",
    "Roses are red,",
)
NUM_TOKENS = 28
NEAR_TIE = 1e-4


def as_stored(target):
    """A target's arrays by the names of a Hugging Face file."""
    flat = flat_params(target.config, target.params)
    return {stored_name(path, HF): np.asarray(array) for path, array in flat.items()}


def peer_logits(peer, tokens_BxN) -> np.ndarray:
    with torch.no_grad():
        return peer(torch.tensor(tokens_BxN)).logits.float().numpy()


def our_logits(target, tokens_BxN) -> np.ndarray:
    logits, _, _ = forward(target, tokens_BxN, target.init_kv(*tokens_BxN.shape))
    return np.asarray(logits)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "partial"])
def test_logits_and_folders_agree_with_transformers(name, tmp_path):
    target, tokens_BxN = noisy_target(VARIANTS[name]), some_tokens((2, 40))
    hf.save(target, tmp_path / "ours")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    expected = peer_logits(peer, tokens_BxN)
    np.testing.assert_allclose(our_logits(target, tokens_BxN), expected, atol=1e-4, rtol=0)
    # And what transformers writes, in its own spelling and shards, is read here.
    peer.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    again = models.load(tmp_path / "theirs")
    assert again.config == target.config
    np.testing.assert_allclose(our_logits(again, tokens_BxN), expected, atol=1e-4, rtol=0)


def test_hidden_states_are_the_taps():
    target, tokens_BxN = noisy_target(TINY), some_tokens((1, 10))
    peer = peer_of(target)
    with torch.no_grad():
        expected = peer(torch.tensor(tokens_BxN), output_hidden_states=True).hidden_states
    # transformers gives the embedding, each block's output, and for the last block the normed stream.
    _, taps, _ = forward(target, tokens_BxN, target.init_kv(1, 10), taps=(0, 1, 3))
    for ours, theirs in zip(taps, expected, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4, rtol=0)


def test_partial_rotation_agrees_with_a_family_that_has_it():
    """Phi-3 is this decoder with fused weights, and rotates part of each head."""
    config = dataclasses.replace(VARIANTS["partial"], head_dim=8, model_dim=32)
    target, tokens_BxN = noisy_target(config), some_tokens((2, 40))
    peer = transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.model_dim,
            intermediate_size=config.mlp_dim,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            max_position_embeddings=config.max_positions,
            original_max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_base,
            partial_rotary_factor=config.partial_rotary_factor,
            sliding_window=None,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()
    weights = as_stored(target)
    for layer in range(config.num_layers):
        attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
        qkv = [weights.pop(f"{attention}.{part}_proj.weight") for part in "qkv"]
        weights[f"{attention}.qkv_proj.weight"] = np.concatenate(qkv)
        gate_up = [weights.pop(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")]
        weights[f"{mlp}.gate_up_proj.weight"] = np.concatenate(gate_up)
    peer.load_state_dict({name: torch.tensor(value) for name, value in weights.items()})
    np.testing.assert_allclose(our_logits(target, tokens_BxN), peer_logits(peer, tokens_BxN), atol=1e-4, rtol=0)


def peer_of(target):
    """The same model in transformers, on the same values."""
    config = transformers.AutoConfig.for_model(**target.config.to_hf())
    peer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    weights = {name: torch.tensor(array) for name, array in as_stored(target).items()}
    missing, unexpected = peer.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    peer.tie_weights()
    return peer


@pytest.mark.slow
def test_greedy_texts_of_the_real_model_are_those_of_transformers(smollm2):
    """transformers scores our whole text at once: its argmax at every position is its greedy text."""
    peer = peer_of(smollm2)
    parted = []
    for prompt in PROMPTS:
        ids = smollm2.encode(prompt)
        ours = greedy(smollm2, ids)
        logits_NxV = peer_logits(peer, np.array([ids + ours[:-1]]))[0, len(ids) - 1 :]
        theirs = logits_NxV.argmax(-1).tolist()
        # After the first difference the two texts have different pasts.
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if first is not None:
            second, top = np.sort(logits_NxV[first])[-2:]
            parted.append((prompt, first, float(top - second)))
    print("parted at near ties (prompt, token, gap):", parted)
    assert all(gap < NEAR_TIE for _, _, gap in parted), parted


def greedy(target, ids: list[int]) -> list[int]:
    """Plain greedy decoding, one token a pass."""
    kv, tokens, feed = target.init_kv(1, 64), [], ids
    while len(tokens) < NUM_TOKENS:
        # Prompts are padded to one length, so that all of them share one compiled pass.
        width = 24 if len(feed) > 1 else 1
        assert len(feed) <= width
        logits_BxNxV, _, kv = forward(target, [feed + [0] * (width - len(feed))], kv)
        kv = commit(kv, np.array([len(feed)], np.int32))
        tokens.append(int(logits_BxNxV[0, len(feed) - 1].argmax()))
        feed = tokens[-1:]
        if tokens[-1] in target.eos_token_ids:
            break
    return tokens
