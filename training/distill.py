"""Distils a target into a small draft model of the same vocabulary (DistillSpec, Zhou et al., 2310.08461).

The draft is the target with most of its layers left out. Embedding, output head and tokenizer stay the target's; the
layers that are left, and the final norm, are trained on texts that the target wrote itself, because those are the texts
it will draft in.

Both models have the same head, so the target's whole law at a position is its final hidden state away: E numbers are
kept instead of V logits, and they cost nothing, because plain decoding computes them (`Recorder`).
"""

import contextlib
import dataclasses
import functools
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int
from orbax.checkpoint import v1 as ocp

from models.checkpoint import Params, filled_params, flat_params
from models.errors import ModelError
from models.linear import matmul
from models.target import LlamaTarget
from spec_jax import Decoder, SamplingParams, decode
from spec_jax.propose import Committed, Context, Plain
from spec_jax.pytree import pytree

_FROZEN = ("embedding", "head")


@dataclasses.dataclass(frozen=True)
class Config:
    """How to train; the optimiser is AdamW behind a clip of the global norm.

    Attributes:
      num_rows, num_tokens, num_answer: the shape of every batch, see `Batch.of`.
      learning_rate: reached after `warmup_steps`, then falling along a cosine to a tenth.
      loss_tokens: the loss is of the laws given that the token is one of so many: those that the answers use, and then
        the lowest ids. The head is most of a small draft's work, and nearly all of it goes to tokens that never occur.
        The price: nothing pulls the draft's law down on the others. 0 takes the whole vocabulary, and is exact.
      checkpoint_every: steps between checkpoints.
      seed: of the order of the answers.
    """

    num_rows: int = 8
    num_tokens: int = 256
    num_answer: int = 128
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    weight_decay: float = 0.01
    clip: float = 1.0
    loss_tokens: int = 8192
    checkpoint_every: int = 25
    seed: int = 0

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW at learning rate 1: `train_step` scales its updates, so that a schedule's length compiles nothing."""
        decayed = functools.partial(jax.tree.map, lambda array: array.ndim > 1)  # not the norms
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(1.0, b2=0.95, weight_decay=self.weight_decay, mask=decayed),
        )

    def schedule(self, num_steps: int) -> optax.Schedule:
        """The learning rate of every step of a run."""
        peak, warmup = self.learning_rate, min(self.warmup_steps, num_steps // 4)
        return optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, num_steps, 0.1 * peak)


# What the target wrote.


@dataclasses.dataclass(frozen=True)
class Answer:
    """A text of the target's own.

    Attributes:
      prompt, tokens: token ids.
      hidden_AxE: float16; the target's final hidden state that each of `tokens` was chosen from.
    """

    prompt: list[int]
    tokens: list[int]
    hidden_AxE: np.ndarray


@dataclasses.dataclass(frozen=True)
class Recorder(Plain):
    """Plain decoding that keeps the target's final hidden state at every position, [B, S, E].

    Attributes:
      tap: the tap behind the final norm.
      width: E.
    """

    tap: int
    width: int

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.tap,)

    def init(self, batch: int, capacity: int):
        return jnp.zeros((batch, capacity, self.width), jnp.float32)

    def prefill(self, params, state, context, tokens_BxC, start, taps):
        return state  # the law of the first answer token is that behind the root, the prompt's last token

    def observe(self, params, state, context: Context, committed: Committed):
        (hidden_Bx1xE,) = committed.taps
        position_B = jnp.where(committed.count_B > 0, context.root_position_B, state.shape[1])
        row_B = jnp.arange(len(position_B))
        return state.at[row_B, position_B].set(hidden_Bx1xE[:, 0].astype(state.dtype), mode="drop")


def recording_decoder(target: LlamaTarget, max_len: int) -> Decoder:
    """A plain decoder for `answers`."""
    return Decoder(target, Recorder(target.config.num_layers + 1, target.config.model_dim), max_len=max_len)


def answers(
    decoder: Decoder, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams]
) -> list[Answer]:
    """What the target of a `recording_decoder` answers.

    Raises:
      FloatingPointError: its logits are not numbers.
      ContractError, ValueError: a prompt that cannot be answered, see `Decoder.generate`.
    """
    request = decoder.request(prompts, params)
    state = decode.prefill(decoder.plan, decoder.params, decoder.start(request))
    state = decode.run(decoder.plan, decoder.params, state)
    hidden_BxSxE = np.asarray(state.proposer, np.float16)
    found = []
    for result, hidden_SxE in zip(decoder.results(request, state), hidden_BxSxE, strict=True):
        if result.finish_reason == "error":
            raise FloatingPointError("the target's logits are not numbers: there is nothing to distil")
        first = len(result.prompt_tokens) - 1
        found.append(Answer(result.prompt_tokens, result.tokens, hidden_SxE[first : first + len(result.tokens)]))
    return found


@pytree
class Batch:
    """Answers as arrays.

    Attributes:
      tokens_BxN: prompts and answers without their last token, padded on the right.
      index_BxA: where in `tokens` the law of each answer token stands.
      hidden_BxAxE: the target's final hidden states there.
      weight_BxA: 1 for an answer token, 0 for padding.
    """

    tokens_BxN: Int[Array, "B N"]
    index_BxA: Int[Array, "B A"]
    hidden_BxAxE: Float[Array, "B A E"]
    weight_BxA: Float[Array, "B A"]

    @classmethod
    def of(cls, answers: Sequence[Answer], config: Config) -> "Batch":
        """A batch of fixed shape, so that one program serves all: rows without an answer are padding.

        Raises:
          ValueError: something does not fit into `num_rows` rows of `num_tokens`, `num_answer` of them of the answer.
        """
        num_rows, num_tokens, num_answer = config.num_rows, config.num_tokens, config.num_answer
        if not 0 < len(answers) <= num_rows:
            raise ValueError(f"{len(answers)} answers do not make a batch of {num_rows}")
        tokens_BxN = np.zeros((num_rows, num_tokens), np.int32)
        index_BxA = np.zeros((num_rows, num_answer), np.int32)
        hidden_BxAxE = np.zeros((num_rows, num_answer, answers[0].hidden_AxE.shape[1]), np.float32)
        weight_BxA = np.zeros((num_rows, num_answer), np.float32)
        for row, answer in enumerate(answers):
            text, count = (answer.prompt + answer.tokens)[:-1], len(answer.tokens)
            if len(text) > num_tokens or count > num_answer:
                raise ValueError(
                    f"a prompt of {len(answer.prompt)} tokens with an answer of {count} does not fit a batch of "
                    f"{num_tokens} tokens, {num_answer} of them of the answer"
                )
            tokens_BxN[row, : len(text)] = text
            index_BxA[row, :count] = np.arange(len(answer.prompt) - 1, len(text))
            hidden_BxAxE[row, :count] = answer.hidden_AxE
            weight_BxA[row, :count] = 1.0
        return cls(*map(jnp.asarray, (tokens_BxN, index_BxA, hidden_BxAxE, weight_BxA)))


def loss_tokens(answers: Sequence[Answer], vocab_size: int, count: int) -> np.ndarray:
    """The token ids that the loss looks at, ascending; see `Config.loss_tokens`."""
    if not 0 < count < vocab_size:
        return np.arange(vocab_size, dtype=np.int32)
    used = [token for token, _ in Counter(token for answer in answers for token in answer.tokens).most_common()]
    # A byte-pair vocabulary is numbered in the order of its merges, frequent pairs first.
    chosen = list(dict.fromkeys([*used, *range(vocab_size)]))[:count]
    return np.sort(np.asarray(chosen, np.int32))


# The draft.


def make_draft(target: LlamaTarget, layers: Sequence[int] = (0, -1)) -> LlamaTarget:
    """The target with only some of its layers, in float32: where training starts.

    Args:
      layers: which layers are kept, in this order; negative ones count from the end.

    Raises:
      ModelError: there is no such layer, or none is chosen.
    """
    depth = target.config.num_layers
    if not layers or any(not -depth <= layer < depth for layer in layers):
        raise ModelError(f"layers {list(layers)} asked for; choose at least one, each in {-depth}..{depth - 1}")
    config = dataclasses.replace(target.config, num_layers=len(layers), dtype="float32")
    source = flat_params(target.config, target.params)

    def value_of(path: str):
        if not path.startswith("layers."):
            return source[path]
        _, layer, rest = path.split(".", 2)
        return source[f"layers.{layers[int(layer)] % depth}.{rest}"]

    return _like(target, config, filled_params(config, value_of))


def trained_draft(draft: LlamaTarget, state: "TrainState") -> LlamaTarget:
    """The draft with the parameters of a training state."""
    frozen, _ = split_params(draft.params)
    return _like(draft, draft.config, nnx.merge_state(frozen, state.params))


def _like(target: LlamaTarget, config, params) -> LlamaTarget:
    name = f"draft of {target.name}"
    return LlamaTarget(config, params, target.tokenizer, target.eos_token_ids, name, kernels=target.kernels)


def split_params(params: Params) -> tuple[Params, Params]:
    """The parameters that stay the target's, and those that are trained."""
    return nnx.split_state(params, lambda path, _: path[0] in _FROZEN, ...)


# Training.


@pytree
class TrainState:
    """Everything a step changes.

    Attributes:
      params: those that are trained.
      optimizer: the optimiser's state.
    """

    params: Any
    optimizer: Any

    @classmethod
    def create(cls, draft: LlamaTarget, config: Config) -> "TrainState":
        # A copy, because steps take over the memory of the state they are given.
        params = jax.tree.map(jnp.copy, split_params(draft.params)[1])
        return cls(params, config.optimizer().init(params))


def train(
    draft: LlamaTarget,
    config: Config,
    answers: Sequence[Answer],
    num_steps: int,
    folder: Path | None = None,
    report: Callable[[int, float, float], None] = lambda step, loss, learning_rate: None,
) -> TrainState:
    """Trains, from the newest checkpoint in `folder` where there is one.

    A run that was interrupted ends like one that was not: the answers of a step depend on its number alone.

    Args:
      draft: what training started from.
      answers: in the order that the first run had them in.
      folder: of the checkpoints; none are written without one.
      report: called after every step with the number of steps done, the loss before it, and its learning rate.
    """
    frozen, _ = split_params(draft.params)
    tokens_K = jnp.asarray(loss_tokens(answers, draft.vocab_size, config.loss_tokens))
    schedule, state, done = config.schedule(num_steps), TrainState.create(draft, config), 0
    with contextlib.ExitStack() as stack:
        checkpoints = folder and stack.enter_context(checkpointer(folder))
        if checkpoints and checkpoints.latest is not None:
            done = checkpoints.latest.step
            state = checkpoints.load(done, state)
        for step in range(done, num_steps):
            batch = Batch.of([answers[i] for i in rows_of_step(len(answers), config, step)], config)
            rate = float(schedule(step))
            state, loss = train_step(draft, config, frozen, tokens_K, state, batch, jnp.float32(rate))
            done = step + 1
            if checkpoints and (done % config.checkpoint_every == 0 or done == num_steps):
                checkpoints.save(done, state)
            report(done, float(loss), rate)
    return state


def checkpointer(folder: Path) -> ocp.training.Checkpointer:
    """Training states by step, of which the newest is kept; one appears under its name only when it is whole."""
    newest = ocp.training.preservation_policies.LatestN(1)
    return ocp.training.Checkpointer(folder.absolute(), preservation_policy=newest)


def rows_of_step(num_answers: int, config: Config, step: int) -> list[int]:
    """Which answers a step sees: all of them in a new order in every epoch, epoch after epoch."""

    @functools.cache
    def order(epoch: int) -> np.ndarray:
        return np.random.default_rng((config.seed, epoch)).permutation(num_answers)

    places = range(step * config.num_rows, (step + 1) * config.num_rows)
    return [int(order(place // num_answers)[place % num_answers]) for place in places]


@functools.partial(jax.jit, static_argnames=("draft", "config"), donate_argnames="state")
def train_step(
    draft: LlamaTarget,
    config: Config,
    frozen: Params,
    tokens_K: Int[Array, "K"],
    state: TrainState,
    batch: Batch,
    learning_rate: Float[Array, ""],
) -> tuple[TrainState, Float[Array, ""]]:
    """One step.

    Args:
      frozen: the first part of `split_params`.
      tokens_K: what the loss looks at, see `loss_tokens`.
      state: it is donated.

    Returns:
      The next state, and the loss before the step.
    """

    def loss_of(params):
        return divergence(draft, nnx.merge_state(frozen, params), tokens_K, batch)

    loss, gradients = jax.value_and_grad(loss_of)(state.params)
    with jax.numpy_dtype_promotion("standard"):  # Optax counts steps in whole numbers, and raises floats to them.
        updates, optimizer = config.optimizer().update(gradients, state.optimizer, state.params)
    updates = jax.tree.map(lambda update: learning_rate * update, updates)
    return TrainState(optax.apply_updates(state.params, updates), optimizer), loss


def divergence(draft: LlamaTarget, params: Params, tokens_K: Int[Array, "K"], batch: Batch) -> Float[Array, ""]:
    """Mean over answer tokens of KL(p ‖ q), nats, of target and draft given that the token is one of `tokens_K`.

    Forward KL: the cross-entropy against the target's law, less what no draft can change.
    """
    head_KxE = _head(params)[tokens_K]
    log_p_BxAxK, log_q_BxAxK = map(jax.nn.log_softmax, _logits(draft, params, head_KxE, batch))
    kl_BxA = (jnp.exp(log_p_BxAxK) * (log_p_BxAxK - log_q_BxAxK)).sum(-1)
    return (batch.weight_BxA * kl_BxA).sum() / jnp.maximum(batch.weight_BxA.sum(), 1.0)


@pytree
class Agreement:
    """How well a draft matches its target, summed over answer tokens, over the whole vocabulary.

    Attributes:
      tokens: how many there are.
      top1: where both have the same most likely token: what a greedy target accepts.
      overlap: sum of min(p, q) over the vocabulary: what rule `rejection` accepts of a sampled token.
      divergence: KL(p ‖ q), nats.
    """

    tokens: Float[Array, ""]
    top1: Float[Array, ""]
    overlap: Float[Array, ""]
    divergence: Float[Array, ""]

    def __add__(self, other: "Agreement") -> "Agreement":
        return jax.tree.map(jnp.add, self, other)

    def means(self) -> dict[str, int | float]:
        """Per token, and their number."""
        sums = {field.name: float(getattr(self, field.name)) for field in dataclasses.fields(self)}
        tokens = sums.pop("tokens")
        return {"tokens": int(tokens)} | {name: value / tokens for name, value in sums.items()}


@functools.partial(jax.jit, static_argnames="draft")
def agreement(draft: LlamaTarget, params: Params, batch: Batch) -> Agreement:
    """How well a draft matches its target on a batch; all of the draft's parameters are given."""
    p_logits_BxAxV, q_logits_BxAxV = _logits(draft, params, _head(params), batch)
    log_p_BxAxV, log_q_BxAxV = map(jax.nn.log_softmax, (p_logits_BxAxV, q_logits_BxAxV))
    p_BxAxV = jnp.exp(log_p_BxAxV)
    same_BxA = jnp.argmax(p_logits_BxAxV, axis=-1) == jnp.argmax(q_logits_BxAxV, axis=-1)
    each = (
        jnp.ones_like(batch.weight_BxA),
        same_BxA.astype(jnp.float32),
        jnp.minimum(p_BxAxV, jnp.exp(log_q_BxAxV)).sum(-1),
        (p_BxAxV * (log_p_BxAxV - log_q_BxAxV)).sum(-1),
    )
    return Agreement(*((batch.weight_BxA * value_BxA).sum() for value_BxA in each))


def evaluate(draft: LlamaTarget, config: Config, answers: Sequence[Answer]) -> Agreement:
    """How well a draft matches its target on answers, each position given the text before it."""
    starts = range(0, len(answers), config.num_rows)
    batches = (Batch.of(answers[start : start + config.num_rows], config) for start in starts)
    return functools.reduce(operator.add, (agreement(draft, draft.params, batch) for batch in batches))


def _logits(draft: LlamaTarget, params: Params, head_KxE, batch: Batch):
    """Logits of target and draft at the answer tokens, by the draft's decoding pass over an empty buffer."""
    tokens_BxN = batch.tokens_BxN
    positions_BxN = jnp.broadcast_to(jnp.arange(tokens_BxN.shape[1])[None, :], tokens_BxN.shape)
    kv = draft.init_kv(*tokens_BxN.shape)
    # The pass gives logits at all positions; not being used they are not computed.
    taps = (draft.config.num_layers + 1,)
    _, (hidden_BxNxE,), _ = draft.forward(params, tokens_BxN, positions_BxN, kv, None, taps)
    hidden_BxAxE = jnp.take_along_axis(hidden_BxNxE, batch.index_BxA[:, :, None], axis=1, mode="clip")
    return tuple(matmul(hidden, head_KxE) for hidden in (batch.hidden_BxAxE, hidden_BxAxE))


def _head(params: Params) -> jax.Array:
    return params["head" if "head" in params else "embedding"]["weight"][...]
