import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models import hf
from models.errors import ModelError
from tests.models.common import TINY, VARIANTS, assert_same_params, byte_bpe, noisy_target

TIED = VARIANTS["smollm2"]


@pytest.fixture
def folder(tmp_path):
    hf.save(noisy_target(TINY), tmp_path)
    return tmp_path


def edit(folder, config=None, **changes):
    """Changes tensors (None removes one) and keys of config.json."""
    tensors = load_file(folder / hf.SINGLE) | {key.replace("__", "."): value for key, value in changes.items()}
    save_file({key: value for key, value in tensors.items() if value is not None}, folder / hf.SINGLE)
    raw = json.loads((folder / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_saved_folder_loads_as_the_same_model(name, dtype, tmp_path):
    target = noisy_target(dataclasses.replace(VARIANTS[name], dtype=dtype))
    hf.save(target, tmp_path)
    again = models.load(tmp_path, dtype)
    assert again.config == target.config and again.fingerprint == target.fingerprint
    assert_same_params(again, target)


@pytest.mark.smoke
def test_shards_and_tokenizer(tmp_path):
    target = noisy_target(dataclasses.replace(TIED, vocab_size=300))
    target.tokenizer, target.eos_token_ids = byte_bpe(), (2, 0)
    hf.save(target, tmp_path, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and not (tmp_path / hf.SINGLE).exists()
    again = models.load(str(tmp_path))
    assert_same_params(again, target)
    assert again.eos_token_ids == (2, 0) and again.chat("hello") == target.chat("hello")
    assert again.name == str(tmp_path)


def test_float32_is_rounded_to_bfloat16_on_request(folder):
    low = models.load(folder, dtype="bfloat16")
    assert low.config.dtype == "bfloat16"
    assert_same_params(low, models.load(folder), rtol=2**-8)


def test_keys_that_are_missing_extra_or_misshapen_are_all_named(folder):
    edit(
        folder,
        model__norm__weight=None,
        model__layers__1__mlp__up_proj__weight=None,
        model__layers__2__mlp__up_proj__weight=np.zeros((40, 24), np.float32),
        lm_head__bias=np.zeros(50, np.float32),
        lm_head__weight=np.zeros((50, 23), np.float32),
    )
    with pytest.raises(ModelError) as error:
        models.load(folder)
    lines = str(error.value).splitlines()
    assert lines[1:] == [
        "missing (2): model.layers.1.mlp.up_proj.weight, model.norm.weight",
        "unexpected (2): lm_head.bias, model.layers.2.mlp.up_proj.weight",
        "misshapen (1): lm_head.weight is [50, 23], expected [50, 24]",
    ]


def test_rotary_buffers_of_old_checkpoints_are_no_weights(folder):
    edit(folder, model__layers__0__self_attn__rotary_emb__inv_freq=np.zeros(4, np.float32))
    assert_same_params(models.load(folder), noisy_target(TINY))


def test_a_head_may_be_absent_only_where_the_config_ties_it(folder):
    edit(folder, lm_head__weight=None)
    with pytest.raises(ModelError, match="only where config.json says tie_word_embeddings: true"):
        models.load(folder)
    edit(folder, {"tie_word_embeddings": True})
    assert models.load(folder).config.tied_embeddings


def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path):
    hf.save(noisy_target(TIED), tmp_path)
    embedding = load_file(tmp_path / hf.SINGLE)["model.embed_tokens.weight"]
    edit(tmp_path, lm_head__weight=embedding)
    assert_same_params(models.load(tmp_path), noisy_target(TIED))
    edit(tmp_path, lm_head__weight=embedding + 1)
    with pytest.raises(ModelError, match="ties lm_head.weight to model.embed_tokens.weight.*different values"):
        models.load(tmp_path)


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({}, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": [7, 8]}, (7, 8)),
        (None, {"eos_token_id": None}, ()),
    ],
)
def test_end_tokens(folder, generation, config, expected):
    edit(folder, config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert models.load(folder).eos_token_ids == expected


def test_the_tokenizers_end_token_is_the_last_resort(folder):
    byte_bpe().save(folder)
    assert models.load(folder).eos_token_ids == (2,)


def test_a_model_without_tokenizer_loads_and_says_why(folder):
    target = models.load(folder)
    assert target.tokenizer is None
    with pytest.raises(ModelError, match="has no tokenizer.json"):
        target.encode("hello")


def test_broken_and_foreign_files_are_named(folder, tmp_path_factory):
    whole = (folder / hf.SINGLE).read_bytes()
    for content in (whole[:-3], whole[:5], b"", b"\xff" * 64):
        (folder / hf.SINGLE).write_bytes(content)
        with pytest.raises(ModelError, match=f"not a whole safetensors file.*{len(content)} bytes, download"):
            models.load(folder)
    (folder / hf.SINGLE).unlink()
    with pytest.raises(ModelError, match="neither model.safetensors nor"):
        models.load(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="convert them to safetensors"):
        models.load(folder)
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00002.safetensors"}}))
    with pytest.raises(ModelError, match="lacks model-00002.safetensors"):
        models.load(folder)
    (folder / hf.INDEX).write_text("{}")
    with pytest.raises(ModelError, match="has no weight_map"):
        models.load(folder)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ModelError, match="config.json is not readable as JSON"):
        models.load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="config.json holds a list, expected an object"):
        models.load(folder)
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(ModelError, match="not a model folder: it has no config.json .it holds nothing."):
        models.load(empty)
    (empty / "some.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="give the path of the .gguf file itself"):
        models.load(empty)


def test_quantized_tensors_are_refused(folder):
    edit(folder, model__norm__weight=np.zeros(24, np.int8))
    with pytest.raises(ModelError, match="stores model.norm.weight as I8, expected one of F64"):
        models.load(folder)
