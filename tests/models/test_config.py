import dataclasses

import numpy as np
import pytest

from models.config import Llama3Scaling, LlamaConfig
from models.errors import ModelError
from tests.models.common import SCALING, TINY, VARIANTS

# The parts of published config.json files that matter, as published.
LLAMA2 = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA31 = LLAMA2 | {
    "attention_bias": False,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
MISTRAL = LLAMA2 | {
    "model_type": "mistral",
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
QWEN25 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3 = QWEN25 | {
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "sliding_window": None,
}


@pytest.mark.parametrize(
    "raw, expected",
    [
        (LLAMA2, {"rope_base": 10000.0, "head_dim": 128, "norm_eps": 1e-5, "tied_embeddings": False}),
        (LLAMA31, {"rope_scaling": Llama3Scaling(8.0, 1.0, 4.0, 8192), "rope_base": 5e5, "num_kv_heads": 8}),
        (MISTRAL, {"rope_base": 1e6, "attention_bias": False}),
        (QWEN25, {"attention_bias": True, "output_bias": False, "head_dim": 64, "tied_embeddings": True}),
        (QWEN3, {"qk_norm": True, "attention_bias": False, "head_dim": 128, "norm_eps": 1e-6}),
    ],
)
def test_published_configs(raw, expected):
    config = LlamaConfig.from_hf(raw)
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.family == raw["model_type"] and config.num_layers == raw["num_hidden_layers"]


@pytest.mark.parametrize("raw", [LLAMA2, LLAMA31, QWEN25])
def test_the_new_spelling_of_rope_reads_as_the_old_one(raw):
    new = {key: value for key, value in raw.items() if key not in ("rope_theta", "rope_scaling")}
    rope = raw.get("rope_scaling") or {"rope_type": "default"}
    new["rope_parameters"] = rope | {"rope_theta": raw.get("rope_theta", 10000.0)}
    assert LlamaConfig.from_hf(new) == LlamaConfig.from_hf(raw)


@pytest.mark.parametrize(
    "raw, named",
    [
        (LLAMA2 | {"model_type": "mixtral"}, ["model_type='mixtral'"]),
        ({}, ["model_type=None"]),
        (LLAMA2 | {"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        (LLAMA2 | {"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        (QWEN25 | {"is_causal": False}, ["is_causal=False"]),
        (LLAMA2 | {"num_local_experts": 8}, ["num_local_experts=8"]),
        (LLAMA2 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_type='linear'"]),
        (LLAMA2 | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ["rope_type='yarn'"]),
        (LLAMA2 | {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, ["'factor'", "2.0"]),
        (LLAMA2 | {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ["high_freq_factor"]),
        (LLAMA2 | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, ["rope_theta=10000.0", "1000000.0"]),
        (MISTRAL | {"sliding_window": 4096}, ["sliding_window=4096", "32768"]),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, ["sliding_window=4096"]),
        (QWEN25 | {"use_sliding_window": True, "sliding_window": 100}, ["sliding_window=100"]),
        (QWEN3 | {"layer_types": ["sliding_attention"], "sliding_window": 64}, ["sliding_window=64"]),
        (QWEN3 | {"layer_types": ["linear_attention"]}, ["layer_types", "linear_attention"]),
        ({k: v for k, v in QWEN3.items() if k != "num_key_value_heads"}, ["num_key_value_heads"]),
        (LLAMA2 | {"vocab_size": "many"}, ["vocab_size", "many"]),
        (LLAMA2 | {"num_key_value_heads": 5}, ["num_heads=32", "num_kv_heads=5"]),
        (LLAMA2 | {"partial_rotary_factor": 0.12}, ["partial_rotary_factor=0.12", "15"]),
    ],
)
def test_what_changes_the_numbers_and_is_not_supported_is_refused_by_name(raw, named):
    with pytest.raises(ModelError) as error:
        LlamaConfig.from_hf(raw)
    for part in named:
        assert part in str(error.value)


def test_windows_that_no_layer_uses_are_no_windows():
    LlamaConfig.from_hf(QWEN25 | {"use_sliding_window": True, "max_window_layers": 24, "sliding_window": 100})
    LlamaConfig.from_hf(MISTRAL | {"sliding_window": 32768})
    LlamaConfig.from_hf(QWEN3 | {"layer_types": ["full_attention"] * 28, "sliding_window": 64})


@pytest.mark.parametrize("name", VARIANTS)
def test_written_configs_read_back_equal(name):
    assert LlamaConfig.from_hf(VARIANTS[name].to_hf()) == VARIANTS[name]


def test_a_config_that_its_family_cannot_express_is_not_written():
    with pytest.raises(ModelError, match="'mistral' cannot express qk_norm"):
        dataclasses.replace(TINY, family="mistral", qk_norm=True).to_hf()


def test_a_bad_dtype_is_refused():
    with pytest.raises(ModelError, match="float16"):
        dataclasses.replace(TINY, dtype="float16")


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
    # Wavelengths in positions: far below 16/4, between, far above 16/1.
    wavelengths = np.array([1.0, 8.0, 1000.0])
    divisors = SCALING.divisors(2 * np.pi / wavelengths)
    between = 1 / ((1 - 1 / 3) / 8 + 1 / 3)  # 16 / 8 = 2 turns: a third of the way from 1 to 4
    np.testing.assert_allclose(divisors, [1.0, between, 8.0])


def test_partial_rotation_takes_its_exponents_over_the_rotated_part():
    config = dataclasses.replace(TINY, partial_rotary_factor=0.5, rope_base=100.0)
    np.testing.assert_allclose(config.rope_frequencies(), [1.0, 0.1], rtol=1e-6)
