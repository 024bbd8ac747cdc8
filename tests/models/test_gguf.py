import dataclasses

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import models
from models.checkpoint import GGUF, flat_params, stored_name
from models.config import Llama3Scaling
from models.errors import ModelError
from models.gguf import unpermute
from tests.models.common import CHATML, SPECIAL, TINY, VARIANTS, assert_same_params, byte_bpe_parts, noisy_target

Q8 = dataclasses.replace(TINY, model_dim=32, head_dim=32, mlp_dim=64, num_heads=2, num_kv_heads=1)


def permute(rows, num_heads):
    """GGUF's interleaving of each head's halves: row 2i is row i, row 2i + 1 is row half + i."""
    heads = np.split(rows, num_heads)
    return np.concatenate([np.stack(np.split(head, 2), axis=1).reshape(head.shape) for head in heads])


def write(path, target, arch="llama", types=None, extra=None, tensors=None, pre="gpt-2", tokens=True):
    """Writes a target as a GGUF file.

    `types` names tensors to quantize, `extra` metadata (None removes a default), `tensors` more tensors.
    """
    config = target.config
    writer = gguf.GGUFWriter(path, arch)
    metadata = {
        "block_count": config.num_layers,
        "context_length": config.max_positions,
        "embedding_length": config.model_dim,
        "feed_forward_length": config.mlp_dim,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_base,
        "rope.dimension_count": config.rotary_dim,
    }
    for key, value in (metadata | (extra or {})).items():
        add = {
            bool: writer.add_bool,
            int: writer.add_uint32,
            float: writer.add_float32,
            str: writer.add_string,
            list: writer.add_array,
        }
        if value is not None:
            add[type(value)](key if key.startswith(("split", "tokenizer")) else f"{arch}.{key}", value)
    if tokens:
        vocab, merges = byte_bpe_parts()
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(vocab)
        writer.add_token_types([3 if token in SPECIAL else 1 for token in vocab])
        writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(CHATML)
    for name, value in flat_params(target.config, target.params).items():
        array, stored = np.asarray(value), stored_name(name, GGUF)
        if arch == "llama" and (".attention.q." in name or ".attention.k." in name):
            array = permute(array, config.num_heads if ".q." in name else config.num_kv_heads)
        kind = (types or {}).get(stored, Type.F32)
        if kind is Type.F32:
            writer.add_tensor(stored, array)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (tensors or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_unpermute_undoes_the_interleaving():
    rows = np.arange(24).reshape(12, 2)
    np.testing.assert_array_equal(permute(rows, 2)[:, 0] // 2, [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])
    np.testing.assert_array_equal(unpermute(permute(rows, 2), 2), rows)
    np.testing.assert_array_equal(unpermute(permute(rows[:, 0], 2), 2), rows[:, 0])


@pytest.mark.parametrize(
    "name, arch",
    [
        ("llama2", "llama"),
        ("llama_biases", "llama"),
        ("smollm2", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("partial", "qwen3"),
    ],
)
def test_a_written_file_loads_as_the_same_model(name, arch, tmp_path):
    config = dataclasses.replace(VARIANTS[name], family=arch, qk_norm=arch == "qwen3")
    target = noisy_target(config)
    again = models.load(write(tmp_path / "model.gguf", target, arch))
    assert again.config == config
    assert_same_params(again, target)
    assert again.eos_token_ids == (2, 0)


@pytest.mark.smoke
def test_quantized_tensors_are_dequantized(tmp_path):
    target = noisy_target(Q8)
    kinds = [Type.Q8_0, Type.Q4_1, Type.F16, Type.BF16]
    names = [stored_name(p, GGUF) for p, v in flat_params(target.config, target.params).items() if v.ndim == 2]
    types = {name: kinds[i % len(kinds)] for i, name in enumerate(names)}
    again = models.load(write(tmp_path / "model.gguf", target, types=types), dtype="bfloat16")
    assert again.config == dataclasses.replace(Q8, dtype="bfloat16")
    # Q4_1 has steps of a fifteenth of a block's range.
    assert_same_params(again, target, atol=0.05)
    assert_same_params(models.load(tmp_path / "model.gguf"), again, rtol=2**-8)


def test_llama3_factors_are_recognized_and_others_refused(tmp_path):
    scaling = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    config = dataclasses.replace(TINY, rope_base=5e5, head_dim=32)
    factors = scaling.divisors(config.rope_frequencies()).astype(np.float32)
    path = write(tmp_path / "a.gguf", noisy_target(config), tensors={"rope_freqs.weight": factors})
    assert models.load(path).config == dataclasses.replace(config, rope_scaling=scaling)
    factors[1] *= 2
    path = write(tmp_path / "b.gguf", noisy_target(config), tensors={"rope_freqs.weight": factors})
    with pytest.raises(ModelError, match="rope_freqs.weight.* not those of Llama 3.1"):
        models.load(path)


@pytest.mark.parametrize(
    "arch, extra, message",
    [
        ("gemma3", {}, "architecture 'gemma3'; supported are llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "expert_count=8"),
        ("llama", {"rope.scaling.type": "yarn"}, "rope.scaling.type='yarn'"),
        ("llama", {"rope.scaling.factor": 4.0}, "rope.scaling.factor=4.0"),
        ("qwen2", {"attention.causal": False}, "attention.causal=False"),
        ("llama", {"attention.sliding_window": 16}, "sliding_window=16"),
        ("llama", {"rope.dimension_count": 4}, "rope.dimension_count=4"),
        ("llama", {"attention.value_length": 4}, "value_length=4"),
        ("llama", {"attention.head_count_kv": [2, 1]}, r"head_count_kv=\[2, 1\]: layers that differ"),
        ("llama", {"block_count": None}, "lacks the metadata key llama.block_count"),
        ("llama", {"split.count": 3}, "one of 3 parts"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(arch, extra, message, tmp_path):
    path = write(tmp_path / "model.gguf", noisy_target(TINY), arch, extra=extra)
    with pytest.raises(ModelError, match=message):
        models.load(path)


def test_missing_and_unexpected_tensors_are_named(tmp_path):
    path = write(
        tmp_path / "model.gguf", noisy_target(TINY), extra={"block_count": 1}, tensors={"cls.weight": np.zeros(3)}
    )
    with pytest.raises(ModelError, match=r"unexpected \(10\): blk.1.attn_output.weight.*\.\.\.$"):
        models.load(path)
    path = write(tmp_path / "more.gguf", noisy_target(TINY), extra={"block_count": 3})
    with pytest.raises(ModelError, match=r"missing \(9\): blk.2.attn_k.weight"):
        models.load(path)


def test_truncated_and_foreign_files_are_named(tmp_path):
    path = write(tmp_path / "model.gguf", noisy_target(TINY))
    whole = path.read_bytes()
    for size in (4, 20, 60, 1000, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=f"not a whole GGUF file.*it has {size} bytes, download it again"):
            models.load(path)
    for content in (b"", b"PK\x03\x04zip"):
        path.write_bytes(content)
        with pytest.raises(ModelError, match="not a GGUF file: it starts with b.*expected b'GGUF'"):
            models.load(path)
    path.write_bytes(whole[:4] + b"\xff\xff\x00\x00" + whole[8:])
    with pytest.raises(ModelError, match="not a whole GGUF file.*version"):
        models.load(path)


def test_damaged_text_is_named(tmp_path):
    path = write(tmp_path / "model.gguf", noisy_target(TINY))
    path.write_bytes(path.read_bytes().replace(b"<|endoftext|>", b"<|end\xffftext|>"))
    with pytest.raises(ModelError, match="tokenizer.ggml.tokens is damaged"):
        models.load(path)
