"""GGUF files of the Llama family: metadata, tokenizer and dequantized weights."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from models import gguf_tokenizer
from models.checkpoint import GGUF, Checkpoint, StoredTensor, stored_name
from models.config import Llama3Scaling, LlamaConfig
from models.errors import ModelError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"


def open_file(path: Path, dtype: str = "float32") -> Checkpoint:
    """Reads the header of a GGUF file; weights are dequantized when they are asked for.

    Raises:
      ModelError: it is no whole GGUF file, or its model is not supported.
    """
    reader = _reader(path)
    config = _config(path, reader, dtype)
    permuted = {}
    if _value(reader, "general.architecture") == "llama":
        # Only this architecture stores the rows of q and k interleaved for its rotation.
        for layer in range(config.num_layers):
            for kind in ("weight", "bias"):
                permuted[stored_name(f"layers.{layer}.attention.q.{kind}", GGUF)] = config.num_heads
                permuted[stored_name(f"layers.{layer}.attention.k.{kind}", GGUF)] = config.num_kv_heads
    tensors = {
        tensor.name: StoredTensor(
            shape=_shape(tensor),
            dtype=tensor.tensor_type.name,
            read=functools.partial(_read, path, tensor, permuted.get(tensor.name)),
        )
        for tensor in reader.tensors
        if tensor.name != ROPE_FACTORS
    }
    tokenizer, tokenizer_problem = None, None
    try:
        tokenizer = gguf_tokenizer.build(functools.partial(_value, reader))
    except ModelError as error:
        tokenizer_problem = str(error)
    return Checkpoint(
        name=_value(reader, "general.name", path.stem),
        format="GGUF",
        config=config,
        tensors=tensors,
        column=GGUF,
        tokenizer=tokenizer,
        tokenizer_problem=tokenizer_problem,
        eos_token_ids=gguf_tokenizer.eos_token_ids(functools.partial(_value, reader)),
    )


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes GGUF's interleaving of each head's two halves, so that the half-split rotation applies.

    Args:
      rows: [num_heads * head_dim, ...] of a q or k weight or bias.
      num_heads: heads among the rows.
    """
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


class _Reader(gguf.GGUFReader):
    """Slices its mapped file as a plain array: slices of `np.memmap` cost twice the time of all other parsing."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)


def _reader(path: Path) -> gguf.GGUFReader:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
    try:
        return _Reader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError, MemoryError) as error:
        # The reader meets the end of a truncated file in whatever it is doing.
        raise ModelError(
            f"{path} is not a whole GGUF file ({type(error).__name__}: {error}); it has {path.stat().st_size} "
            "bytes, download it again"
        ) from error


def _value(reader: gguf.GGUFReader, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    try:
        return default if field is None else field.contents()
    except UnicodeDecodeError as error:
        raise ModelError(f"the GGUF file's {key} is damaged ({error}); download it again") from error


def _shape(tensor) -> tuple[int, ...]:
    return tuple(reversed([int(size) for size in tensor.shape]))


def _read(path: Path, tensor, num_heads: int | None) -> np.ndarray:
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(_shape(tensor))
    except NotImplementedError as error:
        raise ModelError(
            f"{path} stores {tensor.name} as {tensor.tensor_type.name}, which cannot be dequantized here; convert "
            "the file to Q8_0, F16 or another common type"
        ) from error
    return values if num_heads is None else unpermute(values, num_heads)


def _config(path: Path, reader: gguf.GGUFReader, dtype: str) -> LlamaConfig:
    arch = _value(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(f"{path} has architecture {arch!r}; supported are {', '.join(ARCHITECTURES)}")
    shapes = {tensor.name: _shape(tensor) for tensor in reader.tensors}

    def get(key, default=None):
        value = _value(reader, f"{arch}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{path} has {arch}.{key}={value}: layers that differ are not supported")
            value = value[0]
        return value

    def need(key):
        value = get(key)
        if value is None:
            raise ModelError(f"{path} lacks the metadata key {arch}.{key}; is it a language model?")
        return value

    def refuse(key, value, advice):
        raise ModelError(f"{path} has {arch}.{key}={value!r}, which is not supported: {advice}")

    if _value(reader, "split.count", 0) > 1:
        raise ModelError(f"{path} is one of {_value(reader, 'split.count')} parts; merge them with gguf-split")
    if get("expert_count", 0):
        refuse("expert_count", get("expert_count"), "mixtures of experts are another architecture")
    if get("rope.scaling.type", "none") != "none":
        refuse("rope.scaling.type", get("rope.scaling.type"), "supported are 'none' and Llama-3 factors")
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if get(key, 1.0) not in (0.0, 1.0):
            refuse(key, get(key), "positions must not be scaled")
    if not get("attention.causal", True):
        refuse("attention.causal", False, "only causal models can be decoded")
    max_positions = int(need("context_length"))
    window = get("attention.sliding_window", 0)
    if 0 < window < max_positions:
        refuse("attention.sliding_window", window, "choose a model with full attention")
    model_dim, num_heads = int(need("embedding_length")), int(need("attention.head_count"))
    head_dim = int(get("attention.key_length", model_dim // num_heads))
    if get("attention.value_length", head_dim) != head_dim:
        refuse("attention.value_length", get("attention.value_length"), f"keys have {head_dim}")
    rotary_dim = int(get("rope.dimension_count", head_dim))
    if arch == "llama" and rotary_dim != head_dim:
        refuse("rope.dimension_count", rotary_dim, f"with interleaved rows it must be the head's {head_dim}")
    embedding = shapes.get("token_embd.weight")
    config = LlamaConfig(
        family=arch,
        vocab_size=embedding[0] if embedding else int(need("vocab_size")),
        num_layers=int(need("block_count")),
        num_heads=num_heads,
        num_kv_heads=int(get("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        model_dim=model_dim,
        mlp_dim=int(need("feed_forward_length")),
        rope_base=_decimal(get("rope.freq_base", 10000.0)),
        partial_rotary_factor=rotary_dim / head_dim,
        norm_eps=_decimal(need("attention.layer_norm_rms_epsilon")),
        qk_norm=arch == "qwen3",
        attention_bias=arch == "qwen2" or "blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
        tied_embeddings="output.weight" not in shapes,
        max_positions=max_positions,
        dtype=dtype,
    )
    return _with_rope_factors(path, reader, config)


def _decimal(value: float) -> float:
    """A float32 as the decimal number it was written as: 1e-05 and not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _with_rope_factors(path: Path, reader: gguf.GGUFReader, config: LlamaConfig) -> LlamaConfig:
    """Recognizes the tensor of Llama-3 factors, which GGUF stores in place of the scaling's parameters."""
    factors = next((t for t in reader.tensors if t.name == ROPE_FACTORS), None)
    if factors is None:
        return config
    stored = np.asarray(factors.data, np.float32).reshape(-1)
    frequencies = config.rope_frequencies()
    # The longest wavelengths are stretched by the whole factor; all released models share the other parameters.
    scaling = Llama3Scaling(float(stored[-1]), 1.0, 4.0, 8192)
    if stored.shape != frequencies.shape or not np.allclose(scaling.divisors(frequencies), stored, rtol=1e-3):
        raise ModelError(
            f"{path} has rotary factors ({ROPE_FACTORS}) that are not those of Llama 3.1-3.3 (low 1, high 4, "
            "original length 8192); other scalings are not supported"
        )
    return dataclasses.replace(config, rope_scaling=scaling)
