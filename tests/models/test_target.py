import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.checkpoint import filled_params, flat_params
from models.errors import ModelError
from models.target import LlamaTarget
from spec_jax.target import Target
from tests.models.common import TINY, assert_same_params, byte_bpe, forward, noisy_target, some_tokens


def test_it_is_a_target_hashable_by_identity():
    target, twin = LlamaTarget.random(TINY, seed=3), LlamaTarget.random(TINY, seed=3)
    assert isinstance(target, Target)
    assert len({target, twin}) == 2
    assert (target.vocab_size, target.max_positions, target.eos_token_ids) == (50, 64, ())
    assert_same_params(target, twin)


def test_forward_reads_the_parameters_it_is_given():
    target, tokens_BxN = LlamaTarget.random(TINY, seed=0), some_tokens((1, 4))
    other = LlamaTarget.random(TINY, seed=1)
    positions_BxN = jnp.arange(4, dtype=jnp.int32)[None]
    given, _, _ = jax.jit(target.forward)(
        other.params, jnp.asarray(tokens_BxN), positions_BxN, target.init_kv(1, 4), None
    )
    expected, _, _ = forward(other, tokens_BxN, other.init_kv(1, 4))
    np.testing.assert_allclose(given, expected, atol=1e-5)


def test_the_buffer_has_the_models_shape_and_dtype():
    kv = noisy_target(dataclasses.replace(TINY, dtype="bfloat16")).init_kv(3, 16)
    assert len(kv.keys) == 2 and kv.keys[0].shape == (3, 2, 16, 8) and kv.keys[0].dtype == "bfloat16"


def test_the_fingerprint_sees_weights_and_configuration():
    target = noisy_target(TINY)
    weights = flat_params(target.config, target.params)

    def changed(changed_path):
        def value(path):
            array = np.array(weights[path])
            if path == changed_path:
                array.flat[0] += 0.1
            return array

        return LlamaTarget(TINY, filled_params(TINY, value)).fingerprint

    assert changed(None) == target.fingerprint
    assert len({target.fingerprint, *map(changed, weights)}) == 1 + len(weights)
    renamed = LlamaTarget(dataclasses.replace(TINY, rope_base=5.0), target.params)
    assert renamed.fingerprint != target.fingerprint


def test_chat_takes_a_text_or_messages():
    target = LlamaTarget.random(dataclasses.replace(TINY, vocab_size=300), tokenizer=byte_bpe())
    ids = target.chat("hello")
    assert ids == target.chat([{"role": "user", "content": "hello"}])
    assert ids[0] == 1 and ids.count(1) == 2 and ids.count(2) == 1
    assert target.decode(ids) == "user\nhello\nassistant\n"
    assert len(target.chat("hello", add_generation_prompt=False)) < len(ids)
    assert target.decode(target.encode("héllo")) == "héllo"


def test_text_without_a_tokenizer_is_refused_with_the_reason():
    target = LlamaTarget.random(TINY, name="bare", tokenizer_problem="the folder has none")
    for call in (target.chat, target.encode, lambda text: target.decode([1])):
        with pytest.raises(ModelError, match="bare has no tokenizer .the folder has none.; give token ids"):
            call("hello")
