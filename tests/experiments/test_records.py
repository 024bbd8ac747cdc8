import json

import pytest

from experiments.measure import CycleTimes, Memory, Spread
from experiments.records import Call, Cycle, Ledger, Shape, Speed, Variant
from spec_jax import Stats, Tree
from spec_jax.growth import Beam

PLAIN = Variant("spec_jax", "plain", "match", "float32", "plain")
STATS = Stats(10, 30, 40, 12, 6, 4, (4, 3, 2, 1))


def call(repeat=0, variant=PLAIN, **changes):
    values = {
        "settings": "s",
        "variant": variant,
        "prompts": ["p"],
        "categories": ["c"],
        "digest": "d",
        "repeat": repeat,
        "tokens": [[1, 2]],
        "speed": Speed(2, 1.0, 2, 0.5),
        "baseline": Speed(2, 1.0, 2, 0.5),
        "stats": STATS,
        "compilations": 0,
        "compared": True,
        "differences": [],
        "ties": 0,
    }
    return Call(**values | changes)


def cycle(shape=None):
    spread = Spread(2.0, 1.0, 3.0)
    return Cycle("s", PLAIN, CycleTimes(spread, spread, spread, spread), Memory(10, 20), shape)


def test_what_is_written_is_read_back(tmp_path):
    records = [call(), call(1, stats=None), cycle()]
    Ledger(tmp_path / "a" / "b.jsonl").append(records)
    ledger = Ledger(tmp_path / "a" / "b.jsonl")
    assert [ledger[record.key] for record in records] == records
    assert call(2).key not in ledger
    assert call(variant=Variant("spec_jax", "plain", "match", "bfloat16", "plain")).key not in ledger


@pytest.mark.parametrize("tree", [Tree.branching((3, 2)), Beam(8, 3, 3)])
def test_shapes_are_read_back(tmp_path, tree):
    record = cycle(Shape.of(tree))
    Ledger(tmp_path / "a.jsonl").append([record])
    assert Ledger(tmp_path / "a.jsonl")[record.key] == record


def test_cycles_recorded_before_there_were_shapes_are_read(tmp_path):
    Ledger(tmp_path / "a.jsonl").append([cycle()])
    row = json.loads((tmp_path / "a.jsonl").read_text())
    assert row.pop("shape") is None
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert Ledger(tmp_path / "a.jsonl")[cycle().key] == cycle()


def test_a_line_cut_off_is_dropped_and_written_over(tmp_path):
    path = tmp_path / "a.jsonl"
    Ledger(path).append([call(), call(1)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    ledger = Ledger(path)
    assert call().key in ledger and call(1).key not in ledger
    ledger.append([call(1)])
    assert path.read_bytes() == whole


def test_notes_are_for_readers(tmp_path):
    Ledger(tmp_path / "a.jsonl").note("summary", {"command": "x"})
    assert json.loads((tmp_path / "a.jsonl").read_text()) == {"kind": "summary", "command": "x"}
    assert call().key not in Ledger(tmp_path / "a.jsonl")


def test_a_fresh_ledger(tmp_path):
    Ledger(tmp_path / "a.jsonl").append([call()])
    assert call().key not in Ledger(tmp_path / "a.jsonl", resume=False)


@pytest.mark.parametrize("line", ["no json", "[1]", "{}", '{"kind": "call"}'])
def test_another_file_is_refused_and_kept(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1 of .* is not a record"):
        Ledger(path)
    assert path.read_text() == line + "\n"
