import pytest

from experiments import checks, plots, report
from experiments.measure import CycleTimes, Memory, Spread
from experiments.records import Cycle, Shape, Speed, Variant
from spec_jax import Stats, Tree
from spec_jax.growth import Beam
from tests.experiments.test_records import PLAIN, STATS, call

LOOKUP = Variant("spec_jax", "prompt_lookup:length=3", "match", "float32", "prompt_lookup:length=3")
PEER = Variant("transformers 5", "plain", "match", "float32", "transformers plain")


def exact(seconds):
    return Spread(seconds, seconds, seconds)


def cycle_of(variant, propose, verify, reconcile, plain, shape=None):
    times = CycleTimes(exact(propose), exact(verify), exact(reconcile), exact(plain))
    return Cycle("s", variant, times, Memory(3 * 2**20, 2**20), shape)


def lookup_call(repeat, seconds, base_seconds, **changes):
    return call(
        repeat, LOOKUP, speed=Speed(20, seconds, 20, seconds / 2), baseline=Speed(20, base_seconds, 20, 1.0), **changes
    )


@pytest.fixture
def rows():
    calls = [call(r, speed=Speed(20, s, 20, 1.0), baseline=Speed(20, s, 20, 1.0)) for r, s in enumerate((2.0, 4.0))]
    calls += [lookup_call(0, 1.0, 2.0), lookup_call(1, 4.0, 4.0)]
    peer = {"stats": None, "baseline": Speed(20, 2.0, 20, 1.0)}
    calls += [call(r, PEER, speed=Speed(20, 8.0, 19, 7.0), **peer) for r in range(2)]
    cycles = [cycle_of(PLAIN, 0.0, 0.01, 0.0, 0.01), cycle_of(LOOKUP, 0.001, 0.015, 0.004, 0.01)]
    return report.rows(calls, cycles)


def test_ratios_are_of_the_same_turn(rows):
    plain, lookup, peer = rows
    assert plain.by_repeat == (10.0, 5.0) and lookup.by_repeat == (20.0, 5.0)
    assert plain.speedup == exact(1.0)
    assert lookup.speedup == Spread(1.5, 1.0, 2.0)
    assert lookup.ratio_to(plain) == Spread(1.5, 1.0, 2.0)
    assert lookup.decode_speedup == Spread(1.25, 0.5, 2.0)
    assert peer.decode_by_repeat == (19 / 7, 19 / 7)
    assert peer.speedup == exact(0.25)


def test_prediction_is_tokens_per_cycle_over_the_cost_of_a_cycle(rows):
    assert rows[1].stats.tokens_per_cycle == 2.2
    full = (STATS.verified / STATS.cycles - 1) / (len(STATS.accepted_histogram) - 1)
    assert rows[1].predicted == pytest.approx(2.2 * 0.01 / (0.001 + full * 0.019 + (1 - full) * 0.01))
    assert rows[1].loop_cycle_s == pytest.approx(2.5 / 20)
    assert rows[2].predicted is None


TREE = Variant("spec_jax", "draft_model:model=d,tree=3x2", "recursive", "float32", "draft_model:tree=3x2")


def tree_rows(verified, shape):
    """10 cycles of a tree of 10 nodes and depth 2, of which 90 nodes are drafted at most."""
    stats = Stats(10, 60, verified, 12, 6, 4, (3, 2, 5))
    speed, plain = Speed(22, 1.0, 22, 0.5), Speed(22, 2.0, 22, 1.0)
    calls = [call(speed=plain, baseline=plain), call(0, TREE, speed=speed, baseline=plain, stats=stats)]
    return report.rows(calls, [cycle_of(PLAIN, 0.0, 0.01, 0.0, 0.01), cycle_of(TREE, 0.002, 0.02, 0.004, 0.01, shape)])


@pytest.mark.parametrize(("verified", "full"), [(100, 1.0), (10, 0.0), (55, 0.5)])
def test_prediction_for_a_tree_knows_its_nodes_from_its_depth(verified, full):
    _, row = tree_rows(verified, Shape.of(Tree.branching((3, 2))))
    assert row.predicted == pytest.approx(2.2 * 0.01 / (0.002 + full * 0.024 + (1 - full) * 0.01))


def test_trees_of_different_shape_stand_in_one_table():
    text = report.markdown(tree_rows(100, Shape.of(Tree.branching((3, 2)))), "")
    table = text[text.index("**By tree.**") :].splitlines()
    (line,) = (line for line in table[: table.index("", 2)] if "float32" in line)
    assert [c.strip() for c in line.split("|")[1:-1]] == [
        "draft_model:tree=3x2", "float32", "3 6", "10", "2", "10.00", "6.00", "1.20", "0.20", "2.20", "2.00",
    ]  # fmt: skip


def test_shapes_have_names():
    assert str(Shape.of(Tree.chain(3))) == "chain" and str(Shape.of(Tree.chain(0))) == "root"
    assert str(Shape.of(Tree((-1, 0, 0, 1, 3)))) == "2 1 1"
    grown = Shape.of(Beam(60, 6, 10))
    assert (str(grown), grown.nodes, grown.depth) == ("grown", 60, 6)


def test_a_cycle_recorded_without_a_shape_was_that_of_a_chain(rows):
    assert rows[1].cycle.shape is None and rows[1].shape == Shape.of(Tree.chain(3))
    assert rows[0].shape.nodes == 4  # The plain row of these made-up records has the same counts.
    assert rows[2].shape is None


def test_a_batch_tells_nothing_about_passes_of_the_loop():
    (row,) = report.rows([call(prompts=["p", "q"], categories=["c", "c"], tokens=[[1], [2]])], [])
    assert row.loop_cycle_s is None and row.prompts == 2


def test_tables(rows):
    text = report.markdown(rows, "what it is")
    assert text.startswith("what it is")
    speed = next(line for line in text.splitlines() if line.startswith("| prompt_lookup"))
    assert [c.strip() for c in speed.split("|")[3:-1]] == [
        "12.5", "25.0", "1.50 (1.00-2.00)", "1.25 (0.50-2.00)", "1.10", "same", "0",
    ]  # fmt: skip
    acceptance = [line for line in text.splitlines() if line.startswith("| prompt_lookup")][1]
    assert [c.strip() for c in acceptance.split("|")[3:-1]] == [
        "2.20", "3.00", "4.00", "1.20", "0.60", "0.40", "0.45", ".60 .30 .10", ".60 .50 .33",
    ]  # fmt: skip
    by_tree = [line for line in text.splitlines() if line.startswith("| prompt_lookup")][2]
    assert [c.strip() for c in by_tree.split("|")[3:-1]] == [
        "chain", "4", "3", "4.00", "3.00", "1.20", "0.40", "2.20", "1.50 (1.00-2.00)",
    ]  # fmt: skip
    time = [line for line in text.splitlines() if line.startswith("| prompt_lookup")][3]
    assert [c.strip() for c in time.split("|")[3:-1]] == ["1.0", "15.0", "4.0", "20.0", "125.0", "10.0", "3.0", "1.0"]
    assert "By category" not in text and "Outputs that differ" not in text


def test_a_slower_result_and_differences_are_shown_as_they_are():
    calls = [
        call(baseline=Speed(2, 1.0, 2, 0.5)),
        lookup_call(0, 8.0, 2.0, differences=["p differs from token 3 on", "q differs"], ties=1),
    ]
    _, row = rows = report.rows(calls, [])
    text = report.markdown(rows, "")
    assert "0.25" in text and "1 DIFFER" in text
    assert "- prompt_lookup:length=3 float32: p differs from token 3 on" in text
    assert (row.differences, row.ties) == (2, 1)


def test_ties_and_sampled_outputs_have_names():
    tied, sampled = (
        report.markdown(report.rows([call(), lookup_call(0, 1.0, 1.0, **changes)], []), "")
        for changes in ({"differences": ["p differs"], "ties": 1}, {"compared": False})
    )
    assert "1 ties" in tied
    assert "sampled" in sampled


def test_categories_are_reported_where_there_are_several():
    calls = [call(digest=c, categories=[c]) for c in "ab"]
    calls += [lookup_call(0, 1.0, 2.0, digest=c, categories=[c]) for c in "ab"]
    text = report.markdown(report.rows(calls, []), "")
    assert "2.20, 2.00x" in text


def test_pictures_are_drawn(rows, tmp_path):
    plots.overview(rows).savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    plots.overview(rows[:1]).savefig(tmp_path / "plain only.png")


def test_asked_and_measured(rows):
    plain, lookup, peer = rows
    half = Variant(LOOKUP.program, LOOKUP.proposer, LOOKUP.rule, "bfloat16", LOOKUP.label)
    calls = [lookup_call(r, s, 2.0) for r, s in enumerate((1.0, 0.5))]
    (fast,) = report.rows([type(c)(**vars(c) | {"variant": half}) for c in calls], [])
    made = {check.what: check for check in checks.of_speed([plain, lookup, peer, fast])}
    assert made["our plain ÷ transformers plain, float32"].measured == Spread(3.0, 2.0, 4.0)
    assert made["prompt lookup ÷ our plain, float32"].met
    assert made["prompt lookup ÷ our plain, bfloat16"].measured.median == 3.0
    assert made["prompt lookup (bfloat16) ÷ transformers plain"].measured == Spread(12.0, 8.0, 16.0)
    assert made["compilations in timed calls"].met
    text = checks.table([checks.Check.at_most("x", exact(2.0), 1.0), checks.Check.at_least("y", exact(2.0), 1.0)])
    assert "≤ 1 | MISSED |" in text and "≥ 1 |    met |" in text


def test_checks_without_a_peer_leave_its_figures_out(rows):
    plain, lookup, _ = rows
    half = [
        type(row)(**vars(row) | {"variant": Variant("spec_jax", row.variant.proposer, "match", "bfloat16", "")})
        for row in (plain, lookup)
    ]
    assert not any("transformers" in check.what for check in checks.of_speed([plain, lookup, *half]))


def test_stats_of_all_calls_are_summed(rows):
    assert rows[1].stats == STATS + STATS
