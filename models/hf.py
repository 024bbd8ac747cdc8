"""Hugging Face model folders: `config.json`, one or many safetensors files, tokenizer files."""

import functools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save_file

from models.checkpoint import HF, Checkpoint, StoredTensor, flat_params, stored_name
from models.config import LlamaConfig
from models.errors import ModelError
from models.files import read_json, write_json
from models.target import LlamaTarget
from models.tokenizer import Tokenizer

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")


def open_folder(folder: Path, dtype: str = "float32") -> Checkpoint:
    """Reads the headers of a model folder.

    Raises:
      ModelError: it is no model folder, a file is missing or broken, or the model is not supported.
    """
    if not (folder / "config.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        hint = "; give the path of the .gguf file itself" if any(folder.glob("*.gguf")) else ""
        raise ModelError(f"{folder} is not a model folder: it has no config.json (it holds {found}){hint}")
    raw = read_json(folder / "config.json")
    config = LlamaConfig.from_hf(raw, dtype)
    tensors = {}
    for file in _weight_files(folder):
        tensors.update(_announced(file))
    head, embedding = (stored_name(f"{module}.weight", HF) for module in ("head", "embedding"))
    copies = {head: embedding} if config.tied_embeddings and {head, embedding} <= tensors.keys() else {}
    tokenizer, tokenizer_problem = None, None
    try:
        tokenizer = Tokenizer.from_folder(folder)
    except ModelError as error:
        tokenizer_problem = str(error)
    return Checkpoint(
        name=str(folder),
        format="Hugging Face folder",
        config=config,
        tensors=tensors,
        column=HF,
        tokenizer=tokenizer,
        tokenizer_problem=tokenizer_problem,
        eos_token_ids=_eos_token_ids(folder, raw, tokenizer),
        copies=copies,
    )


def save(target: LlamaTarget, folder: str | Path, max_shard_bytes: int = 5_000_000_000) -> None:
    """Writes a target as a model folder that `models.load` and transformers read.

    Args:
      target: the model; it is written in its own dtype.
      folder: made where it does not exist.
      max_shard_bytes: weights beyond this go into several files with an index.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = target.config.to_hf()
    shards: list[dict[str, np.ndarray]] = [{}]
    for path, value in flat_params(target.config, target.params).items():
        array = np.asarray(value)
        if shards[-1] and sum(a.nbytes for a in shards[-1].values()) + array.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][stored_name(path, HF)] = array
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        size = sum(array.nbytes for shard in shards for array in shard.values())
        write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if target.eos_token_ids:
        config["eos_token_id"] = list(target.eos_token_ids)
    write_json(folder / "config.json", config)
    if target.tokenizer is not None:
        target.tokenizer.save(folder)


def _weight_files(folder: Path) -> Iterable[Path]:
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / INDEX} has no weight_map; download it again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        if absent := [file.name for file in files if not file.is_file()]:
            raise ModelError(f"{folder} lacks {', '.join(absent)}, which {INDEX} names; finish the download")
        return files
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    hint = " (pickled PyTorch weights are not read: convert them to safetensors)" if any(folder.glob("*.bin")) else ""
    raise ModelError(f"{folder} has neither {SINGLE} nor {INDEX}{hint}")


def _announced(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; the file is mapped, and read tensor by tensor."""
    try:
        handle = safetensors.safe_open(file, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(
            f"{file} is not a whole safetensors file ({error}); it has {file.stat().st_size} bytes, download it again"
        ) from error
    tensors = {}
    for name in handle.keys():
        if name.endswith("rotary_emb.inv_freq"):
            continue  # A buffer that old checkpoints carry; it follows from the configuration.
        header = handle.get_slice(name)
        if header.get_dtype() not in _WEIGHT_DTYPES:
            raise ModelError(
                f"{file} stores {name} as {header.get_dtype()}, expected one of {', '.join(_WEIGHT_DTYPES)}; quantized "
                "weights are not read"
            )
        read = functools.partial(handle.get_tensor, name)
        tensors[name] = StoredTensor(tuple(header.get_shape()), header.get_dtype(), read)
    return tensors


def _eos_token_ids(folder: Path, config: dict, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """As transformers: `generation_config.json` decides, then `config.json`, then the tokenizer."""
    sources = [config]
    if (folder / "generation_config.json").is_file():
        sources.insert(0, read_json(folder / "generation_config.json"))
    for source in sources:
        ids = source.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return () if tokenizer is None else tokenizer.eos_token_ids
