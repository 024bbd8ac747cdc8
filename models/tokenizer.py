"""Text to token ids and back, byte by byte, and chat templates.

Streaming needs the bytes of each token: a character may be spread over several. So `decode` is defined by
`token_bytes`, and text decoded as a whole equals the pieces of a stream put together.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from models import chat_template
from models.errors import ModelError
from models.files import read_json, write_json


class Tokenizer:
    """A `tokenizers.Tokenizer` with what a model adds to it.

    Attributes:
      eos_token_ids: the tokenizer's own end-of-text token, if it names one.
      chat_template: the Jinja source, or None.
      special_tokens: texts that the template may use, e.g. {"bos_token": "<s>"}.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] | None = None,
    ):
        # A saved tokenizer may carry a training run's truncation, which would drop text silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens or {})
        if eos_token_ids is None:
            eos = self.special_tokens.get("eos_token")
            eos_id = None if eos is None else backend.token_to_id(eos)
            eos_token_ids = () if eos_id is None else (eos_id,)
        self.eos_token_ids = tuple(eos_token_ids)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a model folder.

        Raises:
          ModelError: there is no usable tokenizer.json.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            hint = " (tokenizer.model alone is not read: convert it)" if (folder / "tokenizer.model").is_file() else ""
            raise ModelError(f"{folder} has no tokenizer.json{hint}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises bare exceptions.
            raise ModelError(f"{path} is not a tokenizer that this program reads: {error}") from error
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        special = {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in config.items()
            if re.fullmatch(r"(bos|eos|unk|pad|sep|cls|mask)_token", name) and value is not None
        }
        template = config.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if (folder / "chat_template.jinja").is_file():
            template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
        return cls(backend, template, special)

    def save(self, folder: Path) -> None:
        """Writes the files that `from_folder` reads."""
        self._backend.save(str(folder / "tokenizer.json"))
        config = dict(self.special_tokens)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        write_json(folder / "tokenizer_config.json", config)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model's table may be padded beyond it."""
        return self._backend.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds those that the model expects around a text."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: none for special tokens and for ids outside the vocabulary."""
        return self._bytes.get(int(token_id), b"")

    @functools.cached_property
    def _bytes(self) -> dict[int, bytes]:
        added = self._backend.get_added_tokens_decoder()
        convert = _byte_level if self.is_byte_level else _sentencepiece
        table = {id: convert(token) for token, id in self._backend.get_vocab(with_added_tokens=False).items()}
        # Added tokens are plain text in every vocabulary.
        table.update({id: b"" if token.special else token.content.encode() for id, token in added.items()})
        return table

    @functools.cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are spelled in GPT-2's byte alphabet, rather than as text with U+2581 for a space."""
        parts = (self._spec["pre_tokenizer"], self._spec["decoder"])
        return any('"ByteLevel"' in json.dumps(part) for part in parts)

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 over all that decides which text an id is: vocabulary, merges, added tokens, splitting rules."""
        model = self._spec["model"]
        facts = {
            "vocab": model.get("vocab"),
            "merges": model.get("merges"),
            "added_tokens": self._spec["added_tokens"],
            "normalizer": self._spec["normalizer"],
            "pre_tokenizer": self._spec["pre_tokenizer"],
        }
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @functools.cached_property
    def _spec(self) -> dict[str, Any]:
        return json.loads(self._backend.to_str())

    def render_chat(
        self, messages: str | Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation by the model's chat template.

        Args:
          messages: one user turn's text, or a sequence of {"role": ..., "content": ...}.
          add_generation_prompt: end with the opening of the assistant's turn.
          variables: further variables of the template.

        Raises:
          ModelError: there is no template, a message is malformed, or the template refuses.
        """
        if self.chat_template is None:
            raise ModelError("this model has no chat template; give the whole prompt as text")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        for message in messages:
            if not {"role", "content"} <= message.keys():
                raise ModelError(f"a chat message needs 'role' and 'content', got the keys {sorted(message)}")
        return chat_template.render(
            self.chat_template,
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens | variables,
        )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest for U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in token)


def _sentencepiece(token: str) -> bytes:
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
        return bytes.fromhex(match[1])
    return token.replace("\u2581", " ").encode()
