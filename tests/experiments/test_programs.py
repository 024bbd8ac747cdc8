"""What all programs have in common on the command line."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def run_program(name, *arguments):
    command = [sys.executable, "-m", f"experiments.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["generate", "bench", "checks", "quickstart", "show_tree"])
def test_help_gives_the_command_and_the_flags(name):
    text = run_program(name, "--help").stdout
    assert f"python -m experiments.{name}" in text
    assert "--target" in text and "--max_len" in text


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["generate", "--prompt=x", "--seed=abc"], "flag --seed=abc"),
        (["generate", "--prompt=x", "--nonsense"], "nonsense"),
        (["generate", "--prompt=x", "stray"], "unexpected argument 'stray'"),
        (["generate", "--prompt=x", "--target=no-such-model"], "'no-such-model' is no model"),
        (["bench", "--proposer=nope"], "no proposer is named 'nope'"),
        (["bench", "--prompts=/no/such/file"], "no file of prompts at /no/such/file"),
        (["bench", "--peer=hf", "--temperature=1"], "the peer decodes single prompts, greedily"),
        (["checks", "--limit=0"], "limit"),
        (["show_tree", "--cycle=0"], "cycle"),
        (["quickstart", "--target=no-such-model"], "'no-such-model' is no model"),
    ],
)
def test_bad_values_end_in_one_line(command, message):
    done = run_program(*command)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: ") and "Traceback" not in done.stderr


@pytest.mark.slow
def test_quickstart(tmp_path):
    done = run_program("quickstart", "--max_new_tokens=8", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "The speculative tokens are those of plain decoding, every one." in done.stdout
    assert (tmp_path / "quickstart.png").is_file() and "prompt_lookup" in done.stdout
