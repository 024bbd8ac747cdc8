import dataclasses

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import hf, inspect
from tests.models.common import TINY, VARIANTS, byte_bpe, noisy_target
from tests.models.test_gguf import write

CONFIG = dataclasses.replace(VARIANTS["llama3"], vocab_size=300, partial_rotary_factor=0.5)


@pytest.fixture
def folder(tmp_path):
    target = noisy_target(CONFIG, seed=1)
    target.tokenizer, target.eos_token_ids = byte_bpe(), (2,)
    hf.save(target, tmp_path)
    return tmp_path


def test_a_whole_folder(folder, capsys):
    assert inspect.main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    parameters = 2 * 300 * 24 + 2 * (2 * 24 + 24 * (32 + 16 + 16 + 32) + 3 * 24 * 40) + 24
    for part in (
        f"model       {folder} (Hugging Face folder, family llama)",
        "2 layers of width 24, MLP 40, 4 heads over 2 key/value heads of 8",
        "300, head of its own",
        "64, rotary base 500, Llama-3 scaling by 8, 4 of 8 dimensions",
        f"parameters  {parameters:,}\n",
        "stored as   21 F32",
        f"float32 {parameters * 4 / 1e6:.1f} MB + 0.3 kB; bfloat16 {parameters * 2 / 1e6:.1f} MB + 0.1 kB",
        "265 tokens, byte-level, with chat template",
        "end tokens  2",
        "problems    none",
    ):
        assert part in text


def test_a_folder_with_wrong_keys_is_described_with_them(folder, capsys):
    tensors = load_file(folder / hf.SINGLE)
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = np.zeros((3, 24), np.float32)
    save_file(tensors, folder / hf.SINGLE)
    (folder / "tokenizer.json").unlink()
    assert inspect.main(["inspect", str(folder)]) == 1
    text = capsys.readouterr().out
    assert "missing (1): model.norm.weight\n" in text
    assert "misshapen (1): lm_head.weight is [3, 24], expected [300, 24]" in text
    assert "none (" in text and "has no tokenizer.json" in text


def test_what_cannot_be_opened_is_an_error_message(tmp_path, capsys):
    assert inspect.main(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith(f"cannot load: {tmp_path} is not a model folder")


def test_a_gguf_file_is_not_dequantized(tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", noisy_target(TINY))
    monkeypatch.delattr(gguf.quants, "dequantize")
    assert "GGUF, family llama" in str(inspect.describe(path))
