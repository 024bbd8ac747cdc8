"""Model folders from the Hugging Face hub."""

import re
from pathlib import Path

from models.errors import ModelError

_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form "organization/name"."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None


def fetch(repo_id: str, revision: str | None = None) -> Path:
    """The local folder of a hub model, downloaded on first use by huggingface_hub into its own cache.

    Args:
      repo_id: "organization/name".
      revision: branch, tag or commit.

    Raises:
      ModelError: huggingface_hub is not installed, or the model cannot be fetched.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelError(
            f"{repo_id!r} is not a local path, and fetching it from the hub needs the package huggingface_hub: "
            "pip install 'spec-jax[hub]'"
        ) from error
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:  # Its errors come from three libraries; any of them means: no files.
        raise ModelError(
            f"{repo_id!r} is not a local path, and could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}). Check the "
            "name, the network and, for gated models, `huggingface-cli login`; or download the folder elsewhere "
            "and give its path"
        ) from error
