"""What a model is and whether its files are whole, from headers alone.

    python -m models.inspect smollm2-135m
    python -m models.inspect path/to/folder_or_file.gguf

No weight is read or dequantized. The exit code is 1 where `models.load` would fail.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from absl import app

import models
from models.checkpoint import Checkpoint, Problems, param_shapes
from models.config import DTYPES, LlamaConfig

_BYTES = dict(zip(DTYPES, (4, 2), strict=True))


@dataclasses.dataclass(frozen=True)
class Report:
    """A checkpoint, and how it differs from what its configuration needs. Printed, it is for people."""

    checkpoint: Checkpoint
    problems: Problems

    @property
    def num_params(self) -> int:
        """Parameters of the model that the configuration describes."""
        return sum(math.prod(shape) for shape in param_shapes(self.checkpoint.config).values())

    def kv_values_per_token(self) -> int:
        """Numbers that the KV buffer holds for one position."""
        config = self.checkpoint.config
        return 2 * config.num_layers * config.num_kv_heads * config.head_dim

    def __str__(self) -> str:
        checkpoint, config = self.checkpoint, self.checkpoint.config
        stored = collections.Counter(tensor.dtype for tensor in checkpoint.tensors.values())
        memory = "; ".join(
            f"{dtype} {self.num_params * size / 1e6:,.1f} MB + {self.kv_values_per_token() * size / 1e3:,.1f} kB"
            for dtype, size in _BYTES.items()
        )
        rows = {
            "model": f"{checkpoint.name} ({checkpoint.format}, family {config.family})",
            "shape": f"{config.num_layers} layers of width {config.model_dim}, MLP {config.mlp_dim}, "
            f"{config.num_heads} heads over {config.num_kv_heads} key/value heads of {config.head_dim}",
            "vocabulary": f"{config.vocab_size}, head {'tied' if config.tied_embeddings else 'of its own'}",
            "positions": f"{config.max_positions}, {_rope(config)}",
            "options": ", ".join(_options(config)) or "none",
            "parameters": f"{self.num_params:,}",
            "stored as": ", ".join(f"{count} {dtype}" for dtype, count in stored.most_common()),
            "memory": f"{memory} (weights + KV per token)",
            "tokenizer": _tokenizer(checkpoint),
            "end tokens": ", ".join(map(str, checkpoint.eos_token_ids)) or "none known",
            "problems": self.problems.describe().replace("\n", "\n" + " " * 12),
        }
        return "\n".join(f"{name:<12}{value}" for name, value in rows.items())


def describe(name_or_path: str | Path) -> Report:
    """Reads the headers of anything that `models.load` takes.

    Raises:
      ModelError: not even the headers can be read, or the model is not supported.
    """
    checkpoint = models.open_checkpoint(name_or_path)
    return Report(checkpoint, checkpoint.problems())


def _rope(config: LlamaConfig) -> str:
    text = f"rotary base {config.rope_base:g}"
    if config.rope_scaling is not None:
        text += f", Llama-3 scaling by {config.rope_scaling.factor:g}"
    if config.rotary_dim != config.head_dim:
        text += f", {config.rotary_dim} of {config.head_dim} dimensions"
    return text


def _options(config: LlamaConfig) -> list[str]:
    flags = ("qk_norm", "attention_bias", "output_bias", "mlp_bias")
    return [flag for flag in flags if getattr(config, flag)]


def _tokenizer(checkpoint: Checkpoint) -> str:
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        return f"none ({checkpoint.tokenizer_problem})"
    kind = "byte-level" if tokenizer.is_byte_level else "sentencepiece"
    template = "with" if tokenizer.chat_template else "without"
    return f"{tokenizer.vocab_size} tokens, {kind}, {template} chat template, {tokenizer.fingerprint[:12]}"


def main(argv: Sequence[str]) -> int:
    if len(argv) != 2:
        raise app.UsageError("give one model: a zoo name, a folder, a .gguf file or a hub id")
    try:
        report = describe(argv[1])
    except models.ModelError as error:
        print(f"cannot load: {error}")
        return 1
    print(report)
    return int(bool(report.problems))


if __name__ == "__main__":
    app.run(main)
