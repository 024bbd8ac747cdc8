"""A tokenizer from GGUF metadata."""

from collections.abc import Callable
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

from models.errors import ModelError
from models.tokenizer import Tokenizer

# GGUF's token types.
CONTROL, USER_DEFINED = 3, 4

# Tokens that end a text whatever the metadata says; chat models end turns and documents with different ones.
_END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: str):
    words = pre_tokenizers.Split(Regex(_WORDS + digits + _REST), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS = {
    "gpt-2": _gpt2,
    "default": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
}


def build(get: Callable[..., Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes.

    Args:
      get: metadata by key, with an optional default.

    Raises:
      ModelError: its kind is not supported, with the reason.
    """
    model, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise ModelError(
            f"the GGUF file's tokenizer is of kind {model!r}; only byte-level BPE ('gpt2') is read from GGUF, use the "
            "model's Hugging Face folder for text"
        )
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"the GGUF file's tokenizer splits text by the rules {pre!r}; known are {', '.join(_PRE_TOKENIZERS)}, use "
            "the model's Hugging Face folder for text"
        )
    tokens, merges = (get(f"tokenizer.ggml.{key}") for key in ("tokens", "merges"))
    if not tokens or merges is None:
        raise ModelError("the GGUF file lacks tokenizer.ggml.tokens or tokenizer.ggml.merges: it has no tokenizer")
    types = get("tokenizer.ggml.token_type", [1] * len(tokens))
    vocab = {token: id for id, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    fit = all(len(pair) == 2 and {*pair, "".join(pair)} <= vocab.keys() for pair in pairs)
    if len(types) != len(tokens) or not fit:
        raise ModelError("the GGUF file's tokenizer is damaged: its tokens, token types and merges do not fit")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, types, strict=True))
    backend.add_special_tokens([token for token, kind in typed if kind == CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == USER_DEFINED])
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (id := get(f"tokenizer.ggml.{key}_token_id")) is not None and id < len(tokens):
            special[f"{name}_token"] = tokens[id]
    if get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocab[bos])]
        )
    return Tokenizer(backend, get("tokenizer.chat_template"), special, eos_token_ids(get))


def eos_token_ids(get: Callable[..., Any]) -> tuple[int, ...]:
    """The tokens that end a text: those the metadata names, and control tokens known to end turns or documents."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [get(f"tokenizer.ggml.{key}") for key in keys]
    tokens = get("tokenizer.ggml.tokens", [])
    types = get("tokenizer.ggml.token_type", [1] * len(tokens))
    pairs = enumerate(zip(tokens, types, strict=False))
    known = [id for id, (token, kind) in pairs if kind == CONTROL and token in _END_TOKENS]
    return tuple(dict.fromkeys(int(id) for id in (*named, *known) if id is not None))
