import json

import pytest

import spec_jax as sj
from experiments import bench, registry


def lines(made):
    return [json.loads(line) for line in made.ledger.path.read_text().splitlines()]


def kinds(made):
    return [line["kind"] for line in lines(made)]


@pytest.mark.smoke
def test_a_run_end_to_end(make_bench, capsys):
    made = make_bench()
    rows, code = bench.run(made)
    assert code == 0
    plain, lookup = rows
    assert plain.variant.is_baseline and lookup.variant.label == "prompt_lookup:length=3"
    assert lookup.prompts == 3 and lookup.tokens == plain.tokens == 36
    assert (lookup.compilations, lookup.differences) == (0, 0)
    assert plain.stats.tokens_per_cycle == 1.0 and lookup.stats.tokens == 72
    assert lookup.predicted > 0.0 and lookup.cycle.memory.kv > 0
    out = capsys.readouterr().out
    assert "prompt_lookup:length=3" in out and "By category" in out
    assert (made.out / "bench.md").read_text() in out
    assert (made.out / "bench.png").stat().st_size > 10_000

    assert kinds(made) == ["call"] * 12 + ["cycle"] * 2 + ["summary"]
    call, summary = lines(made)[0], lines(made)[-1]
    assert call["tokens"] and call["speed"]["wall_s"] > 0.0 and call["stats"]["cycles"] == 12
    assert {"command", "date", "settings", "commit", "rows"} <= summary.keys()
    assert {"cpu", "cores", "versions", "code"} <= summary["settings"]["machine"].keys()
    assert summary["rows"][1]["predicted"] == lookup.predicted


def test_a_second_run_does_nothing_and_reports_the_same(make_bench, monkeypatch):
    first = make_bench()
    rows = first.run()
    before = kinds(first)
    second = make_bench()
    monkeypatch.setattr(bench.Ours, "run", None)
    assert [row.as_json() for row in second.run()] == [row.as_json() for row in rows]
    assert kinds(second) == [*before, "summary"]


def test_an_interrupted_run_goes_on(make_bench, monkeypatch, capsys):
    made = make_bench()
    cell, done = made._cell, []

    def stop_at_the_third(*args):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(args)
        return cell(*args)

    monkeypatch.setattr(made, "_cell", stop_at_the_third)
    assert bench.run(made) == ([], 130)
    assert "goes on from there" in capsys.readouterr().err
    assert kinds(made) == ["call"] * 4
    # Killed while it wrote: the last line is half there.
    path = made.ledger.path
    path.write_bytes(path.read_bytes()[:-100])

    again = make_bench()
    rows, code = bench.run(again)
    assert code == 0 and "3 of 12 calls are in" in capsys.readouterr().err
    assert kinds(again) == ["call"] * 12 + ["cycle"] * 2 + ["summary"]
    assert len(rows[1].by_repeat) == 2


def test_a_new_variant_is_timed_beside_plain_and_the_rest_is_kept(make_bench):
    make_bench().run()
    more = registry.parse_proposer("prompt_lookup:length=2"), registry.parse_proposer("prompt_lookup:length=3")
    made = make_bench(proposers=more)
    rows = made.run()
    assert len(rows) == 3
    new = [line for line in lines(made) if line["kind"] == "call"][12:]
    assert {line["variant"]["label"] for line in new} == {"prompt_lookup:length=2"} and len(new) == 6
    assert all(line["baseline"]["wall_s"] > 0.0 for line in new)


@pytest.mark.parametrize(
    "change", [{"target": "another"}, {"params": sj.SamplingParams(0.0, seed=0, max_new_tokens=11)}]
)
def test_other_settings_are_another_measurement(make_bench, change):
    make_bench().run()
    made = make_bench(**change)
    made.run()
    assert kinds(made).count("call") == 24


def test_every_rule_runs_and_sampled_match_equals_plain(make_bench):
    made = make_bench(
        repeats=1,
        rules=tuple(map(registry.parse_rule, ("match", "rejection", "typical"))),
        params=sj.SamplingParams(temperature=0.8, seed=5, max_new_tokens=12),
    )
    plain, match, rejection, typical = made.run()
    assert match.compared and match.differences == 0
    assert not rejection.compared and not typical.compared
    assert rejection.variant.label == "prompt_lookup:length=3 rejection"


def test_synthetic_acceptance_drafts_from_the_plain_output(make_bench):
    made = make_bench(repeats=1, proposers=(registry.parse_proposer("synthetic:acceptance=1/1/0"),))
    _, synthetic = made.run()
    assert synthetic.stats.tokens_per_cycle == 3.0
    assert (synthetic.compilations, synthetic.differences) == (0, 0)


def test_a_draft_model_is_its_own_perfect_draft(make_bench):
    made = make_bench(repeats=1, proposers=(registry.parse_proposer("draft_model:model=toy,tree=2"),))
    assert made.run()[1].stats.tokens_per_cycle == 3.0


def test_batches(make_bench, capsys):
    made = make_bench(batch=2, repeats=1)
    assert "last 1 prompts do not fill a batch of 2 and are left out" in capsys.readouterr().err
    rows = made.run()
    assert rows[0].prompts == 2 and rows[1].loop_cycle_s is None
    assert rows[1].differences == 0


def test_a_wrong_output_is_noticed(make_bench, monkeypatch, capsys):
    made = make_bench(repeats=1)
    run = made.runners[1].run

    def spoiled(*args):
        timed = run(*args)
        timed.tokens[0][5] = (timed.tokens[0][5] + 1) % 256
        return timed

    monkeypatch.setattr(made.runners[1], "run", spoiled)
    rows, code = bench.run(made)
    assert code == 1 and rows[1].differences == 3 and rows[1].ties < 3
    assert "p0 differs from token 5 on, top-2 gap" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repeats": 0}, "at least 1"),
        ({"batch": 4}, "--batch 4 is more than the 3 prompts"),
        ({"dtypes": ("float32", "float32")}, "given twice"),
        ({"peer": True, "batch": 2}, "single prompts, greedily, in float32"),
        ({"max_len": 12}, "no room for a prompt"),
        ({"proposers": (registry.parse_proposer("draft_model:model=toy"),), "peer": True, "dtypes": ("bfloat16",)},
         "add --dtype float32"),
    ],
)  # fmt: skip
def test_errors(make_bench, changes, message):
    with pytest.raises(ValueError, match=message):
        make_bench(**changes)
