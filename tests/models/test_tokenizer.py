import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, normalizers

from models.errors import ModelError
from models.tokenizer import Tokenizer
from tests.models.common import CHATML, SPECIAL, byte_bpe

BYTE_BPE = byte_bpe()


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: U+2581 for spaces, bytes as <0xNN>."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {token: id for id, token in enumerate(tokens)},
            [("▁", "h"), ("▁h", "i")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend, None, {"eos_token": "</s>"})


@settings(deadline=None)
@given(st.text().filter(lambda text: not any(special in text for special in SPECIAL)))
def test_text_survives_encoding_and_decoding(text):
    assert BYTE_BPE.decode(BYTE_BPE.encode(text)) == text


def test_every_byte_has_a_token():
    assert BYTE_BPE.is_byte_level
    assert {BYTE_BPE.token_bytes(id) for id in range(3, 259)} == {bytes([b]) for b in range(256)}


def test_a_character_spread_over_tokens_comes_out_whole_and_a_part_of_it_as_replacement():
    ids = BYTE_BPE.encode("a😀")
    assert len(ids) == 5
    assert b"".join(map(BYTE_BPE.token_bytes, ids)) == "a😀".encode()
    assert BYTE_BPE.decode(ids[:3]) == "a\ufffd"


def test_special_tokens_and_ids_outside_the_vocabulary_are_no_bytes():
    end, added = BYTE_BPE.encode("<|im_end|><tool>é")
    assert BYTE_BPE.token_bytes(end) == b""
    assert BYTE_BPE.token_bytes(added) == "<tool>é".encode()  # Added, but not special: plain text.
    for outside in (-1, BYTE_BPE.vocab_size, 10**6):
        assert BYTE_BPE.token_bytes(outside) == b""


def test_merged_tokens_are_the_bytes_of_their_parts():
    (hello,) = BYTE_BPE.encode("hello")
    assert BYTE_BPE.token_bytes(hello) == b"hello"
    assert b" t" in map(BYTE_BPE.token_bytes, BYTE_BPE.encode("hello to"))


def test_sentencepiece_vocabularies():
    tokenizer = sentencepiece()
    assert not tokenizer.is_byte_level and tokenizer.eos_token_ids == (2,)
    ids = tokenizer.encode("hi hi é")
    assert tokenizer.decode(ids) == " hi hi é"  # The prefixed space is part of the first token's bytes.
    assert tokenizer.token_bytes(tokenizer.encode("é")[-1]) == b"\xa9"
    assert tokenizer.token_bytes(0) == b""


def test_the_fingerprint_is_of_the_meaning_of_ids():
    other = byte_bpe(chat_template=None, special_tokens={})
    assert other.fingerprint == BYTE_BPE.fingerprint != sentencepiece().fingerprint
    grown = byte_bpe()
    grown._backend.add_tokens(["new"])
    assert grown.fingerprint != BYTE_BPE.fingerprint


def test_saved_truncation_does_not_cut_text(tmp_path):
    tokenizer = byte_bpe()
    tokenizer._backend.enable_truncation(2)
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("a long text")) > 2


def test_a_folder_round_trip(tmp_path):
    BYTE_BPE.save(tmp_path)
    read = Tokenizer.from_folder(tmp_path)
    assert read.fingerprint == BYTE_BPE.fingerprint
    assert (read.chat_template, read.special_tokens, read.eos_token_ids) == (
        CHATML,
        BYTE_BPE.special_tokens,
        (2,),
    )


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": "T", "eos_token": {"content": "<|im_end|>", "lstrip": False}},
        {"chat_template": [{"name": "tools", "template": "U"}, {"name": "default", "template": "T"}]},
    ],
)
def test_spellings_of_tokenizer_config(tmp_path, config):
    BYTE_BPE.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | config))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.chat_template, tokenizer.eos_token_ids) == ("T", (2,))
    (tmp_path / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_folder(tmp_path).chat_template == "J"


def test_broken_tokenizer_files_are_named(tmp_path):
    with pytest.raises(ModelError, match="no tokenizer.json$"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match="tokenizer.model alone is not read"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)
    BYTE_BPE.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer_config.json is not readable as JSON"):
        Tokenizer.from_folder(tmp_path)
