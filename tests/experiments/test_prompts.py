import json

import pytest

from experiments import prompts


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(id, category="maths", *turns):
    return {"question_id": id, "category": category, "turns": list(turns) or [f"question {id}"]}


def test_builtin_prompts_are_the_default():
    assert tuple(prompts.read()) == prompts.BUILTIN
    assert len({p.id for p in prompts.BUILTIN}) == len(prompts.BUILTIN)
    assert len(prompts.read(limit=2)) == 2


def test_a_file_gives_first_turns(tmp_path):
    file = write(tmp_path / "a.jsonl", [row(1), row(2, "chat", "first", "second")])
    assert prompts.read(file) == [
        prompts.Prompt("1", "maths", "question 1"),
        prompts.Prompt("2", "chat", "first"),
    ]


def test_limits(tmp_path):
    file = write(tmp_path / "a.jsonl", [row(i, "even" if i % 2 == 0 else "odd") for i in range(10)])
    assert [p.id for p in prompts.read(file, limit=3)] == ["0", "1", "2"]
    assert [p.id for p in prompts.read(file, per_category=2)] == ["0", "1", "2", "3"]


def test_a_suite_has_unique_ids_and_names_what_it_leaves_out(tmp_path, capsys):
    write(tmp_path / "a.jsonl", [row(1), row(2)])
    write(tmp_path / "b.jsonl", [row(1)])
    write(tmp_path / "c.jsonl", [{"question": "?", "answer": "!"}])
    assert [p.id for p in prompts.read(suite=str(tmp_path), limit=1)] == ["a/1", "b/1"]
    assert "left out: line 1 of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ("{", "line 1 of .* is not a prompt"),
        ('{"question_id": 1, "category": "c"}', "expected JSON with question_id, category and turns"),
        ('{"question_id": 1, "category": "c", "turns": []}', "is not a prompt"),
        ('{"question_id": 1, "category": "c", "turns": ["x"]}\n' * 2, "question_id '1' is not unique"),
    ],
)
def test_files_that_are_no_prompts(tmp_path, text, message):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        prompts.read(str(tmp_path / "a.jsonl"))


def test_places_that_are_not_there(tmp_path):
    with pytest.raises(ValueError, match="no file of prompts at"):
        prompts.read(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="is not a folder"):
        prompts.read(suite=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="holds no file of prompts"):
        prompts.read(suite=str(tmp_path))
    with pytest.raises(ValueError, match="not both"):
        prompts.read("a", "b")


def test_long_prompts_keep_their_tail_and_that_is_said(toy, capsys):
    short, long = prompts.Prompt("short", "c", "ab"), prompts.Prompt("long", "c", "abcdefgh")
    assert prompts.encode(toy, [short, long], max_tokens=4) == [list(b"<ab>"), list(b"fgh>")]
    said = capsys.readouterr().err
    assert "1 of 2 prompts are longer than 4 tokens" in said and said.rstrip().endswith(": long")
    assert prompts.encode(toy, [short], max_tokens=4)
    assert not capsys.readouterr().err
    with pytest.raises(ValueError, match="no room for a prompt"):
        prompts.encode(toy, [short], max_tokens=0)
