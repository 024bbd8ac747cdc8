"""The real model against published and recorded values."""

import inspect
import textwrap

import jax
import numpy as np
import pytest

import models
from tests.models.common import commit, forward

pytestmark = pytest.mark.slow

PARAGRAPH = (
    "The sun rises in the east and sets in the west. Every day, people wake up in the morning, eat breakfast, and "
    "go to work or school. Plants use sunlight, water, and carbon dioxide to make food through a process called "
    "photosynthesis. Paris is the capital of France, and Berlin is the capital of Germany."
)
CHAT = """<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
What is the capital of France?<|im_end|>
<|im_start|>assistant
"""


def mean_nll(target, text) -> float:
    """Mean negative log-likelihood of the next token, in nats, over at most 512 tokens."""
    ids = np.array([target.encode(text)[:512]])
    logits_BxNxV, _, _ = forward(target, ids, target.init_kv(*ids.shape))
    log_p_NxV = np.asarray(jax.nn.log_softmax(logits_BxNxV[0, :-1], axis=-1))
    return float(-log_p_NxV[np.arange(ids.shape[1] - 1), ids[0, 1:]].mean())


def test_identity(smollm2):
    config = smollm2.config
    assert (config.num_layers, config.model_dim, config.mlp_dim, config.vocab_size) == (30, 576, 1536, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_base, config.norm_eps, config.max_positions) == (1e5, 1e-5, 8192)
    assert config.tied_embeddings and smollm2.eos_token_ids == (2, 0)
    assert smollm2.tokenizer.vocab_size == 49152


def test_likelihood_of_english_and_code(smollm2):
    """Without the un-permuting of the rotary rows they would be 3.97 and 5.90."""
    assert mean_nll(smollm2, PARAGRAPH) == pytest.approx(1.98, abs=0.02)
    code = inspect.getsource(textwrap)[:2500]
    assert mean_nll(smollm2, code) == pytest.approx(2.48, abs=0.15)  # The module differs a little by version.


def test_chat_format_and_answer(smollm2):
    ids = smollm2.chat("What is the capital of France?")
    assert smollm2.tokenizer.render_chat("What is the capital of France?") == CHAT
    assert ids == smollm2.tokenizer.encode(CHAT) and ids[:3] == [1, 9690, 198]
    logits_BxNxV, _, kv = forward(smollm2, [ids], smollm2.init_kv(1, 64))
    kv, answer = commit(kv, np.array([len(ids)], np.int32)), []
    while len(answer) < 12 and (not answer or answer[-1] not in smollm2.eos_token_ids):
        answer.append(int(logits_BxNxV[0, -1].argmax()))
        logits_BxNxV, _, kv = forward(smollm2, [answer[-1:]], kv)
        kv = commit(kv, np.array([1], np.int32))
    assert smollm2.decode(answer) == "The capital of France is Paris." and answer[-1] == 2


def test_text_survives(smollm2):
    for text in (inspect.getsource(textwrap), PARAGRAPH, "naïve 😀 日本語\r\n\t 12345  "):
        assert smollm2.decode(smollm2.encode(text)) == text


def test_bfloat16_is_as_likely(smollm2):
    low = models.load("smollm2-135m", dtype="bfloat16")
    assert mean_nll(low, PARAGRAPH) == pytest.approx(mean_nll(smollm2, PARAGRAPH), abs=0.03)
