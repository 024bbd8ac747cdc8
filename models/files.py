"""Small files of a model folder."""

import json
from pathlib import Path
from typing import Any

from models.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
      ModelError: it cannot be read, is not JSON, or is no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not readable as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, expected an object; download it again")
    return value


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes an object, indented, for people too."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
