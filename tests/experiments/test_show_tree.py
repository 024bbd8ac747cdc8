import json

import pytest
from absl import flags
from absl.testing import flagsaver

import models
from experiments import cli, show_tree, tree_picture
from experiments.explain import Cycle, Extra, Fate, Node, Token
from tests.experiments.test_programs import run_program


@pytest.fixture(scope="module")
def defined_flags(define_flags):
    define_flags(show_tree)


@pytest.fixture
def shows(toy, monkeypatch, capsys, defined_flags):
    """Runs the program in this process on the toy; gives exit code, standard output and standard error."""
    monkeypatch.setattr(models, "load", lambda name, dtype, attention: toy)

    @flagsaver.flagsaver
    def run(*arguments):
        flags.FLAGS.unparse_flags()
        flags.FLAGS(["show_tree", "--max_len=160", "--max_new_tokens=8", *arguments])
        code = cli.guarded(show_tree.main)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def node(number, parent, depth, text, fate, reason, draft=None, target=0.5, coin=None, toss=None):
    return Node(number, parent, depth, Token(number, text), draft, target, coin, toss, None, fate, reason)


@pytest.fixture
def cycle():
    nodes = (
        node(0, None, 0, "' a'", Fate.ROOT, "the last committed token", target=None),
        node(1, 0, 1, "' b'", Fate.REJECTED, "rejected: coin .25 lost", 0.4, 0.1, 0.25, 0.75),
        node(2, 0, 1, "'$x$ 猫'", Fate.ACCEPTED, "accepted", 0.2, 0.999, 1.0, 0.5),
        node(3, 1, 2, "'c'", Fate.PASSED_OVER, "below a rejected node", None, 0.001, 0.0, 0.5),
        node(4, 2, 2, "'a token that is very long indeed'", Fate.INVALID, "not drafted", 1.0, 0.5, 0.0, 0.5),
    )
    extra = Extra("bonus", 2, Token(9, "'!'"), 0.125)
    return Cycle(3, "once upon", "iid", nodes, (nodes[2].token, extra.token), extra, None)


def test_the_tree_as_text(cycle):
    assert show_tree.as_text(cycle).splitlines() == [
        "                                          draft  target  coin",
        "' a'                                                             the last committed token",
        "├─ ' b'                                     .40     .10   .25  ✗ rejected: coin .25 lost",
        "│  └─ 'c'                                          <.01     0  · below a rejected node",
        "└─ '$x$ 猫'                                  .20    >.99     1  ✓ accepted",
        "   ├─ 'a token that is very long indeed'      1     .50     0  · not drafted",
        "   └─ '!'                                           .12        + bonus token",
    ]
    assert show_tree.summary(cycle) == ("5 nodes with the root, 3 drafted, 1 accepted; 2 tokens emitted: '$x$ 猫' '!'")


def test_the_picture_grows_with_the_tree_and_draws_any_text(cycle, tmp_path):
    figure = tree_picture.draw(cycle, "a heading " * 30, "a summary")
    figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    texts = {text.get_text() for axes in figure.axes for text in axes.texts}
    assert {"'$x$ \\u732b'", "'a token that is v…'", "draft .40  target .10  coin .25", "bonus token"} <= texts
    wide = cycle.nodes + tuple(node(n, 2, 2, "'x'", Fate.PASSED_OVER, "") for n in range(5, 32))
    large = tree_picture.draw(Cycle(3, "", "iid", wide, cycle.emitted, cycle.extra, None), "", "")
    assert large.get_figheight() > 3 * figure.get_figheight()


def test_the_program_draws_writes_and_repeats_itself(shows, tmp_path):
    arguments = (
        "--proposer=draft_model:tree=2x2,law=without_replacement", "--draft=toy", "--rule=recursive", "--raw",
        "--prompt=abcabc", "--temperature=0.9", "--cycle=2", f"--json={tmp_path / 'a.json'}",
    )  # fmt: skip
    code, out, _ = shows(*arguments, "--seed=4", f"--picture={tmp_path / 'a.png'}")
    assert code == 0
    assert out.startswith("cycle 2, draft_model:model=toy,tree=2x2,law=without_replacement, rule recursive, temp")
    assert "7 nodes with the root, 6 drafted" in out and "✓ accepted" in out and "+ bonus token" in out
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["number"], found["prompt"], found["params"]["seed"]) == (2, "abcabc", 4)
    assert len(found["nodes"]) == 7 and found["nodes"][3]["parent"] == 1
    assert {"draft_prob", "target_prob", "coin", "fate", "reason"} <= found["nodes"][1].keys()
    _, again, _ = shows(*arguments, "--seed=4")
    assert again == out
    _, drawn, _ = shows(*arguments)
    assert f"seed {json.loads((tmp_path / 'a.json').read_text())['params']['seed']}" in drawn


def test_the_default_shows_something_drafted(shows):
    code, out, _ = shows()
    assert code == 0 and "6 nodes with the root, 5 drafted" in out and "draft  " not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cycle=9"], "there is no cycle 9: the text ended after 8 (length); give a smaller --cycle"),
        (["--max_new_tokens=0"], "there is no cycle 1: the text ended after 0 (length)"),
        (["--prompt= "], "the prompt is empty"),
        (["--temperature=-1"], "temperature must be 0 (greedy) or a positive number"),
        (["--proposer=nope"], "no proposer is named 'nope'"),
        (["--proposer=draft_model"], "needs model=PATH"),
        (["--rule=block", "--proposer=draft_model:tree=2x2", "--draft=toy"], "rule 'block' judges chains"),
        (["--picture=/no/such/folder/x.png"], "the folder of --picture /no/such/folder/x.png does not exist"),
        (["--json=/no/such/folder/x"], "the folder of --json /no/such/folder/x does not exist"),
        (["--picture=tree.doc"], "--picture tree.doc must end in .png, .pdf or .svg"),
    ],
)
def test_bad_values_end_in_one_line(shows, arguments, message):
    code, out, err = shows("--proposer=plain", *arguments)
    assert (code, out) == (2, "")
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.slow
def test_the_real_model(tmp_path):
    done = run_program("show_tree", f"--picture={tmp_path / 'a.png'}")
    assert done.returncode == 0, done.stderr
    assert "' cat'" in done.stdout and "6 nodes with the root, 5 drafted" in done.stdout
    assert (tmp_path / "a.png").stat().st_size > 10_000
