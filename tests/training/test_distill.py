import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
import spec_jax as sj
from experiments import distill as program
from models.checkpoint import flat_params
from models.errors import ModelError
from models.target import LlamaTarget
from tests.models.common import TINY, VARIANTS, assert_same_params, byte_bpe, forward, noisy_target
from training import distill

CONFIG = distill.Config(
    num_rows=4, num_tokens=32, num_answer=12, learning_rate=3e-3, warmup_steps=2, loss_tokens=0, checkpoint_every=2
)
PROMPTS = [[1, 5, 7], [1, 9], [1, 3, 3, 8, 2], [1, 4], [1, 6, 2], [1, 8, 7, 7]]


def written(target, prompts=PROMPTS, temperature=0.8, max_new_tokens=12):
    decoder = distill.recording_decoder(target, max_len=32)
    params = [
        sj.SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
        for seed in range(len(prompts))
    ]
    return distill.answers(decoder, prompts, params)


@pytest.fixture(scope="module")
def target():
    """A random model of the kind of SmolLM2, with a tokenizer."""
    config = dataclasses.replace(VARIANTS["smollm2"], vocab_size=byte_bpe().vocab_size, num_layers=3)
    return noisy_target(config, tokenizer=None)


@pytest.fixture(scope="module")
def answers(target):
    return written(target)


@pytest.mark.parametrize("name", ["smollm2", "llama2"])
def test_recorded_hidden_states_are_those_behind_the_answers(name):
    target = noisy_target(VARIANTS[name])
    for prompt, answer in zip(PROMPTS, written(target, temperature=0.0), strict=True):
        text = [prompt + answer.tokens]
        logits_1xNxV, (hidden_1xNxE,), _ = forward(target, text, target.init_kv(1, 32), taps=(TINY.num_layers + 1,))
        behind = slice(len(prompt) - 1, len(text[0]) - 1)
        np.testing.assert_allclose(answer.hidden_AxE, hidden_1xNxE[0, behind], rtol=2e-3, atol=2e-3)
        assert answer.tokens == np.argmax(logits_1xNxV[0, behind], -1).tolist()


@pytest.mark.parametrize("name", ["smollm2", "llama2"])
def test_a_whole_copy_of_the_target_matches_it(name):
    target = noisy_target(VARIANTS[name])
    copy = distill.make_draft(target, range(TINY.num_layers))
    assert_same_params(copy, target)
    means = distill.evaluate(copy, CONFIG, written(target)).means()
    assert means["tokens"] == 12 * len(PROMPTS)
    assert means["top1"] > 0.98 and means["overlap"] > 0.995 and means["divergence"] < 1e-4


def test_layers_are_taken_in_the_order_given(target):
    source = flat_params(target.config, target.params)
    draft = distill.make_draft(target, (-1, 0))
    taken = flat_params(draft.config, draft.params)
    np.testing.assert_array_equal(taken["layers.0.mlp.up.weight"], source["layers.2.mlp.up.weight"])
    np.testing.assert_array_equal(taken["layers.1.mlp.up.weight"], source["layers.0.mlp.up.weight"])
    for layers in ((), (3,), (-4,)):
        with pytest.raises(ModelError, match=r"choose at least one, each in -3..2"):
            distill.make_draft(target, layers)


def test_a_draft_of_a_bfloat16_target_trains_in_float32():
    target = noisy_target(dataclasses.replace(VARIANTS["smollm2"], dtype="bfloat16"))
    draft = distill.make_draft(target)
    assert draft.config.dtype == "float32"
    assert {leaf.dtype for leaf in jax.tree.leaves(draft.params)} == {jnp.dtype("float32")}
    assert np.isfinite(distill.evaluate(draft, CONFIG, written(target)).means()["divergence"])


@pytest.mark.parametrize("loss_tokens", [0, 40])
def test_the_loss_falls_and_the_embedding_stays(target, answers, loss_tokens):
    config = dataclasses.replace(CONFIG, loss_tokens=loss_tokens)
    draft, losses = distill.make_draft(target), []
    state = distill.train(draft, config, answers, 40, report=lambda step, loss, rate: losses.append(loss))
    trained = distill.trained_draft(draft, state)
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:3])
    before, after = (distill.evaluate(model, config, answers).means() for model in (draft, trained))
    assert after["divergence"] < before["divergence"] and after["overlap"] > before["overlap"]
    old, new = (flat_params(model.config, model.params) for model in (draft, trained))
    changed = {path for path in old if not np.array_equal(old[path], new[path])}
    assert changed == old.keys() - {"embedding.weight"}


def gradients(draft, batch, tokens_K):
    loss_and_gradient = jax.value_and_grad(lambda params: distill.divergence(draft, params, tokens_K, batch))
    return jax.jit(loss_and_gradient)(draft.params)


def test_padding_changes_nothing_and_gradients_are_numbers(target, answers):
    draft = distill.make_draft(target)
    tokens_K = jnp.arange(target.vocab_size)
    tight = dataclasses.replace(CONFIG, num_rows=2, num_tokens=16)
    wide = dataclasses.replace(CONFIG, num_rows=4, num_tokens=32)
    (loss, gradient), (padded_loss, padded) = (
        gradients(draft, distill.Batch.of(answers[:2], config), tokens_K) for config in (tight, wide)
    )
    np.testing.assert_allclose(padded_loss, loss, rtol=1e-5)
    for left, right in zip(jax.tree.leaves(gradient), jax.tree.leaves(padded), strict=True):
        assert np.isfinite(right).all()
        np.testing.assert_allclose(right, left, atol=1e-5 * max(1.0, float(jnp.abs(left).max())))


def test_the_divergence_is_that_of_decoding(target, answers):
    """By plain NumPy from the logits of the two models' decoding passes."""
    draft, answer = distill.make_draft(target), answers[2]
    text = [(answer.prompt + answer.tokens)[:-1]]
    log_p, log_q = (
        np.asarray(jax.nn.log_softmax(forward(model, text, model.init_kv(1, 32))[0][0, len(answer.prompt) - 1 :]))
        for model in (target, draft)
    )
    batch = distill.Batch.of([answer], CONFIG)
    for tokens_K in (np.arange(target.vocab_size), np.arange(3, 30)):
        given_p, given_q = (
            x[:, tokens_K] - np.log(np.exp(x[:, tokens_K]).sum(-1, keepdims=True)) for x in (log_p, log_q)
        )
        expected = np.mean((np.exp(given_p) * (given_p - given_q)).sum(-1))
        found = distill.divergence(draft, draft.params, jnp.asarray(tokens_K), batch)
        np.testing.assert_allclose(found, expected, rtol=1e-2)
    means = distill.evaluate(draft, CONFIG, [answer]).means()
    np.testing.assert_allclose(means["overlap"], np.minimum(np.exp(log_p), np.exp(log_q)).sum(-1).mean(), rtol=1e-2)
    assert means["top1"] == pytest.approx(np.mean(log_p.argmax(-1) == log_q.argmax(-1)))


def test_an_interrupted_training_ends_like_another(target, answers, tmp_path):
    class Killed(Exception):
        pass

    def kill(step, loss, rate):
        if step == 5:
            raise Killed

    draft, seen = distill.make_draft(target), []
    whole = distill.train(draft, CONFIG, answers, 8)
    with pytest.raises(Killed):
        distill.train(draft, CONFIG, answers, 8, tmp_path, kill)
    resumed = distill.train(draft, CONFIG, answers, 8, tmp_path, lambda step, loss, rate: seen.append(step))
    assert seen == [5, 6, 7, 8]  # The checkpoint of step 4 was the newest.
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)
    again = distill.train(draft, CONFIG, answers, 8, tmp_path, kill)
    jax.tree.map(np.testing.assert_array_equal, again, whole)


def test_every_epoch_sees_every_answer_once():
    rows = [row for step in range(9) for row in distill.rows_of_step(6, CONFIG, step)]
    epochs = [rows[start : start + 6] for start in range(0, 36, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs) and len(set(map(tuple, epochs))) > 1


def test_the_loss_looks_at_the_tokens_of_the_answers_first(answers):
    used = {token for answer in answers for token in answer.tokens}
    chosen = distill.loss_tokens(answers, 270, len(used) + 5)
    lowest = [token for token in range(270) if token not in used][:5]
    assert chosen.tolist() == sorted(used | set(lowest))
    assert distill.loss_tokens(answers, 270, 0).tolist() == list(range(270))


def test_what_does_not_fit_a_batch_is_refused(answers):
    with pytest.raises(ValueError, match="prompt of 3 tokens with an answer of 12 does not fit"):
        distill.Batch.of(answers[:1], dataclasses.replace(CONFIG, num_answer=8))
    with pytest.raises(ValueError, match="5 answers do not make a batch of 4"):
        distill.Batch.of(answers[:5], CONFIG)


# The program.


@pytest.fixture
def chatty():
    """A random model that chats, and often ends its turn."""
    config = dataclasses.replace(VARIANTS["smollm2"], vocab_size=byte_bpe().vocab_size, max_positions=128)
    target = noisy_target(config)
    return LlamaTarget(config, target.params, byte_bpe(), eos_token_ids=(2, *range(3, 60)), name="chatty")


SMALL = program.Config(
    target="chatty",
    num_answers=6,
    held_out=2,
    answer_batch=4,
    steps=4,
    training=dataclasses.replace(CONFIG, num_tokens=96, num_answer=24),
)


@pytest.fixture
def prompt_file(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": "hello " * n, "answer": ""}) + "\n" for n in range(1, 8)))
    return str(file)


def test_a_run_leaves_a_draft_that_drafts(chatty, prompt_file, tmp_path):
    config, out = dataclasses.replace(SMALL, prompts=prompt_file), tmp_path / "draft"
    summary = program.Distillation(config, chatty, out).run()
    assert summary["steps"] == 4 and summary["answers"] == 4 and summary["before"] != summary["after"]
    assert "| same most likely token |" in program.describe(summary)
    draft = models.load(out)
    assert draft.tokenizer.fingerprint == chatty.tokenizer.fingerprint and draft.vocab_size == chatty.vocab_size
    assert draft.eos_token_ids == chatty.eos_token_ids
    proposer = sj.propose.DraftModel(draft, 2)
    params = sj.SamplingParams(temperature=0.0, max_new_tokens=8)
    plain, drafted = (
        sj.Decoder(chatty, proposer=p, max_len=32).generate([[1, 70, 80]], params) for p in (None, proposer)
    )
    assert drafted[0].tokens == plain[0].tokens and drafted.stats.drafted > 0


def test_a_run_goes_on_where_it_was(chatty, prompt_file, tmp_path, monkeypatch):
    config = dataclasses.replace(SMALL, prompts=prompt_file)
    whole = program.Distillation(config, chatty, tmp_path / "whole").run()
    cut = tmp_path / "cut"
    program.Distillation(config, chatty, cut)._questions()
    first = program.Distillation(config, chatty, cut)
    first.write_answers()
    # As if it had died while it wrote the fifth answer.
    lines = first.store.path.read_bytes().splitlines(keepends=True)
    first.store.path.write_bytes(b"".join(lines[:4]) + lines[4][:20])
    second = program.Distillation(config, chatty, cut)
    assert len(second.store.answers) == 4
    again = second.run()
    assert again["before"] == whole["before"] and again["after"] == whole["after"]
    assert_same_params(models.load(cut), models.load(tmp_path / "whole"))
    # Nothing is left to do, and nothing is done.
    monkeypatch.setattr(distill, "answers", None)
    monkeypatch.setattr(distill, "train_step", None)
    assert program.Distillation(config, chatty, cut).run()["after"] == whole["after"]
    with pytest.raises(ValueError, match="holds a run with other seed, training; give what it was started with"):
        other = dataclasses.replace(config.training, learning_rate=1e-2)
        program.Distillation(dataclasses.replace(config, seed=1, training=other), chatty, cut)


def test_without_prompts_the_target_asks_itself(chatty, tmp_path):
    run = program.Distillation(dataclasses.replace(SMALL, steps=None, minutes=0.001), chatty, tmp_path)
    summary = run.run()
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) >= 6 and len({row["turns"][0] for row in rows}) == len(rows)
    assert summary["steps"] >= 1 and json.loads((tmp_path / "distill.json").read_text())["steps"] == summary["steps"]


def test_too_few_prompts_and_impossible_sizes_are_refused(chatty, prompt_file, tmp_path):
    config = dataclasses.replace(SMALL, prompts=prompt_file, num_answers=9)
    with pytest.raises(ValueError, match="num_answers is 9, and of 7 prompts"):
        program.Distillation(config, chatty, tmp_path / "a").run()
    with pytest.raises(ValueError, match="there is no file of prompts at /no/such/file"):
        program.read_prompts(program.Path("/no/such/file"))
    with pytest.raises(ValueError, match="held_out=6 of num_answers=6"):
        dataclasses.replace(SMALL, held_out=6)
    with pytest.raises(ValueError, match="leaves no room for a prompt"):
        dataclasses.replace(SMALL, training=dataclasses.replace(CONFIG, num_tokens=12))
