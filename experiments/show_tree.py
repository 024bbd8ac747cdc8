"""Draws one cycle of decoding: the drafted tree, what the target thinks of it, and what became of every node.

    python -m experiments.show_tree
    python -m experiments.show_tree --prompt "What is the capital of France?" --cycle 3 --picture tree.png \
        --proposer draft_model:tree=3x2x1,law=without_replacement --draft path/to/small/model \
        --rule recursive --temperature 0.8 --seed 7

Decodes --cycle cycles and shows the last of them. By default prompt lookup drafts behind a text that repeats itself, so
that there is something to see. Prints the tree: for every token the draft's probability (where it was drawn), the
target's, the probability of its coin (where the rule tosses coins), and whether it was accepted or why not. `--picture
FILE` draws the same, `--json FILE` writes everything. About half a minute on two cores, most of it compilation.
"""

import dataclasses
import json
import secrets
from pathlib import Path
from typing import Any

import jax
from absl import flags

import spec_jax as sj
from experiments import cli, tree_picture
from experiments.explain import Cycle, Fate, Node, explain, share
from spec_jax import decode, stop

REPEATS_ITSELF = "The owl and the cat went to sea in a boat. The owl and the cat came home in a boat. The owl and the"

_MARKS = {Fate.ROOT: " ", Fate.ACCEPTED: "✓", Fate.REJECTED: "✗"}


@dataclasses.dataclass(frozen=True)
class Config:
    """What to show; the flags of the same names say more."""

    decoder: cli.DecoderConfig
    prompt: str
    raw: bool
    params: sj.SamplingParams
    cycle: int
    picture: Path | None
    json: Path | None


def define_flags() -> None:
    cli.define_decoder(max_len=1024)
    flags.DEFINE_string("prompt", None, "the prompt; by default a text that repeats itself, continued as it stands")
    flags.DEFINE_bool("raw", False, "continue the prompt as it stands, without the model's chat format")
    cli.define_sampling(max_new_tokens=128)
    flags.DEFINE_integer("cycle", 1, "which cycle to show; 1 is the first behind the prompt", lower_bound=1)
    flags.DEFINE_string("picture", None, "draw the tree into this file: .png, .pdf or .svg")
    flags.DEFINE_string("json", None, "write the data of all nodes to this file")


def config_from_flags() -> Config:
    """Raises ValueError for values that cannot be used."""
    values, params = flags.FLAGS, cli.sampling_params()
    if params.seed is None:  # The seed is reported, so that the same cycle can be shown again.
        params = dataclasses.replace(params, seed=secrets.randbits(64))
    if values.prompt is not None and not values.prompt.strip():
        raise ValueError("the prompt is empty: give a text to answer or to continue")
    picture = cli.output_file("picture")
    if picture is not None and picture.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--picture {picture} must end in .png, .pdf or .svg")
    return Config(
        decoder=cli.DecoderConfig.from_flags(),
        prompt=REPEATS_ITSELF if values.prompt is None else values.prompt,
        raw=values.raw or values.prompt is None,
        params=params,
        cycle=values.cycle,
        picture=picture,
        json=cli.output_file("json"),
    )


def nth_cycle(decoder: sj.Decoder, prompt: Any, params: sj.SamplingParams, number: int) -> Cycle:
    """Decodes up to the cycle of this number, 1 for the first, and explains it.

    Raises:
      ValueError: the text ends before it.
    """
    request = decoder.request([prompt], params)
    state = decoder.start(request)
    if any(request.budgets):
        state = decode.prefill(decoder.plan, decoder.params, state)
    for done in range(number):
        if (status := int(state.status_B[0])) != stop.RUNNING:
            raise ValueError(
                f"there is no cycle {number}: the text ended after {done} ({stop.REASONS[status]}); give a smaller "
                "--cycle, or more room by --max_new_tokens, --max_len or --ignore_eos"
            )
        if done < number - 1:
            state = decode.step(decoder.plan, decoder.params, state)
    return explain(decoder.plan, decoder.params, jax.block_until_ready(state))


def heading(config: Config, cycle: Cycle) -> str:
    """What is shown, in a line."""
    params, decoder = config.params, config.decoder
    how = "greedy" if params.temperature == 0.0 else f"temperature {params.temperature:g}, seed {params.seed}"
    label = decoder.proposer.label
    law = "" if cycle.law in label else f" ({cycle.law})"
    return f"cycle {cycle.number}, {label}{law}, rule {decoder.rule.label}, {how}"


def summary(cycle: Cycle) -> str:
    """Counts of the cycle, and what it emitted."""
    emitted = "".join(f" {token.text}" for token in cycle.emitted)
    end = f"; the text ends here ({cycle.finish_reason})" if cycle.finish_reason else ""
    count = len(cycle.emitted)
    return (
        f"{len(cycle.nodes)} nodes with the root, {cycle.num_valid} drafted, {cycle.num_accepted} accepted; "
        f"{count} token{'s' * (count != 1)} emitted:{emitted}{end}"
    )


def as_text(cycle: Cycle) -> str:
    """The tree with a line for every node, and one for the token that the target added."""
    lines: list[tuple[str, ...]] = [("", "draft", "target", "coin", "")]

    def add(node: Node, lead: str, branch: str) -> None:
        mark = _MARKS.get(node.fate, "·")
        shares = ("" if p is None else share(p) for p in (node.draft_prob, node.target_prob, node.coin))
        lines.append((lead + branch + node.token.text, *shares, f"{mark} {node.reason}"))
        inner = lead + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        children = cycle.children(node.number)
        extra = cycle.extra if cycle.extra and cycle.extra.parent == node.number else None
        for child in children:
            add(child, inner, "└─ " if child is children[-1] and extra is None else "├─ ")
        if extra is not None:
            p = "" if extra.target_prob is None else share(extra.target_prob)
            lines.append((f"{inner}└─ {extra.token.text}", "", p, "", f"+ {extra.kind} token"))

    add(cycle.nodes[0], "", "")
    used = [0, *(i for i in (1, 2, 3) if any(line[i] for line in lines[1:])), 4]
    widths = {i: max(len(line[i]) for line in lines) for i in used}
    cells = ([line[i].rjust(widths[i]) if i in (1, 2, 3) else line[i].ljust(widths[i]) for i in used] for line in lines)
    return "\n".join("  ".join(row).rstrip() for row in cells)


def as_json(config: Config, cycle: Cycle) -> dict[str, Any]:
    """The cycle as written by --json."""
    decoder = config.decoder
    return {
        "prompt": config.prompt,
        "target": decoder.target,
        "dtype": decoder.dtype,
        "proposer": str(decoder.proposer),
        "rule": str(decoder.rule),
        "params": dataclasses.asdict(config.params),
    } | dataclasses.asdict(cycle)


def run(config: Config) -> None:
    """Decodes, prints and writes.

    Raises:
      ValueError: something given cannot be used, or the text ends before the cycle.
    """
    decoder = config.decoder.build()
    prompt = config.prompt if config.raw else decoder.target.chat(config.prompt)
    cycle = nth_cycle(decoder, prompt, config.params, config.cycle)
    print(heading(config, cycle))
    print(f"{cycle.behind}\n")
    print(as_text(cycle))
    print(f"\n{summary(cycle)}")
    if config.json is not None:
        config.json.write_text(json.dumps(as_json(config, cycle), ensure_ascii=False, indent=1) + "\n", "utf-8")
    if config.picture is not None:
        tree_picture.draw(cycle, heading(config, cycle), summary(cycle)).savefig(config.picture)


def main() -> None:
    run(config_from_flags())


if __name__ == "__main__":
    define_flags()
    cli.run(main)
