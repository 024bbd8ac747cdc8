"""A first look: a small real model decodes plainly and speculatively, with the same output, and shows what it took.

    python -m experiments.quickstart

Fetches SmolLM2-135M (98 MB) on first use, streams one text, decodes five short prompts with and without prompt
lookup, checks that the tokens are the same, prints what was measured, and saves a picture. Under three minutes on two
CPU cores, download apart; a good half of it is compilation.
"""

import time
from pathlib import Path

from absl import flags

import models
import spec_jax as sj
from experiments import cli, plots, prompts, report
from experiments.bench import Bench, Config
from experiments.cli import note


def define_flags() -> None:
    cli.define_target(max_len=512)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of weights and activations")
    flags.DEFINE_integer("max_new_tokens", 64, "most new tokens of each prompt", lower_bound=1)
    flags.DEFINE_string("out", "results", "folder of the picture and the records")


def run(config: Config, out: Path) -> int:
    """The whole show; the exit code is 1 if an output differs from plain decoding other than by a near tie."""
    (dtype,), (proposer,), (rule,) = config.dtypes, config.proposers, config.rules
    started = time.perf_counter()
    note(f"loading {config.target} ({dtype})")
    target = models.load(config.target, dtype=dtype)

    prompt = next(p for p in prompts.BUILTIN if p.id == "maths")
    note(f"compiling, then streaming (greedy, {proposer.name}, rule {rule.name})")
    decoder = sj.Decoder(target, proposer=proposer.build(), rule=rule.build(), max_len=config.max_len)
    print(f"\n> {prompt.text}\n")
    for piece in decoder.stream(target.chat(prompt.text), config.params):
        print(piece, end="", flush=True)
    print("\n")

    note(f"decoding {len(prompts.BUILTIN)} prompts plainly and speculatively, in turns")
    bench = Bench(config, prompts.BUILTIN, out / "quickstart", lambda name, dtype: target, resume=False)
    rows = bench.run()
    print(report.markdown(rows, bench.heading()))
    print()
    _, speculative = rows
    print(_shares(speculative))
    print(_sameness(speculative))
    picture = out / "quickstart.png"
    plots.overview(rows).savefig(picture)
    note(f"picture: {picture}; records: {bench.ledger.path}; {time.perf_counter() - started:.0f} s in all")
    return int(speculative.differences > speculative.ties)


def _shares(row: report.Row) -> str:
    times = row.cycle.times
    parts = [f"{name} {getattr(times, name).median / times.total:.1%}" for name in ("propose", "verify", "reconcile")]
    return f"A speculative cycle's time: {', '.join(parts)}."


def _sameness(row: report.Row) -> str:
    if not row.differences:
        return "The speculative tokens are those of plain decoding, every one."
    if row.differences == row.ties:
        return "The speculative tokens part from those of plain decoding at near ties only (see above)."
    return "The speculative tokens DIFFER from those of plain decoding (see above): please report this."


def main() -> int:
    values = flags.FLAGS
    config = Config(
        target=values.target,
        dtypes=(values.dtype,),
        repeats=2,
        max_len=values.max_len,
        params=sj.SamplingParams(temperature=0.0, seed=0, max_new_tokens=values.max_new_tokens),
    )
    return run(config, Path(values.out))


if __name__ == "__main__":
    define_flags()
    cli.run(main)
