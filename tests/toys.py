"""Toys shared by tests."""

import jax

from spec_jax import SamplingParams, decode, testing
from spec_jax.testing import ScriptLM


class ByteTokenizer:
    """A tokenizer of given byte strings; text is encoded byte by byte."""

    def __init__(self, pieces, fingerprint="toy"):
        self.pieces = pieces
        self.fingerprint = fingerprint

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(bytes([byte])) for byte in text.encode()]


BYTES = [bytes([byte]) for byte in range(256)]


_SCRIPT = ScriptLM([0] * 64, vocab_size=256)
_SCRIPT.tokenizer = ByteTokenizer(BYTES)


def text_script(text: bytes) -> ScriptLM:
    """A target that writes the given bytes and then zeros, whatever the prompt.

    One object, so that its programs are compiled once; only its parameters change.
    """
    _SCRIPT.params = ScriptLM(list(text.ljust(64, b"\0")), vocab_size=256).params
    return _SCRIPT


def run_cycles(decoder, prompts, speculate, params=None):
    """The state after prefill and the given cycles."""
    request = decoder.request(prompts, params or SamplingParams(temperature=0.0, max_new_tokens=40))
    state = decode.prefill(decoder.plan, decoder.params, decoder.start(request))
    for flag in speculate:
        state = step(decoder, state, flag)
    return state


def step(decoder, state, speculate=True):
    """One cycle, its invariants checked."""
    before = jax.device_get(state)
    state = decode.step(decoder.plan, decoder.params, state, speculate)
    testing.assert_invariants(before, state)
    return state
