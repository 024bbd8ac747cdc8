"""Toys shared by tests."""

import numpy as np

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


def text_script(text: bytes) -> ScriptLM:
    """A target that writes the given bytes, whatever the prompt."""
    target = ScriptLM(np.frombuffer(text, np.uint8), vocab_size=256)
    target.tokenizer = ByteTokenizer(BYTES)
    return target
