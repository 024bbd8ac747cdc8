"""The one place that maps names on command lines and in reports to proposers and rules.

A specification is a name with options: `prompt_lookup`, `prompt_lookup:length=5,max_ngram=3`. Options are the
constructor's own parameters, with its defaults and checks, so a new proposer needs one line in `PROPOSERS`.
"""

import dataclasses
import enum
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from spec_jax import propose, shapes, verify
from spec_jax.target import Target
from spec_jax.tree import Tree

PROPOSERS: Mapping[str, type] = {
    "plain": propose.Plain,
    "prompt_lookup": propose.PromptLookup,
    "draft_model": propose.DraftModel,
    "synthetic": propose.Synthetic,
}
RULES: Mapping[str, type] = verify.RULES

# A parameter that a program supplies and no option can: the reference outputs of `synthetic`.
_SUPPLIED = "references"


@dataclasses.dataclass(frozen=True)
class Spec:
    """A proposer or rule with all its options.

    Attributes:
      kind: "proposer" or "rule".
      name: its key in the table.
      options: every option and its value, defaults filled in. A model is its path.
    """

    kind: Literal["proposer", "rule"]
    name: str
    options: tuple[tuple[str, Any], ...]

    @property
    def make(self) -> type:
        return _table(self.kind)[self.name]

    def __str__(self) -> str:
        """The whole specification, defaults included: two specifications mean the same when this is equal."""
        return _join(self.name, self.options)

    @property
    def label(self) -> str:
        """For tables: the options that were chosen, without the defaults."""
        defaults = {p.name: p.default for p in _parameters(self.make)}
        chosen = [(key, value) for key, value in self.options if value not in (defaults[key], str(defaults[key]))]
        return _join(self.name, chosen)

    @property
    def needs_references(self) -> bool:
        """Whether it can only be built where the plain output is known already."""
        return _SUPPLIED in inspect.signature(self.make).parameters

    def build(
        self, load: Callable[[str], Target] | None = None, references: Sequence[Sequence[int]] | None = None
    ) -> Any:
        """The proposer or rule.

        Args:
          load: gives the model of a path; needed where an option is a model.
          references: the whole token sequences of the plain output, for a proposer that needs them.

        Raises:
          ValueError: an option's value is refused, or something is needed that was not given.
        """
        values = dict(self.options)
        for parameter in _parameters(self.make):
            if parameter.annotation is Target:
                if load is None:
                    raise ValueError(f"{self.kind} {self.name!r} needs a model to be loaded")
                values[parameter.name] = load(values[parameter.name])
            elif _is_tree(parameter.annotation):
                values[parameter.name] = shapes.parse(values[parameter.name])
        if self.needs_references:
            if references is None:
                raise ValueError(
                    f"{self.kind} {self.name!r} drafts from a known output, so it runs in experiments.bench only"
                )
            values[_SUPPLIED] = references
        return self.make(**values)


def parse_proposer(text: str, **options: Any) -> Spec:
    """A proposer's specification; `options` that are not None are added to those in the text."""
    return _parse("proposer", text, options)


def parse_rule(text: str) -> Spec:
    """A rule's specification."""
    return _parse("rule", text, {})


def describe() -> str:
    """All names with their options and defaults, for --help."""
    lines = []
    for kind in ("proposer", "rule"):
        lines.append(f"{kind}s, as NAME or NAME:OPTION=VALUE,...")
        for name, make in _table(kind).items():
            options = ", ".join(map(_option_help, _parameters(make)))
            lines.append(f"  {name}" + (f": {options}" if options else ""))
    return "\n".join(lines)


def _table(kind: str) -> Mapping[str, type]:
    return PROPOSERS if kind == "proposer" else RULES


def _parameters(make: type) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(make).parameters.values() if p.name != _SUPPLIED]


def _is_tree(annotation: Any) -> bool:
    return Tree in typing.get_args(annotation)


def _option_help(parameter: inspect.Parameter) -> str:
    if parameter.annotation is Target:
        return f"{parameter.name}=PATH"
    if parameter.default in (inspect.Parameter.empty, ()):
        return f"{parameter.name}=A/B/..."
    return f"{parameter.name}={_text(parameter.default)}"


def _parse(kind: Literal["proposer", "rule"], text: str, extra: Mapping[str, Any]) -> Spec:
    name, _, rest = text.partition(":")
    table = _table(kind)
    if name not in table:
        raise ValueError(f"no {kind} is named {name!r}; choose from {', '.join(table)}")
    parameters = {p.name: p for p in _parameters(table[name])}
    given: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{kind} {text!r}: {item!r} is not of the form OPTION=VALUE")
        if key in given:
            raise ValueError(f"{kind} {text!r}: option {key!r} is given twice")
        given[key] = value
    for key, value in extra.items():
        if value is not None:
            if key in given:
                raise ValueError(f"{kind} {text!r}: option {key!r} is given twice, in the name and by its own flag")
            given[key] = value
    if unknown := sorted(given.keys() - parameters.keys()):
        raise ValueError(
            f"{kind} {name!r} has no option {unknown[0]!r}; it has {', '.join(parameters) or 'no options'}"
        )
    values = []
    for key, parameter in parameters.items():
        if key in given:
            values.append((key, _convert(given[key], parameter.annotation, f"{kind} {name!r}: {key}")))
        elif parameter.default is not inspect.Parameter.empty:
            values.append((key, str(parameter.default) if _is_tree(parameter.annotation) else parameter.default))
        else:
            raise ValueError(f"{kind} {name!r} needs {_option_help(parameter)}")
    spec = Spec(kind, name, tuple(values))
    if not spec.needs_references and Target not in [p.annotation for p in parameters.values()]:
        spec.build()  # Its own checks of the values, before a model is loaded.
    return spec


def _convert(value: Any, annotation: Any, name: str) -> Any:
    """A value of the annotated type from the text of an option."""
    if not isinstance(value, str):
        return value
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        return value
    if annotation in (Sequence[float], Sequence[int]):
        parts = value.split("/") if value else []
        return tuple(_convert(part, *typing.get_args(annotation), name) for part in parts)
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        if value not in list(annotation):
            raise ValueError(f"{name} must be one of {', '.join(annotation)}, got {value!r}")
        return annotation(value)
    if _is_tree(annotation):
        shapes.parse(value)  # Its errors; the text is what reports show.
        return value
    if annotation is bool:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value.lower() == "true"
    if annotation in (str, Target):
        return value
    number = int if annotation is int else float
    try:
        return number(value)
    except ValueError:
        kind = "a whole number" if number is int else "a number"
        raise ValueError(f"{name} must be {kind}, got {value!r}") from None


def _join(name: str, options) -> str:
    return name + (":" + ",".join(f"{key}={_text(value)}" for key, value in options) if options else "")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "/".join(f"{v:g}" for v in value)
    return str(value)
