"""A checkpoint as its headers describe it, and the strict filling of a model from it.

Every format (`hf`, `gguf`) reads its headers into a `Checkpoint`; what is checked against the model and how the
values get there is here, once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import LlamaConfig
from models.errors import ModelError
from models.linear import input_first
from models.llama import Llama

# A model's parameters, an `nnx.State`. (Its own annotations are deprecated ones, on which beartype warns.)
Params = Any

# Our names of the modules, and Hugging Face's and GGUF's; a parameter adds ".weight" or ".bias".
_TOP = {
    "embedding": ("model.embed_tokens", "token_embd"),
    "norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
}
_BLOCK = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention.q": ("self_attn.q_proj", "attn_q"),
    "attention.k": ("self_attn.k_proj", "attn_k"),
    "attention.v": ("self_attn.v_proj", "attn_v"),
    "attention.o": ("self_attn.o_proj", "attn_output"),
    "attention.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "mlp.gate": ("mlp.gate_proj", "ffn_gate"),
    "mlp.up": ("mlp.up_proj", "ffn_up"),
    "mlp.down": ("mlp.down_proj", "ffn_down"),
}
_BLOCK_PREFIXES = ("model.layers", "blk")
HF, GGUF = 0, 1  # columns of the tables


def stored_name(path: str, column: int) -> str:
    """A parameter's name in a file: `layers.3.mlp.up.weight` is `model.layers.3.mlp.up_proj.weight` to HF."""
    module, kind = path.rsplit(".", 1)
    if not module.startswith("layers."):
        return f"{_TOP[module][column]}.{kind}"
    _, layer, module = module.split(".", 2)
    return f"{_BLOCK_PREFIXES[column]}.{layer}.{_BLOCK[module][column]}.{kind}"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor that a file's header announces: `read` gets its values, in the model's orientation."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Problems:
    """How a checkpoint differs from what its configuration needs."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.misshapen)

    def describe(self, limit: int | None = None) -> str:
        """The kinds of problems, one a line, with at most `limit` names each."""
        lines = [
            f"{kind} ({len(names)}): {', '.join(names[:limit])}{', ...' if len(names[:limit]) < len(names) else ''}"
            for kind, names in vars(self).items()
            if names
        ]
        return "\n".join(lines) or "none"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Everything known about a model before its weights are read.

    Attributes:
      name: for people.
      format: "Hugging Face folder" or "GGUF".
      config: the model's configuration.
      tensors: by the file's own names; buffers that are no parameters are left out.
      copies: tensors that may be there if they equal another, e.g. the head of a model with a tied head.
      column: which naming the file uses, `HF` or `GGUF`.
      tokenizer: `models.tokenizer.Tokenizer`, or None.
      tokenizer_problem: why there is no tokenizer.
      eos_token_ids: tokens that end a text.
    """

    name: str
    format: str
    config: LlamaConfig
    tensors: Mapping[str, StoredTensor]
    column: int
    tokenizer: Any
    tokenizer_problem: str | None
    eos_token_ids: tuple[int, ...]
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def problems(self) -> Problems:
        """Compares names and shapes with what the configuration needs."""
        needed = {stored_name(path, self.column): shape for path, shape in param_shapes(self.config).items()}
        common = [name for name in needed if name in self.tensors]
        return Problems(
            missing=tuple(name for name in needed if name not in self.tensors),
            unexpected=tuple(name for name in self.tensors if name not in needed and name not in self.copies),
            misshapen=tuple(
                f"{name} is {list(self.tensors[name].shape)}, expected {list(needed[name])}"
                for name in common
                if self.tensors[name].shape != needed[name]
            ),
        )

    def params(self) -> Params:
        """Reads all weights into the configuration's dtype, one tensor at a time.

        Raises:
          ModelError: a key is missing, unexpected or misshapen (all of them are named), or a copy differs.
        """
        if problems := self.problems():
            hint = ""
            if stored_name("head.weight", self.column) in problems.missing:
                hint = " (the head may be left out only where config.json says tie_word_embeddings: true)"
            raise ModelError(
                f"{self.name} does not hold the weights that its config describes{hint}:\n{problems.describe(limit=8)}"
            )
        for copy, original in self.copies.items():
            if not np.array_equal(self.tensors[copy].read(), self.tensors[original].read()):
                raise ModelError(
                    f"{self.name} ties {copy} to {original}, but holds different values for them; correct "
                    "tie_word_embeddings in config.json"
                )
        return filled_params(self.config, lambda path: self.tensors[stored_name(path, self.column)].read())


def filled_params(config: LlamaConfig, value_of: Callable[[str], Any]) -> Params:
    """Parameters of a configuration, in its dtype, from the arrays by path that `flat_params` would give."""
    _, state = nnx.split(Llama(config))
    dtype = jnp.dtype(config.dtype)

    def value(path):
        groups, parts = _parts(config, path)
        arrays = [np.asarray(value_of(part)).astype(dtype, copy=False) for part in parts]
        if len(arrays) > 1:
            shape = arrays[0].shape[1:]
            arrays = [array.reshape(groups, -1, *shape) for array in arrays]
            arrays = [np.concatenate(arrays, axis=1).reshape(-1, *shape)]
        return _oriented(path, arrays[0])

    # A copy: on CPU the array could otherwise be the mapped file itself.
    filled = [(path, variable.replace(jnp.array(value(path)))) for path, variable in nnx.to_flat_state(state)]
    return nnx.from_flat_state(filled)


def flat_params(config: LlamaConfig, params: Params) -> dict[str, Any]:
    """A model's arrays as files have them, by dotted path, e.g. `layers.3.mlp.up.weight`; matrices are [out, in]."""
    flat = {}
    for path, leaf in nnx.to_flat_state(params):
        array, (groups, parts) = _oriented(path, leaf.get_value()), _parts(config, path)
        if len(parts) == 1:
            flat |= {part: array for part in parts}
            continue
        grouped, start = array.reshape(groups, -1, *array.shape[1:]), 0
        for part, width in parts.items():
            flat[part] = grouped[:, start : start + width].reshape(-1, *array.shape[1:])
            start += width
    return flat


def param_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Path and shape of every array that `flat_params` gives for a configuration; allocates nothing."""
    _, state = nnx.split(Llama(config))
    shapes = jax.eval_shape(functools.partial(flat_params, config), state)
    return {path: shape.shape for path, shape in shapes.items()}


def _parts(config: LlamaConfig, path: tuple) -> tuple[int, dict[str, int]]:
    """In how many groups one parameter's outputs come, and the arrays side by side in each: paths and widths there."""
    *outer, module, kind = map(str, path)
    match module:
        case "qkv":
            groups, widths = config.num_kv_heads, {"q": config.q_width, "k": config.kv_width, "v": config.kv_width}
        case "gate_up":
            groups, widths = config.mlp_groups, {"gate": config.mlp_dim, "up": config.mlp_dim}
        case _:
            groups, widths = 1, {module: 0}
    return groups, {".".join([*outer, part, kind]): width // groups for part, width in widths.items()}


def _oriented(path: tuple, array):
    """A layer's matrix from [out, in] to the way the model stores it, or back."""
    transposed = path[0] == "layers" and array.ndim == 2 and input_first(array.dtype)
    return array.T if transposed else array
