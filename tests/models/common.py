"""Tiny models and tokenizers shared by the tests of this folder."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers

from models.checkpoint import filled_params, flat_params, param_shapes
from models.config import Llama3Scaling, LlamaConfig
from models.target import LlamaTarget
from models.tokenizer import Tokenizer
from spec_jax.kv import KVBuffer

TINY = LlamaConfig(
    family="llama",
    vocab_size=50,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    model_dim=24,
    mlp_dim=40,
    max_positions=64,
)
SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=16)
# One configuration for each thing that a family may have.
VARIANTS = {
    "llama2": TINY,
    "llama3": dataclasses.replace(TINY, rope_scaling=SCALING, rope_base=500.0),
    "llama_biases": dataclasses.replace(TINY, attention_bias=True, output_bias=True, mlp_bias=True),
    "smollm2": dataclasses.replace(TINY, tied_embeddings=True, norm_eps=1e-5),
    "partial": dataclasses.replace(TINY, partial_rotary_factor=0.5),
    "mistral": dataclasses.replace(TINY, family="mistral", head_dim=16),
    "qwen2": dataclasses.replace(TINY, family="qwen2", attention_bias=True, num_kv_heads=1),
    "qwen3": dataclasses.replace(TINY, family="qwen3", qk_norm=True, num_kv_heads=4, tied_embeddings=True),
}


@functools.lru_cache
def noisy_target(config: LlamaConfig, seed: int = 0, **kwargs) -> LlamaTarget:
    """A random model whose norms and biases are random too, so that none of them can be left out unseen.

    Cached, with its compiled programs; tests that change the parameters build their own target from them.
    """
    rng = np.random.default_rng(seed)

    def value(shape, path):
        if len(shape) == 1:
            return 0.3 * rng.normal(size=shape) + float("norm" in path)
        return rng.normal(size=shape) * shape[-1] ** -0.5

    values = {path: value(shape, path) for path, shape in param_shapes(config).items()}
    return LlamaTarget(config, filled_params(config, values.get), **kwargs)


def forward(target, tokens_BxN, kv, words_BxNxW=None, depth_N=None, taps=()):
    """One compiled pass at the rows' own committed lengths."""
    tokens_BxN = jnp.asarray(tokens_BxN, jnp.int32)
    depth_N = np.arange(tokens_BxN.shape[1]) if depth_N is None else depth_N
    positions_BxN = kv.length_B[:, None] + jnp.asarray(depth_N, jnp.int32)[None, :]
    return _compiled(target)(target.params, tokens_BxN, positions_BxN, kv, words_BxNxW, taps=taps)


@functools.lru_cache
def _compiled(target):
    return jax.jit(target.forward, static_argnames="taps")


commit = jax.jit(KVBuffer.commit)


def some_tokens(shape, vocab_size=TINY.vocab_size, seed=0):
    return np.random.default_rng(seed).integers(0, vocab_size, shape)


def assert_same_params(left: LlamaTarget, right: LlamaTarget, **tolerance):
    left, right = (flat_params(target.config, target.params) for target in (left, right))
    assert left.keys() == right.keys()
    for path, array in left.items():
        np.testing.assert_allclose(
            np.asarray(array, np.float32), np.asarray(right[path], np.float32), err_msg=path, **tolerance
        )


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_bpe_parts() -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens and merges of a small byte-level BPE: three special tokens, the bytes, two merged words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "t")]
    return [*SPECIAL, *alphabet, *(a + b for a, b in merges)], merges


def byte_bpe(**kwargs) -> Tokenizer:
    tokens, merges = byte_bpe_parts()
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.add_tokens([AddedToken("<tool>é", normalized=False)])
    defaults = {
        "chat_template": CHATML,
        "special_tokens": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    }
    return Tokenizer(backend, **defaults | kwargs)
