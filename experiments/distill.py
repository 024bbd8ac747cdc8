"""Trains a small draft model for a target, on answers that the target writes itself.

    python -m experiments.distill --out DIR
    python -m experiments.distill --prompts FILE.jsonl --num_answers 2000 --minutes 30 --out DIR

Afterwards DIR is a model folder: `python -m experiments.generate --proposer draft_model --draft DIR --prompt "..."`.

Half of the answers are greedy and half are sampled. Without --prompts the target writes the questions too (Magpie,
2406.08464): whatever it says where a user's turn begins. Prompt files are those of the other programs, or JSON lines
with a `question`, as GSM8K has them. It may be stopped at any time: the same command goes on where it was.

Measured on two shared AVX2 cores: 160 answers to GSM8K questions (338 s) and `--minutes 3` (65 steps) take nine minutes
and give a draft of two layers that agrees with the target's most likely token at 33% of held-out positions. A chain of
two of its tokens commits 1.4 tokens a cycle, greedily, on other GSM8K questions.

Besides the model, DIR gets `prompts.jsonl`, `data.jsonl` and `hidden.f16` (questions, answers, and the target's hidden
states), `checkpoints`, `metrics.jsonl`, and `distill.json` with the settings.
"""

import dataclasses
import itertools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tqdm
from absl import flags

import models
import spec_jax as sj
from experiments import cli, machine, prompts
from experiments.prompts import Prompt
from models import hf
from models.files import read_json, write_json
from models.target import LlamaTarget
from training import distill

_LAYOUT = np.dtype("<f2")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to do; the flags of the same names say more.

    Attributes:
      steps: None for as many as `minutes` allow.
      answer_batch: answers written at the same time.
      training: shape of the batches, and the optimiser.
    """

    target: str = "smollm2-135m"
    prompts: str | None = None
    num_answers: int = 160
    held_out: int = 16
    temperatures: tuple[float, ...] = (0.0, 0.8)
    answer_batch: int = 32
    layers: tuple[int, ...] = (0, -1)
    minutes: float = 4.0
    steps: int | None = None
    seed: int = 0
    training: distill.Config = distill.Config()

    def __post_init__(self):
        if not 0 < self.held_out < self.num_answers:
            raise ValueError(
                f"held_out={self.held_out} of num_answers={self.num_answers} leaves nothing to train on, or nothing to "
                "measure with"
            )
        if self.max_prompt < 1:
            raise ValueError(
                f"max_len={self.training.num_tokens} leaves no room for a prompt beside max_new_tokens="
                f"{self.training.num_answer}; choose a larger max_len"
            )

    @property
    def max_prompt(self) -> int:
        """Most tokens of a prompt."""
        return self.training.num_tokens - self.training.num_answer


class Store:
    """Answers on disk, in the order they were added: `data.jsonl` for people, and `hidden.f16` beside it.

    A line is written after its hidden states, and names the byte at which they start, so what was being written when
    the program died is as if it had never been.
    """

    def __init__(self, folder: Path):
        self.path, self._states = folder / "data.jsonl", folder / "hidden.f16"
        self.answers = [self._answer(row) for row in _whole_lines(self.path)]

    def append(self, answer: distill.Answer, facts: dict[str, Any]) -> None:
        """Adds an answer; `facts` are for people."""
        hidden_AxE = answer.hidden_AxE.astype(_LAYOUT)
        with self._states.open("ab") as file:
            offset = file.tell()
            file.write(hidden_AxE.tobytes())
        place = {"prompt": answer.prompt, "tokens": answer.tokens, "offset": offset, "width": hidden_AxE.shape[1]}
        _append(self.path, facts | place)
        self.answers.append(answer)

    def _answer(self, row: dict[str, Any]) -> distill.Answer:
        shape = len(row["tokens"]), row["width"]
        hidden = np.fromfile(self._states, _LAYOUT, shape[0] * shape[1], offset=row["offset"])
        return distill.Answer(row["prompt"], row["tokens"], hidden.reshape(shape))


class Distillation:
    """One run of a configuration.

    Args:
      config: what to do.
      target: whom to draft for.
      out: folder of everything that is kept; what an earlier start left there is used.

    Raises:
      ValueError: `out` belongs to another configuration.
    """

    def __init__(self, config: Config, target: LlamaTarget, out: Path):
        self.config, self.target, self.out = config, target, out
        out.mkdir(parents=True, exist_ok=True)
        self.settings = json.loads(json.dumps(dataclasses.asdict(config) | {"weights": target.fingerprint}))
        self._settings_path = out / "distill.json"
        if self._settings_path.is_file():
            found = read_json(self._settings_path)
            names = [name for name, value in self.settings.items() if found["settings"].get(name) != value]
            if names:
                raise ValueError(
                    f"{out} holds a run with other {', '.join(names)}; give what it was started with, or choose "
                    "another --out"
                )
            self._steps = found["steps"]
        else:
            self._steps = config.steps
            self._write_settings()
        self.store = Store(out)
        self._decoder = distill.recording_decoder(target, config.training.num_tokens)

    def run(self) -> dict[str, Any]:
        """All of it; returns how well the draft matches the target on held-out answers, before and after."""
        seconds = {"answers": _seconds(self.write_answers)}
        held_out, used = self.store.answers[: self.config.held_out], self.store.answers[self.config.held_out :]
        draft = distill.make_draft(self.target, self.config.layers)
        before = distill.evaluate(draft, self.config.training, held_out).means()
        started = time.perf_counter()
        trained = distill.trained_draft(draft, self.train(draft, used))
        seconds["training"] = time.perf_counter() - started
        after = distill.evaluate(trained, self.config.training, held_out).means()
        hf.save(trained, self.out)
        summary = {
            "command": shlex.join(sys.orig_argv),
            "machine": dataclasses.asdict(machine.Machine.here()),
            "steps": self._steps,
            "answers": len(used),
            "answer_tokens": sum(len(answer.tokens) for answer in used),
            "seconds": seconds,
            "before": before,
            "after": after,
        }
        _append(self.out / "metrics.jsonl", {"kind": "summary"} | summary)
        return summary

    def write_answers(self) -> None:
        """The target answers what has not been answered yet."""
        config, store = self.config, self.store
        if len(store.answers) >= config.num_answers:
            return
        asked = self._questions()
        with tqdm.tqdm(total=len(asked), initial=len(store.answers), unit="answer", desc="answers") as bar:
            for start in range(len(store.answers), len(asked), config.answer_batch):
                questions = asked[start : start + config.answer_batch]
                # The last batch is filled up, because another size would be another program.
                full = questions + questions[-1:] * (config.answer_batch - len(questions))
                params = [
                    sj.SamplingParams(
                        temperature=config.temperatures[number % len(config.temperatures)],
                        seed=number,
                        max_new_tokens=config.training.num_answer,
                    )
                    for number in range(start, start + len(full))
                ]
                answers = distill.answers(self._decoder, [question.tokens for question in full], params)
                for question, p, answer in zip(questions, params, answers, strict=False):
                    text = self.target.decode(answer.tokens)
                    facts = {"question_id": question.id, "temperature": p.temperature, "answer": text}
                    store.append(answer, facts)
                bar.update(len(questions))

    def train(self, draft: LlamaTarget, answers: Sequence[distill.Answer]) -> distill.TrainState:
        """Trains for the steps of the run, which are decided by the clock the first time."""
        config = self.config
        if self._steps is None:
            self._steps = _steps_in(60.0 * config.minutes, draft, config.training, answers)
            self._write_settings()
        checkpoints = self.out / "checkpoints"
        with distill.checkpointer(checkpoints) as existing:
            done = existing.latest.step if existing.latest is not None else 0
        with tqdm.tqdm(total=self._steps, initial=done, unit="step", desc="training", smoothing=0.1) as bar:

            def report(step: int, loss: float, learning_rate: float) -> None:
                facts = {"step": step, "loss": loss, "learning_rate": learning_rate}
                _append(self.out / "metrics.jsonl", {"kind": "step"} | facts)
                bar.set_postfix_str(f"KL {loss:.3f}", refresh=False)
                bar.update()

            return distill.train(draft, config.training, answers, self._steps, checkpoints, report)

    def _questions(self) -> list["Question"]:
        """What is asked, in order; those before `held_out` are never trained on."""
        config = self.config
        chosen = read_prompts(Path(config.prompts)) if config.prompts else self._own_prompts()
        order = np.random.default_rng(config.seed).permutation(len(chosen))
        unique = {chosen[i].text: chosen[i] for i in order}.values()
        encoded = (Question(prompt.id, self.target.chat(prompt.text)) for prompt in unique)
        fitting = (question for question in encoded if len(question.tokens) <= config.max_prompt)
        asked = list(itertools.islice(fitting, config.num_answers))
        if len(asked) < config.num_answers:
            raise ValueError(
                f"num_answers is {config.num_answers}, and of {len(chosen)} prompts {len(asked)} are different and "
                f"have at most {config.max_prompt} tokens (max_len less max_new_tokens); ask for fewer, or give more"
            )
        return asked

    def _own_prompts(self) -> list[Prompt]:
        """Questions of the target's own; they are kept in `prompts.jsonl`, a file like any other of prompts."""
        config, path = self.config, self.out / "prompts.jsonl"
        rows = list(_whole_lines(path))
        texts = {row["turns"][0] for row in rows}
        drawn = 1 + max((row["question_id"] for row in rows), default=-1)
        opening, limit = self._opening(), 8 * config.num_answers
        with tqdm.tqdm(total=config.num_answers, initial=len(rows), unit="question", desc="questions") as bar:
            while len(rows) < config.num_answers:
                if drawn >= limit:
                    raise ValueError(
                        f"of {drawn} user turns that {config.target} was asked to write only {len(rows)} were usable; "
                        "give --prompts"
                    )
                params = [
                    sj.SamplingParams(temperature=1.0, seed=drawn + row, max_new_tokens=config.training.num_answer)
                    for row in range(config.answer_batch)
                ]
                for result in self._decoder.generate([opening] * config.answer_batch, params):
                    text = (result.text or "").strip()
                    fits = len(self.target.chat(text)) <= config.max_prompt
                    if result.finish_reason == "stop" and text and text not in texts and fits:
                        rows.append({"question_id": drawn, "category": "own", "turns": [text]})
                        texts.add(text)
                        _append(path, rows[-1])
                        bar.update()
                    drawn += 1
        return prompts.read(str(path))

    def _opening(self) -> list[int]:
        """A conversation in the target's format up to where the user's first words stand."""
        words = "What is the capital of France?"
        before, found, _ = self.target.tokenizer.render_chat(words).partition(words)
        if not found:
            raise ValueError(f"the chat format of {self.config.target} changes what the user says; give --prompts")
        return self.target.tokenizer.encode(before, add_special_tokens=False)

    def _write_settings(self) -> None:
        write_json(self.out / "distill.json", {"settings": self.settings, "steps": self._steps})


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt as the target reads it."""

    id: str
    tokens: list[int]


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts of a file as `experiments.prompts` reads them, or of JSON lines with a `question`, as GSM8K has them.

    Raises:
      ValueError: there is no such file, or it is neither.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [Prompt(str(number), path.stem, row["question"]) for number, row in enumerate(rows, start=1)]
    except (OSError, ValueError, KeyError, TypeError):
        return prompts.read(str(path))  # and its errors


def _steps_in(seconds: float, draft: LlamaTarget, config: distill.Config, answers: Sequence[distill.Answer]) -> int:
    """How many training steps fit into a time: a few are taken and dropped, the first of which compiles."""
    distill.train(draft, config, answers, 1)
    rehearsed = 3
    each = _seconds(lambda: distill.train(draft, config, answers, rehearsed)) / rehearsed
    return max(1, round(seconds / each))


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, if there is one; a last line that was cut off is removed from it."""
    data = path.read_bytes() if path.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    return map(json.loads, whole.splitlines())


def define_flags() -> None:
    cli.define_target(max_len=256)
    training = distill.Config()
    flags.DEFINE_string("prompts", None, "a JSON-lines file of prompts; by default the target writes them too")
    flags.DEFINE_integer("num_answers", Config.num_answers, "answers that the target writes", lower_bound=2)
    flags.DEFINE_integer("held_out", Config.held_out, "of these, how many are kept to measure with", lower_bound=1)
    flags.DEFINE_multi_float("temperature", list(Config.temperatures), "of the answers, in turns")
    flags.DEFINE_integer("max_new_tokens", training.num_answer, "most tokens of an answer", lower_bound=1)
    flags.DEFINE_integer("answer_batch", Config.answer_batch, "answers written at the same time", lower_bound=1)
    flags.DEFINE_multi_integer(
        "layer", list(Config.layers), "layers of the target that the draft starts from, in order"
    )
    flags.DEFINE_float("minutes", Config.minutes, "time for training", lower_bound=0.0)
    flags.DEFINE_integer("steps", None, "training steps, instead of --minutes", lower_bound=1)
    flags.DEFINE_integer("batch", training.num_rows, "answers per training step", lower_bound=1)
    flags.DEFINE_float("learning_rate", training.learning_rate, "its peak")
    flags.DEFINE_integer("loss_tokens", training.loss_tokens, "tokens that the loss looks at; 0 for all", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "of questions, answers and their order", lower_bound=0)
    flags.DEFINE_string("out", None, "folder of the draft model and of all that is kept", required=True)


def config_from_flags() -> Config:
    values = flags.FLAGS
    return Config(
        target=values.target,
        prompts=values.prompts,
        num_answers=values.num_answers,
        held_out=values.held_out,
        temperatures=tuple(values.temperature),
        answer_batch=values.answer_batch,
        layers=tuple(values.layer),
        minutes=values.minutes,
        steps=values.steps,
        seed=values.seed,
        training=distill.Config(
            num_rows=values.batch,
            num_tokens=values.max_len,
            num_answer=values.max_new_tokens,
            learning_rate=values.learning_rate,
            loss_tokens=values.loss_tokens,
            seed=values.seed,
        ),
    )


def describe(summary: dict[str, Any]) -> str:
    """What came of a run, for people."""
    before, after, seconds = (summary[name] for name in ("before", "after", "seconds"))
    rows = [
        ("same most likely token", "top1", ".1%"),
        ("accepted of a sampled token, Σ min(p, q)", "overlap", ".1%"),
        ("KL(p ‖ q), nats", "divergence", ".2f"),
    ]
    lines = [f"| {after['tokens']} held-out answer tokens | before | after |", "|---|---|---|"]
    lines += [f"| {name} | {before[key]:{style}} | {after[key]:{style}} |" for name, key, style in rows]
    lines.append(
        f"\n{summary['answers']} answers of {summary['answer_tokens']} tokens, {summary['steps']} steps; in this start "
        f"{seconds['answers']:.0f} s of answers and {seconds['training']:.0f} s of training."
    )
    return "\n".join(lines)


def main() -> int:
    config, out = config_from_flags(), Path(flags.FLAGS.out)
    if warning := machine.busy():
        cli.note(f"warning: {warning}")
    try:
        summary = Distillation(config, models.load(config.target), out).run()
    except KeyboardInterrupt:
        cli.note(f"\nstopped; what was done is in {out}: the same command goes on from there")
        return 130
    print(describe(summary))
    cli.note(f"draft model: {out}; figures: {out / 'metrics.jsonl'}")
    return 0


if __name__ == "__main__":
    define_flags()
    cli.run(main)
