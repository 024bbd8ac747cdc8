"""Prompts for every program: a few of our own, or a file or folder of them."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.cli import note


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One user turn.

    Attributes:
      id: unique within a set.
      category: what prompts are grouped by in reports.
      text: what the user says; the target's chat format is put around it.
    """

    id: str
    category: str
    text: str


_ARTICLE = (
    "The town library of Harrow Bay will stay open until ten in the evening from March, the council said on Monday. "
    "Until now the library closed at six, which left people who work during the day with Saturday mornings only. "
    "A trial last autumn, when the library stayed open late on Thursdays, brought in twice as many readers as the "
    "council had expected, and a third of them had never held a library card before. The longer hours will cost about "
    "forty thousand pounds a year, most of it for two new librarians. The council will pay for them by renting out "
    "the reading room on the top floor for weddings and concerts. Some readers fear that the library will be noisy "
    "in summer. The head librarian, Ada Quill, said that the reading room has a staircase of its own, and that no "
    "event will begin before the library has closed."
)

BUILTIN = (
    Prompt(
        "chat", "chat", "I keep waking up at four in the morning. What could I change in the evening to sleep through?"
    ),
    Prompt(
        "maths",
        "maths",
        "A bakery sells rolls in bags of 6 and loaves in boxes of 4. On Monday it sold 15 bags of rolls and 9 boxes of "
        "loaves. A roll costs 2 coins and a loaf costs 5 coins. How many coins did the bakery take on Monday? Show "
        "each step.",
    ),
    Prompt(
        "code",
        "code",
        "Write a Python function `merge_intervals(intervals)` that takes a list of (start, end) tuples and returns a "
        "sorted list in which overlapping intervals are merged. Add a docstring and two examples.",
    ),
    Prompt("summary", "summary", f"Summarize the following article in three sentences.\n\n{_ARTICLE}"),
    Prompt("story", "story", "Begin a story with: Once upon a time, there was a lighthouse keeper who could not swim."),
)


def read(
    file: str | None = None, suite: str | None = None, limit: int | None = None, per_category: int | None = None
) -> list[Prompt]:
    """The prompts that a program was asked to use, `BUILTIN` by default.

    Args:
      file: JSON lines with `question_id`, `category` and `turns`, of which the first turn is used.
      suite: a folder of such files; files of another kind in it are named and left out.
      limit: at most this many of each file.
      per_category: at most this many of each category of each file.

    Raises:
      ValueError: nothing usable is there, or a line is not a prompt.
    """
    if file and suite:
        raise ValueError("give a file of prompts (--prompts) or a folder of them (--suite), not both")
    if not (file or suite):
        return _limited(BUILTIN, limit, per_category)
    if file:
        return _limited(_read_file(Path(file)), limit, per_category)
    folder = Path(suite)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder of prompt files")
    prompts = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            found = _read_file(path)
        except ValueError as error:
            note(f"left out: {error}")
            continue
        prompts += _limited([dataclasses.replace(p, id=f"{path.stem}/{p.id}") for p in found], limit, per_category)
    if not prompts:
        raise ValueError(f"{folder} holds no file of prompts (*.jsonl with question_id, category, turns)")
    return prompts


def _read_file(path: Path) -> list[Prompt]:
    if not path.is_file():
        raise ValueError(f"there is no file of prompts at {path}")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompts.append(Prompt(str(row["question_id"]), str(row["category"]), row["turns"][0]))
        except (json.JSONDecodeError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is not a prompt ({type(error).__name__}: {error}); expected JSON with "
                "question_id, category and turns"
            ) from None
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    if repeated := [id for id, count in Counter(p.id for p in prompts).items() if count > 1]:
        raise ValueError(f"{path}: question_id {repeated[0]!r} is not unique")
    return prompts


def _limited(prompts: Sequence[Prompt], limit: int | None, per_category: int | None) -> list[Prompt]:
    seen: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if per_category is None or seen[prompt.category] <= per_category:
            kept.append(prompt)
    return kept[:limit]


def encode(target, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
    """The prompts in the target's chat format. Of one that is too long the tail is kept, and that is said.

    Raises:
      ValueError: `max_tokens` leaves no room.
    """
    if max_tokens < 1:
        raise ValueError("max_len leaves no room for a prompt beside max_new_tokens; choose a larger max_len")
    encoded = [target.chat(prompt.text) for prompt in prompts]
    long = [p.id for p, tokens in zip(prompts, encoded, strict=True) if len(tokens) > max_tokens]
    if long:
        note(
            f"{len(long)} of {len(prompts)} prompts are longer than {max_tokens} tokens, and only their last "
            f"{max_tokens} tokens are used: {', '.join(long)}"
        )
    return [tokens[-max_tokens:] for tokens in encoded]
