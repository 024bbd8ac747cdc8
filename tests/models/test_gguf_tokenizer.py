import pytest

from models.errors import ModelError
from models.gguf_tokenizer import build, eos_token_ids
from tests.models.common import CHATML, SPECIAL, byte_bpe, byte_bpe_parts

TEXT = "He's 1234 hello  to\n\n  the e\u0301nd!!"


def metadata(**changes):
    tokens, merges = byte_bpe_parts()
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, "<plain>"],
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens] + [4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }
    values |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return values.get


def pieces(tokenizer, text):
    return [part for part, _ in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]


def test_it_is_the_tokenizer_that_was_written():
    tokenizer, original = build(metadata()), byte_bpe()
    for text in (TEXT, "<|im_start|>user\nhello<|im_end|>"):
        assert tokenizer.encode(text) == original.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == original.decode(original.encode(text))
    assert tokenizer.render_chat("hello") == original.render_chat("hello")
    (plain,) = tokenizer.encode("<plain>")
    assert tokenizer.token_bytes(plain) == b"<plain>"


@pytest.mark.parametrize(
    "pre, expected",
    [
        ("gpt-2", ["It", "'s", "Ġ1234", "Ġa", "ĠĠ", "Ġb", "Ċ"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġa", "ĠĠ", "Ġb", "Ċ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "4", "Ġa", "ĠĠ", "Ġb", "Ċ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "Ġa", "ĠĠ", "Ġb", "Ċ"]),
    ],
)
def test_splitting_rules(pre, expected):
    assert pieces(build(metadata(pre=pre)), "It's 1234 a   b\n") == expected


def test_the_beginning_token_is_added_where_the_file_or_llama3_says_so():
    assert build(metadata()).encode("he")[0] != 1
    assert build(metadata(add_bos_token=True)).encode("he")[0] == 1
    assert build(metadata(pre="llama-bpe")).encode("he")[0] == 1
    assert build(metadata(pre="llama-bpe", add_bos_token=False)).encode("he")[0] != 1
    assert build(metadata(add_bos_token=True)).encode("he", add_special_tokens=False)[0] != 1


def test_unicode_is_composed_for_qwen_only():
    decomposed = "e\u0301"
    assert build(metadata(pre="qwen2")).encode(decomposed) == build(metadata()).encode("\u00e9")
    assert build(metadata()).decode(build(metadata()).encode(decomposed)) == decomposed


def test_end_tokens_are_those_named_and_the_known_control_tokens():
    assert eos_token_ids(metadata()) == (2, 0)
    assert eos_token_ids(metadata(eot_token_id=7)) == (2, 7, 0)
    assert eos_token_ids({}.get) == ()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model": "llama"}, "of kind 'llama'; only byte-level BPE"),
        ({"model": None}, "of kind None"),
        ({"pre": "tekken"}, "by the rules 'tekken'; known are gpt-2"),
        ({"merges": None}, "lacks tokenizer.ggml.tokens or tokenizer.ggml.merges"),
        ({"merges": ["he zz"]}, "do not fit"),
        ({"token_type": [1]}, "do not fit"),
    ],
)
def test_tokenizers_that_cannot_be_built_say_why(changes, message):
    with pytest.raises(ModelError, match=message):
        build(metadata(**changes))
