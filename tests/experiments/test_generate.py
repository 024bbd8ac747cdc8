import json

import pytest
from absl import flags
from absl.testing import flagsaver

import models
from experiments import cli, generate
from tests.experiments.test_programs import run_program


@pytest.fixture(scope="module")
def defined_flags(define_flags):
    define_flags(generate)


@pytest.fixture
def generates(toy, monkeypatch, capsys, defined_flags):
    """Runs the program in this process on the toy; gives exit code, standard output and standard error."""
    monkeypatch.setattr(models, "load", lambda name, dtype, attention: toy)

    @flagsaver.flagsaver
    def run(*arguments):
        flags.FLAGS.unparse_flags()
        flags.FLAGS(["generate", "--max_len=64", "--max_new_tokens=8", *arguments])
        code = cli.guarded(generate.main)
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_text_goes_to_standard_output_and_the_rest_to_standard_error(generates, toy):
    code, out, err = generates("--prompt=hello")
    assert code == 0
    assert "8 tokens (length)" in err and "greedy_identical by rule match" in err
    code, streamed, _ = generates("--prompt=hello", "--stream")
    assert code == 0 and streamed == out


def test_several_prompts_and_json(generates, tmp_path):
    (tmp_path / "prompt.txt").write_text("from a file")
    file = tmp_path / "out.jsonl"
    code, out, err = generates(
        "--prompt=one", f"--prompt_file={tmp_path / 'prompt.txt'}", "--raw", "--temperature=0.9", "--seed=3",
        f"--json={file}", "--proposer=prompt_lookup:max_ngram=2,length=4", "--rule=rejection",
    )  # fmt: skip
    assert code == 0 and "--- one" in out and "--- from a file" in out and "seed 3, 3" in err
    first, second = map(json.loads, file.read_text().splitlines())
    assert first["prompt"] == "one" and first["prompt_tokens"] == list(b"one") and first["seed"] == 3
    assert second["contract"] == {"promise": "exact_sampling", "rule": "rejection"}
    assert len(second["tokens"]) == 8 and sum(second["stats"]["accepted_histogram"]) == second["stats"]["cycles"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give at least one --prompt"),
        (["--prompt=x", "--temperature=-1"], "temperature must be 0 (greedy) or a positive number"),
        (["--prompt=x", "--top_p=1.5"], "top_p must be in (0, 1]"),
        (["--prompt=x", "--stop="], "a stop string must not be empty"),
        (["--prompt=x", "--proposer=nope"], "no proposer is named 'nope'"),
        (["--prompt=x", "--rule=nope"], "no rule is named 'nope'"),
        (["--prompt=x", "--proposer=plain:length=3"], "proposer 'plain' has no option 'length'"),
        (["--prompt=x", "--draft=y"], "proposer 'prompt_lookup' has no option 'model'"),
        (["--prompt=x", "--proposer=synthetic:acceptance=1"], "experiments.bench only"),
        (["--prompt=x", "--chat", "--raw"], "--chat and --raw are opposites"),
        (["--prompt=x", "--prompt=y", "--stream"], "--stream shows the text of one prompt"),
        (["--prompt=x", "--json=/no/such/folder/x"], "does not exist"),
        (["--prompt_file=/no/such/file"], "No such file"),
        (["--prompt=", "--raw"], "prompt 0 is empty"),
        (["--prompt=" + 100 * "x"], "no room for a new token"),
    ],
)
def test_bad_values_end_in_one_line(generates, arguments, message):
    code, out, err = generates(*arguments)
    assert (code, out) == (2, "")
    assert message in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.slow
def test_the_real_model_answers(tmp_path):
    done = run_program("generate", "--prompt=What is the capital of France?", f"--json={tmp_path / 'x.jsonl'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
    assert json.loads((tmp_path / "x.jsonl").read_text())["finish_reason"] == "stop"
