"""What every program shares: how it starts, how it fails, and the flags that mean the same everywhere."""

import sys
from collections.abc import Callable
from typing import NoReturn

from absl import app, flags, logging

from models import ModelError

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


def define_prompts(max_new_tokens: int) -> None:
    """The flags of a prompt set, and how much is generated for each."""
    flags.DEFINE_string("prompts", None, "a JSON-lines file of prompts (question_id, category, turns)")
    flags.DEFINE_string("suite", None, "a folder of such files")
    flags.DEFINE_integer("limit", None, "use at most this many prompts of each file", lower_bound=1)
    flags.DEFINE_integer("per_category", None, "use at most this many prompts of each category", lower_bound=1)
    flags.DEFINE_integer("max_new_tokens", max_new_tokens, "most new tokens of each prompt", lower_bound=1)
