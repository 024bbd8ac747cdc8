"""Rendering of chat templates, in the Jinja environment for which Hugging Face's templates are written."""

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from models.errors import ModelError


def render(source: str, **variables: Any) -> str:
    """Renders a template.

    Args:
      source: the template; it may use `messages`, `add_generation_prompt`, `tools`, `documents`,
        `raise_exception` and `strftime_now`. It runs sandboxed: it came with a model.
      variables: its variables.

    Raises:
      ModelError: the template is broken, or refuses the conversation.
    """
    try:
        return _compiled(source).render(**{"tools": None, "documents": None} | variables)
    except (jinja2.TemplateError, TypeError) as error:
        raise ModelError(f"the model's chat template failed on these messages: {error}") from error


@functools.lru_cache
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    # Jinja's own filter escapes for HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(source)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; rendered, it is its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message):
    raise jinja2.TemplateError(message)
