"""Generates text from the command line.

    python -m experiments.generate --prompt "What is the capital of France?"
    python -m experiments.generate --raw --prompt "Once upon a time" --temperature 0.8 --top_p 0.95 --seed 7 --stream
    python -m experiments.generate --proposer draft_model --draft path/to/small/model --rule rejection --prompt "..."

Prints the texts on standard output, and what it took on standard error. `--stream` shows one text as it is committed.
`--json FILE` writes everything about each result as a JSON line. About half a minute on two cores, most of it
compilation.
"""

import dataclasses
import json
import secrets
import time
from pathlib import Path
from typing import Any

from absl import flags

import spec_jax as sj
from experiments import cli


@dataclasses.dataclass(frozen=True)
class Config:
    """What to generate; the flags of the same names say more."""

    decoder: cli.DecoderConfig
    prompts: tuple[str, ...]
    raw: bool
    params: sj.SamplingParams
    stream: bool
    json: Path | None


def define_flags() -> None:
    cli.define_decoder(max_len=1024)
    flags.DEFINE_multi_string("prompt", [], "a prompt; give it several times for several texts")
    flags.DEFINE_string("prompt_file", None, "a text file that is one prompt")
    flags.DEFINE_bool("chat", False, "put the prompt into the model's chat format: what happens unless --raw is given")
    flags.DEFINE_bool("raw", False, "continue the prompt as it stands")
    cli.define_sampling(max_new_tokens=128)
    flags.DEFINE_bool("stream", False, "show the text as it is committed (one prompt)")
    flags.DEFINE_string("json", None, "write the results to this file, one JSON line each")


def config_from_flags() -> Config:
    """Raises ValueError for values that do not belong together."""
    values = flags.FLAGS
    prompts = list(values.prompt)
    if values.prompt_file is not None:
        prompts.append(Path(values.prompt_file).read_text(encoding="utf-8"))
    if not prompts:
        raise ValueError("give at least one --prompt or a --prompt_file")
    if values.chat and values.raw:
        raise ValueError("--chat and --raw are opposites; give one of them")
    if values.stream and (len(prompts) > 1 or values.json):
        raise ValueError("--stream shows the text of one prompt; leave out the others, and --json")
    return Config(
        decoder=cli.DecoderConfig.from_flags(),
        prompts=tuple(prompts),
        raw=values.raw,
        params=cli.sampling_params(),
        stream=values.stream,
        json=cli.output_file("json"),
    )


def run(config: Config) -> None:
    """Generates and prints.

    Raises:
      ValueError: something given cannot be used; nothing has been generated then.
    """
    for number, prompt in enumerate(config.prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {number} is empty: give a text to answer or to continue")
    decoder = config.decoder.build()
    prompts = list(config.prompts) if config.raw else [decoder.target.chat(prompt) for prompt in config.prompts]
    if config.stream:
        params = config.params
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(64))
        for piece in decoder.stream(prompts[0], params):
            print(piece, end="", flush=True)
        print()
        if params.temperature > 0.0:
            cli.note(f"seed {params.seed}")
        return
    started = time.perf_counter()
    results = decoder.generate(prompts, config.params)
    seconds = time.perf_counter() - started
    for prompt, result in zip(config.prompts, results, strict=True):
        if len(results) > 1:
            print(f"--- {prompt.strip().splitlines()[0][:80]}")
        print(result.text)
    if config.json is not None:
        with config.json.open("w", encoding="utf-8") as file:
            for prompt, result in zip(config.prompts, results, strict=True):
                file.write(json.dumps(as_json(prompt, result), ensure_ascii=False) + "\n")
    cli.note(_summary(results, seconds))


def as_json(prompt: str, result: sj.Result) -> dict[str, Any]:
    """A result as written by --json."""
    stats = result.stats
    return (
        {"prompt": prompt}
        | dataclasses.asdict(result)
        | {
            "stats": dataclasses.asdict(stats)
            | {"tokens_per_cycle": stats.tokens_per_cycle, "survival": stats.survival}
        }
    )


def _summary(results: sj.Results, seconds: float) -> str:
    stats, contract = results.stats, results[0].contract
    ends = ", ".join(f"{len(r.tokens)} tokens ({r.finish_reason})" for r in results)
    if contract.promise != sj.Promise.GREEDY_IDENTICAL:
        ends += f"; seed {', '.join(str(r.seed) for r in results)}"
    return (
        f"{ends}; {seconds:.1f} s with compilation; {stats.tokens_per_cycle:.2f} tokens per cycle; "
        f"{contract.promise} by rule {contract.rule}"
    )


def main() -> None:
    run(config_from_flags())


if __name__ == "__main__":
    define_flags()
    cli.run(main)
