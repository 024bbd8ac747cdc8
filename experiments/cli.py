"""What every program shares: how it starts, how it fails, and the flags that mean the same everywhere."""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, Self

from absl import app, flags, logging

import models
import spec_jax as sj
from experiments import registry
from models import ModelError
from spec_jax.kernels import IMPLEMENTATIONS

BAD_INPUT = 2
"""Exit code of a program that was given something it cannot use."""

# Flags that the functions below define belong to the program that calls them, and show in its --help.
flags.disclaim_key_flags()


def run(main: Callable[[], int | None]) -> NoReturn:
    """Parses the flags and runs a program; exits with what `main` returns.

    A value that cannot be used ends in one line on standard error and exit code 2. `--verbosity=1` adds where it was
    found.
    """
    app.run(lambda argv: guarded(main), flags_parser=_parse)


def guarded(main: Callable[[], int | None]) -> int:
    """The exit code of `main`, with errors that are for people turned into one line on standard error."""
    try:
        return main() or 0
    except (ValueError, ModelError, OSError, FloatingPointError) as error:  # ContractError is a ValueError.
        logging.debug("details", exc_info=True)
        return fail(str(error))


def fail(message: str) -> int:
    """Prints an error and returns the exit code for it."""
    print(f"error: {message}", file=sys.stderr)
    return BAD_INPUT


def note(message: str) -> None:
    """Tells people something beside a program's own output."""
    print(message, file=sys.stderr, flush=True)


def _parse(argv: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(fail(" ".join(str(error).split())))
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.WARNING)  # JAX informs about backends that are not there.
    if len(rest) > 1:
        sys.exit(fail(f"unexpected argument {rest[1]!r}: everything is given by flags, see --help"))
    return rest


def define_target(max_len: int) -> None:
    """`--target` and `--max_len`."""
    flags.DEFINE_string(
        "target",
        "smollm2-135m",
        "the model: a name of the zoo, a Hugging Face folder, a .gguf file, or a hub id 'organization/name'",
    )
    flags.DEFINE_integer("max_len", max_len, "most tokens of a text, prompt included")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Which decoder; the flags of the same names say more."""

    target: str
    dtype: str
    proposer: registry.Spec
    rule: registry.Spec
    max_len: int
    attention: str = "auto"

    @classmethod
    def from_flags(cls) -> Self:
        """From the flags of `define_decoder`; raises ValueError for a value that cannot be used."""
        values = flags.FLAGS
        return cls(
            target=values.target,
            dtype=values.dtype,
            proposer=registry.parse_proposer(values.proposer, model=values.draft),
            rule=registry.parse_rule(values.rule),
            max_len=values.max_len,
            attention=values.attention,
        )

    def build(self) -> sj.Decoder:
        """Loads the models; raises ValueError where the parts do not belong together."""

        def load(name: str):
            return models.load(name, self.dtype, attention=self.attention)

        target = load(self.target)
        return sj.Decoder(target, proposer=self.proposer.build(load), rule=self.rule.build(), max_len=self.max_len)


def define_decoder(max_len: int) -> None:
    """The flags of a target with one proposer and one rule (see `DecoderConfig`)."""
    define_target(max_len)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of weights and activations")
    flags.DEFINE_string("proposer", "prompt_lookup", f"who drafts. {registry.describe()}")
    flags.DEFINE_string("rule", "match", "which rule commits, see --proposer")
    flags.DEFINE_enum(
        "attention",
        "auto",
        IMPLEMENTATIONS,
        "auto takes Pallas kernels on a TPU and plain JAX elsewhere; interpret runs the kernels anywhere, slowly",
    )
    flags.DEFINE_string("draft", None, "the draft model of proposer draft_model: anything that --target takes")


def define_sampling(max_new_tokens: int) -> None:
    """The flags of one request (see `sampling_params`)."""
    flags.DEFINE_float("temperature", 0.0, "0 is greedy")
    flags.DEFINE_integer("top_k", 0, "keep the k most likely tokens; 0 keeps all")
    flags.DEFINE_float("top_p", 1.0, "keep the most likely tokens up to this mass")
    flags.DEFINE_float("min_p", 0.0, "keep tokens at least this many times as likely as the most likely one")
    flags.DEFINE_integer("seed", None, "the same seed gives the same text; drawn afresh and reported by default")
    flags.DEFINE_integer("max_new_tokens", max_new_tokens, "most new tokens of each prompt")
    flags.DEFINE_multi_string("stop", [], "a text before which the output ends; may be given several times")
    flags.DEFINE_bool("ignore_eos", False, "do not stop at the model's end-of-text tokens")


def sampling_params() -> sj.SamplingParams:
    """From the flags of `define_sampling`; raises ValueError for a value that cannot be used."""
    values = flags.FLAGS
    return sj.SamplingParams(
        temperature=values.temperature,
        top_k=values.top_k,
        top_p=values.top_p,
        min_p=values.min_p,
        seed=values.seed,
        max_new_tokens=values.max_new_tokens,
        stop=tuple(values.stop),
        ignore_eos=values.ignore_eos,
    )


def output_file(flag: str) -> Path | None:
    """The file to write that a flag names, or None; raises ValueError where its folder does not exist."""
    if not flags.FLAGS[flag].value:
        return None
    path = Path(flags.FLAGS[flag].value)
    if not path.absolute().parent.is_dir():
        raise ValueError(f"the folder of --{flag} {path} does not exist")
    return path


def define_prompts(max_new_tokens: int) -> None:
    """The flags of a prompt set, and how much is generated for each."""
    flags.DEFINE_string("prompts", None, "a JSON-lines file of prompts (question_id, category, turns)")
    flags.DEFINE_string("suite", None, "a folder of such files")
    flags.DEFINE_integer("limit", None, "use at most this many prompts of each file", lower_bound=1)
    flags.DEFINE_integer("per_category", None, "use at most this many prompts of each category", lower_bound=1)
    flags.DEFINE_integer("max_new_tokens", max_new_tokens, "most new tokens of each prompt", lower_bound=1)
