"""Target models: loading by name, path or hub id."""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from models.errors import ModelError

if TYPE_CHECKING:
    from models.checkpoint import Checkpoint
    from models.target import LlamaTarget

__all__ = ["ModelError", "load", "open_checkpoint"]


def load(
    name_or_path: str | Path, dtype: str = "float32", revision: str | None = None, attention: str = "auto"
) -> "LlamaTarget":
    """Loads a target model.

    Args:
      name_or_path: a name of the zoo ("smollm2-135m", fetched on first use), a Hugging Face model folder, a GGUF
        file, or a hub id "organization/name".
      dtype: of parameters and activations, "float32" or "bfloat16".
      revision: branch, tag or commit of a hub id.
      attention: "auto" (kernels on a TPU, plain JAX elsewhere), "reference", "kernel" or "interpret"; see
        `spec_jax.kernels.Kernels.choose`.

    Raises:
      ModelError: there is no such model, a file is broken or foreign, or the model is not supported.
      ValueError: there is no such attention here.
    """
    from models.target import LlamaTarget

    checkpoint = open_checkpoint(name_or_path, dtype, revision)
    return LlamaTarget.from_checkpoint(checkpoint, name=str(name_or_path), attention=attention)


def open_checkpoint(name_or_path: str | Path, dtype: str = "float32", revision: str | None = None) -> "Checkpoint":
    """What the headers of a model's files say; arguments and errors as of `load`, no weights read."""
    # Imported late: a program's --help, or another folder's import, should not wait for every file format.
    from models.config import check_dtype

    check_dtype(dtype)
    path = _locate(name_or_path, revision)
    if path.is_dir():
        from models import hf

        return hf.open_folder(path, dtype)
    from models import gguf

    return gguf.open_file(path, dtype)


def _locate(name_or_path: str | Path, revision: str | None) -> Path:
    from models import hub, zoo

    name = str(name_or_path)
    if name in zoo.ZOO:
        return zoo.fetch(name)
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    if isinstance(name_or_path, str) and hub.is_hub_id(name):
        return hub.fetch(name, revision)
    raise ModelError(
        f"{name!r} is no model: expected a name of the zoo ({', '.join(zoo.ZOO)}), a Hugging Face model folder, a "
        ".gguf file, or a hub id 'organization/name'"
    )


def __getattr__(name: str):
    # `models.inspect` and the like work without importing all of them first.
    if importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")
