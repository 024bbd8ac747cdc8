import pytest

from experiments import registry
from spec_jax import Law, Tree, propose, verify


def test_defaults_are_those_of_the_constructor():
    assert registry.parse_proposer("prompt_lookup").build() == propose.PromptLookup()
    assert registry.parse_proposer("plain").build() == propose.Plain()
    assert registry.parse_rule("typical").build() == verify.Typical()


def test_options():
    spec = registry.parse_proposer("prompt_lookup:length=7,pick=leftmost,max_ngram=4")
    assert spec.build() == propose.PromptLookup(length=7, max_ngram=4, pick="leftmost")
    assert spec.label == "prompt_lookup:length=7,max_ngram=4,pick=leftmost"
    spec = registry.parse_proposer("prompt_lookup:length=7,branches=4/2")
    assert (
        spec.build() == propose.PromptLookup(7, branches=(4, 2)) and spec.label == "prompt_lookup:length=7,branches=4/2"
    )
    assert registry.parse_proposer(str(spec)) == spec
    assert registry.parse_rule("typical:epsilon=0.2").build() == verify.Typical(epsilon=0.2)


def test_equal_settings_are_equal_however_they_are_written():
    assert registry.parse_proposer("prompt_lookup:length=5") == registry.parse_proposer("prompt_lookup")
    assert (
        str(registry.parse_proposer("prompt_lookup"))
        == "prompt_lookup:length=5,max_ngram=3,min_ngram=1,pick=recent,branches="
    )
    assert registry.parse_proposer("prompt_lookup", length=9) == registry.parse_proposer("prompt_lookup:length=9")


def test_a_draft_model_is_loaded_by_its_path(toy):
    spec = registry.parse_proposer("draft_model:tree=2x1,law=without_replacement", model="some/path")
    asked = []
    proposer = spec.build(lambda path: asked.append(path) or toy)
    assert asked == ["some/path"]
    assert (proposer.model, proposer.tree, proposer.law) == (toy, Tree.branching((2, 1)), Law.WITHOUT_REPLACEMENT)
    assert spec.label == "draft_model:model=some/path,tree=2x1,law=without_replacement"
    assert registry.parse_proposer("draft_model:tree=4", model="x") == registry.parse_proposer("draft_model", model="x")


def test_synthetic_gets_its_references_from_the_program():
    spec = registry.parse_proposer("synthetic:acceptance=0.8/0.5,seed=3")
    assert spec.needs_references
    proposer = spec.build(references=[[1, 2, 3]])
    assert proposer.tree.size == 3 and proposer.params["seed"] == 3
    with pytest.raises(ValueError, match="experiments.bench only"):
        spec.build()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope", "no proposer is named 'nope'; choose from plain, prompt_lookup"),
        ("prompt_lookup:long=3", "has no option 'long'; it has length, max_ngram, min_ngram, pick, branches"),
        ("plain:length=3", "has no option 'length'; it has no options"),
        ("prompt_lookup:length", "'length' is not of the form OPTION=VALUE"),
        ("prompt_lookup:length=3,length=4", "option 'length' is given twice"),
        ("prompt_lookup:length=many", "length must be a whole number, got 'many'"),
        ("prompt_lookup:pick=best", "pick must be one of recent, leftmost, got 'best'"),
        ("prompt_lookup:length=0", "length must be >= 1"),
        ("draft_model:model=x,law=perhaps", "law must be one of point_mass, iid"),
        ("draft_model:model=x,tree=oak", "oak"),
        ("draft_model", "needs model=PATH"),
        ("synthetic", "needs acceptance=A/B/..."),
        ("synthetic:acceptance=high", "acceptance must be a number"),
    ],
)
def test_errors(text, message):
    with pytest.raises(ValueError) as caught:
        registry.parse_proposer(text)
    assert message in str(caught.value)


def test_an_option_in_two_places():
    with pytest.raises(ValueError, match="twice, in the name and by its own flag"):
        registry.parse_proposer("prompt_lookup:length=3", length=4)


def test_help_names_everything():
    text = registry.describe()
    for name in (*registry.PROPOSERS, *registry.RULES):
        assert f"  {name}" in text
    assert "length=5, max_ngram=3, min_ngram=1, pick=recent" in text
    assert "model=PATH" in text
