"""The shape of a Llama-family model, and its reading from and writing to a Hugging Face `config.json`.

Whatever changes the numbers is either represented here or refused by name. Keys that do not (dropout, initializer
ranges, cache switches) are not looked at.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.errors import ModelError

DTYPES = ("float32", "bfloat16")


def check_dtype(dtype: str) -> None:
    """Refuses a dtype that models do not compute in.

    Raises:
      ModelError: it is not one of `DTYPES`.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the rotary wavelengths.

    Wavelengths longer than `original_max_positions / low_freq_factor` are stretched by `factor`, those shorter
    than `original_max_positions / high_freq_factor` are kept, and those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def divisors(self, frequencies: np.ndarray) -> np.ndarray:
        """What each rotary frequency (radians per position) is divided by."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = np.clip(keep, 0.0, 1.0)
        return 1.0 / ((1.0 - keep) / self.factor + keep)


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """A decoder of the Llama family.

    Attributes:
      family: Hugging Face's `model_type`, one of `FAMILIES`.
      model_dim, mlp_dim, head_dim: widths of the residual stream, of the SwiGLU's inside and of one head.
      num_kv_heads: key/value heads; each serves `num_heads / num_kv_heads` query heads.
      rope_base: base of the rotary frequencies.
      rope_scaling: Llama 3's scaling of them, or None.
      partial_rotary_factor: the fraction of each head, from its start, that is rotated.
      norm_eps: added to the mean square in every RMSNorm.
      qk_norm: RMSNorm over each query and key head before the rotation.
      attention_bias, output_bias, mlp_bias: biases of q/k/v, of the attention output, of the three MLP products.
      tied_embeddings: the output head is the embedding table.
      max_positions: positions the model was made for.
      dtype: of parameters and activations, "float32" or "bfloat16".
    """

    family: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_dim: int
    mlp_dim: int
    rope_base: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    partial_rotary_factor: float = 1.0
    norm_eps: float = 1e-6
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False
    max_positions: int = 2048
    dtype: str = "float32"

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ModelError(f"family {self.family!r} is not supported; supported: {', '.join(FAMILIES)}")
        check_dtype(self.dtype)
        sizes = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "model_dim", "mlp_dim")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if not 0.0 < self.partial_rotary_factor <= 1.0 or self.rotary_dim % 2 or not self.rotary_dim:
            raise ModelError(
                f"partial_rotary_factor={self.partial_rotary_factor} of head_dim={self.head_dim} rotates "
                f"{self.rotary_dim} dimensions; expected a positive even number "
                "within the head"
            )

    @property
    def q_width(self) -> int:
        """Features of all queries together."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all keys together, and of all values."""
        return self.num_kv_heads * self.head_dim

    @property
    def mlp_groups(self) -> int:
        """Groups that the MLP's features are stored in: the most that whole groups go with key/value heads."""
        return math.gcd(self.num_kv_heads, self.mlp_dim)

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dimensions are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def rope_frequencies(self) -> np.ndarray:
        """[rotary_dim / 2] float32 rotary frequencies, in radians per position."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        frequencies = self.rope_base**-exponents
        if self.rope_scaling is not None:
            frequencies = frequencies / self.rope_scaling.divisors(frequencies)
        return frequencies.astype(np.float32)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], dtype: str = "float32") -> "LlamaConfig":
        """Reads a `config.json`, in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) or 5.

        Args:
          config: the parsed file. Its own dtype says how the weights are stored, and is not used.
          dtype: what to compute in.

        Raises:
          ModelError: a key is missing, or one that changes the numbers has a value that is not supported.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            _refuse("model_type", family, f"supported are {', '.join(FAMILIES)}")
        _refuse_unsupported(config)
        traits = FAMILIES[family]
        num_heads = _required(config, "num_attention_heads")
        model_dim = _required(config, "hidden_size")
        head_dim = config.get("head_dim") or traits.head_dim or _exact_head_dim(model_dim, num_heads)
        num_kv_heads = config.get("num_key_value_heads")
        if num_kv_heads is None:
            # Llama alone defines a missing key as "as many as query heads".
            num_kv_heads = num_heads if family == "llama" else _required(config, "num_key_value_heads")
        bias = bool(config.get("attention_bias", False))
        return cls(
            family=family,
            vocab_size=_required(config, "vocab_size"),
            num_layers=_required(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            model_dim=model_dim,
            mlp_dim=_required(config, "intermediate_size"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            qk_norm=traits.qk_norm,
            attention_bias=traits.qkv_bias or (traits.bias_option and bias),
            output_bias=traits.bias_option and bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_positions=_required(config, "max_position_embeddings"),
            dtype=dtype,
            **_rope_from_hf(config),
        )

    def to_hf(self) -> dict[str, Any]:
        """A `config.json` that `from_hf` reads back as this configuration, and transformers 4 and 5 read.

        Raises:
          ModelError: the family cannot express the configuration.
        """
        rope = {"rope_type": "default"}
        if (scaling := self.rope_scaling) is not None:
            rope = {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
        config = {
            "architectures": [FAMILIES[self.family].architecture],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.model_dim,
            "intermediate_size": self.mlp_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tied_embeddings,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_base,
            "rope_scaling": None if scaling is None else rope,
            "sliding_window": None,
            "torch_dtype": self.dtype,
        }
        if self.partial_rotary_factor != 1.0:
            config["partial_rotary_factor"] = self.partial_rotary_factor
        read_back = type(self).from_hf(config, self.dtype)
        if read_back != self:
            names = [f.name for f in dataclasses.fields(self)]
            differing = [n for n in names if getattr(self, n) != getattr(read_back, n)]
            raise ModelError(f"family {self.family!r} cannot express {', '.join(differing)} of {self}")
        return config


@dataclasses.dataclass(frozen=True)
class _Traits:
    """What transformers fixes for a family outside `config.json`."""

    architecture: str
    head_dim: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    bias_option: bool = False


FAMILIES = {
    "llama": _Traits("LlamaForCausalLM", bias_option=True),
    "mistral": _Traits("MistralForCausalLM"),
    "qwen2": _Traits("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": _Traits("Qwen3ForCausalLM", head_dim=128, qk_norm=True, bias_option=True),
}

_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_LLAMA3_KEYS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def _refuse(key: str, value: Any, advice: str):
    raise ModelError(f"config has {key}={value!r}, which is not supported: {advice}")


def _required(config: Mapping[str, Any], key: str):
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"config needs the whole number {key!r}, got {value!r}; is this a model's config.json?")
    return value


def _exact_head_dim(model_dim: int, num_heads: int) -> int:
    if model_dim % num_heads:
        raise ModelError(
            f"config has hidden_size={model_dim} and num_attention_heads={num_heads}, which does not divide, "
            "and no head_dim"
        )
    return model_dim // num_heads


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        _refuse("hidden_act", config["hidden_act"], "the family's MLP is SwiGLU, hidden_act='silu'")
    if config.get("quantization_config") is not None:
        _refuse("quantization_config", config["quantization_config"], "load an unquantized checkpoint or a GGUF")
    for key in ("num_local_experts", "num_experts"):
        if config.get(key):
            _refuse(key, config[key], "mixtures of experts are another architecture")
    if config.get("is_causal") is False:
        _refuse("is_causal", False, "only causal models can be decoded")
    window = _window(config)
    if window is not None and window < _required(config, "max_position_embeddings"):
        _refuse(
            "sliding_window",
            window,
            f"it is in use, being less than max_position_embeddings={config['max_position_embeddings']}; choose "
            "a model with full attention",
        )


def _window(config: Mapping[str, Any]) -> int | None:
    """The sliding window that some layer uses, or None."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown:
            _refuse("layer_types", sorted(unknown), "layers must be of full attention")
        return config.get("sliding_window") if "sliding_attention" in layer_types else None
    if config["model_type"] in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        used = config.get("use_sliding_window", False) and first < _required(config, "num_hidden_layers")
        return config.get("sliding_window", 4096) if used else None
    # Mistral's window is 4096 where the file does not say otherwise.
    return config.get("sliding_window", 4096 if config["model_type"] == "mistral" else None)


def _rope_from_hf(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary fields of `LlamaConfig` from either spelling."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    rope = {**old, **new}
    for key in ("rope_theta", "partial_rotary_factor"):
        outside = config.get(key)
        if outside is not None and rope.setdefault(key, outside) != outside:
            _refuse(key, outside, f"rope_parameters says {rope[key]!r}; which one is meant?")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        _refuse("rope_type", kind, "supported are 'default' and 'llama3'")
    known = _ROPE_KEYS | (_LLAMA3_KEYS if kind == "llama3" else set())
    if unknown := sorted(key for key, value in rope.items() if key not in known and value is not None):
        _refuse(f"rope_parameters[{unknown[0]!r}]", rope[unknown[0]], f"rope_type {kind!r} has no such key")
    scaling = None
    if kind == "llama3":
        if missing := sorted(_LLAMA3_KEYS - rope.keys()):
            raise ModelError(f"config has rope_type='llama3' without {', '.join(missing)}")
        scaling = Llama3Scaling(
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_positions=int(rope["original_max_position_embeddings"]),
        )
    return {
        "rope_base": float(rope.get("rope_theta", 10000.0)),
        "rope_scaling": scaling,
        "partial_rotary_factor": float(rope.get("partial_rotary_factor", 1.0)),
    }
