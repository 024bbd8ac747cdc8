"""What became of every node of a drafted tree in one cycle of decoding, and why.

Everything is asked of the parts that decode: `spec_jax.cycle` runs the cycle, and the rule's own functions give coins,
draws and the outcome.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import cycle, sampling, stop
from spec_jax.cycle import DecodeState, Params, Plan
from spec_jax.verify.base import CoinRule
from spec_jax.verify.match import Match
from spec_jax.verify.typical import Typical


class Fate(enum.StrEnum):
    ROOT = "root"
    ACCEPTED = "accepted"
    CUT = "cut"
    """Accepted by the rule, and cut off by a stop, the budget or logits that are not numbers."""
    REJECTED = "rejected"
    """Tested and refused."""
    PASSED_OVER = "passed over"
    """Its outcome did not matter: it lies below a rejected node, or another one was accepted."""
    INVALID = "invalid"
    """Not drafted: a place that the proposer left empty in this cycle."""


@dataclasses.dataclass(frozen=True)
class Token:
    """A token id and its text as people read it: quoted, or `<token 7>` where it has none."""

    id: int
    text: str


@dataclasses.dataclass(frozen=True)
class Node:
    """A node of the tree.

    Attributes:
      number, parent, depth: its place; the root's parent is None. A parent has a smaller number.
      token: the drafted token; the root's is the last committed one.
      draft_prob: its probability in the recorded law its parent's children were drawn from; None for a token that was
        chosen and not drawn (a point mass, or one beyond the support of that law).
      target_prob: p(token | parent) under the request's sampling parameters; None for the root.
      coin, toss: the probability that its coin passes, and the uniform that must lie below; None without coins.
      drawn: what the target drew behind this node, where the rule has it draw at every node.
      fate, reason: what became of it, and why in a few words.
    """

    number: int
    parent: int | None
    depth: int
    token: Token
    draft_prob: float | None
    target_prob: float | None
    coin: float | None
    toss: float | None
    drawn: Token | None
    fate: Fate
    reason: str


@dataclasses.dataclass(frozen=True)
class Extra:
    """The token of the target's own that ends a cycle.

    Attributes:
      kind: "bonus" behind a node without drafted children, otherwise "correction".
      parent: the node it follows, the last accepted one.
      token, target_prob: as of a node.
    """

    kind: str
    parent: int
    token: Token
    target_prob: float | None


@dataclasses.dataclass(frozen=True)
class Cycle:
    """One cycle of one row.

    Attributes:
      number: 1 for the first behind the prompt.
      before: the end of the text before the root.
      law: of the proposal.
      nodes: root first.
      emitted: the tokens committed: those of the accepted nodes and the extra one.
      extra: None where the text ended before it.
      finish_reason: None while the text goes on.
    """

    number: int
    before: str
    law: str
    nodes: tuple[Node, ...]
    emitted: tuple[Token, ...]
    extra: Extra | None
    finish_reason: str | None

    @property
    def num_valid(self) -> int:
        """Drafted nodes, the root not counted."""
        return sum(node.fate not in (Fate.ROOT, Fate.INVALID) for node in self.nodes)

    @property
    def num_accepted(self) -> int:
        return sum(node.fate == Fate.ACCEPTED for node in self.nodes)

    @property
    def behind(self) -> str:
        """Where in the text the cycle stands, in a line."""
        return f"behind {'…' + self.before!r}"

    def children(self, number: int) -> list[Node]:
        return [node for node in self.nodes if node.parent == number]


def explain(plan: Plan, params: Params, state: DecodeState, row: int = 0) -> Cycle:
    """What the next cycle of a row does with every node it drafts.

    The state is left as it is; `decode.step` takes the same cycle.

    Raises:
      ValueError: the row has ended.
    """
    if int(state.status_B[row]) != stop.RUNNING:
        raise ValueError(f"row {row} has ended ({stop.REASONS[int(state.status_B[row])]}): there is no next cycle")
    facts = {name: np.asarray(value) for name, value in _facts(plan, params, state, row).items()}
    name = functools.partial(token_of, plan.target)
    count, emitted, accepted = (int(facts[key]) for key in ("count", "emitted", "accepted"))
    status, text = int(facts["status"]), facts["text"][: count + emitted]
    path = [int(node) for node in facts["path"][: accepted + 1]]
    kept = min(accepted, emitted)
    ended = stop.REASONS.get(status)
    judge = _judge(plan, facts, path, name)
    nodes: list[Node] = []
    for n, (parent, depth, token) in enumerate(zip(*(facts[k] for k in ("parents", "depth", "tokens")), strict=True)):
        if n == 0:
            fate, reason = Fate.ROOT, "the last committed token"
        elif n in path:
            fate, reason = (Fate.ACCEPTED, "accepted") if depth <= kept else (Fate.CUT, _CUT[ended])
        elif not facts["valid"][n]:
            fate, reason = Fate.INVALID, "not drafted"
        else:
            fate, reason = judge(n, nodes)
        nodes.append(
            Node(
                number=n,
                parent=int(parent) if n else None,
                depth=int(depth),
                token=name(int(token)),
                # A weight of 0 in the recorded law says that the token was not drawn from it.
                draft_prob=_number(facts, "q", n) or None if n else None,
                target_prob=_number(facts, "p", n) if n else None,
                coin=_number(facts, "coin", n) if n else None,
                toss=_number(facts, "toss", n) if n else None,
                drawn=name(int(facts["drawn"][n])) if "drawn" in facts else None,
                fate=fate,
                reason=reason,
            )
        )
    extra = None
    if emitted > kept:
        kind = "bonus" if facts["is_bonus"] else "correction"
        extra = Extra(kind, path[kept], name(int(text[-1])), float(facts["next_p"]))
    return Cycle(
        number=int(state.counters.cycles_B[row]) + 1,
        before=_tail(plan.target, text[: count - 1]),
        law=str(plan.proposer.law),
        nodes=tuple(nodes),
        emitted=tuple(name(int(token)) for token in text[count:]),
        extra=extra,
        finish_reason=ended,
    )


@functools.partial(jax.jit, static_argnames="plan")
def _facts(plan: Plan, params: Params, state: DecodeState, row) -> dict[str, jax.Array]:
    """One cycle by its pieces, of which the facts about one row are kept."""
    rule, rows, root_position_B = plan.rule, state.rows, state.context.root_position_B
    proposal, proposer = cycle.propose(plan, params, state)
    logits_BxNxV, _, _ = cycle.score(plan, params, state, proposal)  # The same pass as in `verify`: XLA makes it once.
    acceptance, bad_BxN, taps, kv = cycle.verify(plan, params, state, proposal)
    proposed = dataclasses.replace(state, proposer=proposer)
    after = cycle.reconcile(plan, params, proposed, proposal, acceptance, bad_BxN, taps, kv)

    p_BxNxV, topology, shape = sampling.law(logits_BxNxV, rows), proposal.topology, proposal.tokens_BxN.shape
    last_Bx1 = jnp.take_along_axis(acceptance.path_BxP, acceptance.num_accepted_B[:, None], axis=1)
    facts = {
        "tokens": proposal.tokens_BxN,
        "parents": jnp.broadcast_to(topology.parents_BxN, shape),
        "depth": jnp.broadcast_to(topology.depth_BxN, shape),
        "valid": proposal.valid_BxN,
        "p": topology.under_parent(p_BxNxV, proposal.tokens_BxN),
        "path": acceptance.path_BxP,
        "accepted": acceptance.num_accepted_B,
        "next_p": p_BxNxV[jnp.arange(shape[0]), last_Bx1[:, 0], acceptance.next_token_B],
        "count": state.num_tokens_B,
        "emitted": after.num_tokens_B - state.num_tokens_B,
        "is_bonus": after.counters.bonus_B > state.counters.bonus_B,
        "status": after.status_B,
        "text": after.tokens_BxS,
    }
    if proposal.draft_probs_BxNxV is not None:
        facts["q"] = topology.under_parent(proposal.draft_probs_BxNxV, proposal.tokens_BxN)
    if isinstance(rule, Match):
        facts["drawn"] = rule.draw(proposal, logits_BxNxV, rows, root_position_B)
        facts["passed"] = rule.agrees(proposal, facts["drawn"])
    elif isinstance(rule, CoinRule):
        facts["coin"] = rule.judge(proposal, p_BxNxV).coins_BxN
        facts["toss"] = rule.toss(proposal, rows, root_position_B)
        facts["passed"] = passed_BxN = facts["toss"] < facts["coin"]

        def outcome(n):
            """What is selected if the coin of node n falls the other way."""
            return rule.select(proposal, passed_BxN.at[:, n].set(~passed_BxN[:, n]))

        facts["decides"] = (jax.vmap(outcome)(jnp.arange(shape[1])) != rule.select(proposal, passed_BxN)[None, :]).T
    return {key: values[row] for key, values in facts.items()}


_CUT = {
    "stop": "accepted, but cut off: the text stopped before it",
    "length": "accepted, but cut off by the budget",
    "error": "cut off: the target's logits are not numbers",
}

_Judge = Callable[[int, list[Node]], tuple[Fate, str]]


def _judge(plan: Plan, facts: Mapping[str, np.ndarray], path: list[int], name: Callable[[int], Token]) -> _Judge:
    """Tells the fate of a valid node that the rule did not accept, given the nodes before it."""
    rule, parents = plan.rule, facts["parents"]

    def unused(n: int, nodes: list[Node]) -> tuple[Fate, str]:
        parent = int(parents[n])
        if parent in path:
            elder = any(parents[other] == parent for other in path if 0 < other < n)
            return Fate.PASSED_OVER, "an elder sibling was accepted" if elder else "another path was kept"
        above = nodes[parent]
        below_rejected = above.fate == Fate.REJECTED or above.reason == _BELOW_REJECTED
        return Fate.PASSED_OVER, _BELOW_REJECTED if below_rejected else "below a node that was not tested"

    def by_agreement(n: int, nodes: list[Node]) -> tuple[Fate, str]:
        """Rules that keep the deepest path of which every node passes."""
        above = nodes[parents[n]]
        if above.fate == Fate.REJECTED or above.reason == _BELOW_REJECTED:
            return Fate.PASSED_OVER, _BELOW_REJECTED
        if facts["passed"][n]:
            return Fate.PASSED_OVER, "passed, but another path was kept"
        if isinstance(rule, Match):
            return Fate.REJECTED, f"the target drew {name(int(facts['drawn'][parents[n]])).text} here"
        return Fate.REJECTED, "not typical"

    def by_coin(n: int, nodes: list[Node]) -> tuple[Fate, str]:
        if facts["decides"][n] and not facts["passed"][n]:
            return Fate.REJECTED, f"rejected: coin {share(float(facts['coin'][n]))} lost"
        return unused(n, nodes)

    if isinstance(rule, Match | Typical):
        return by_agreement
    if isinstance(rule, CoinRule):
        return by_coin
    return lambda n, nodes: (Fate.REJECTED, f"not accepted by rule {rule.name}")


_BELOW_REJECTED = "below a rejected node"


def share(value: float) -> str:
    """A probability in a few characters that never looks like 0 or 1 where it is not."""
    if value in (0.0, 1.0):
        return f"{value:.0f}"
    return "<.01" if value < 0.005 else ">.99" if value > 0.995 else f"{value:.2f}".removeprefix("0")


def token_of(target: Any, token: int) -> Token:
    """A token with its text in quotes; bytes that are no UTF-8 by themselves are shown as bytes."""
    data = b"" if target.tokenizer is None else target.tokenizer.token_bytes(token)
    if not data:
        return Token(token, f"<token {token}>")
    try:
        return Token(token, repr(data.decode()))
    except UnicodeDecodeError:
        return Token(token, repr(data))


def _tail(target: Any, tokens: np.ndarray) -> str:
    """The text of the last tokens, or their ids."""
    last = [int(token) for token in tokens[-16:]]
    if target.tokenizer is None:
        return " ".join(map(str, last))
    return b"".join(map(target.tokenizer.token_bytes, last)).decode("utf-8", errors="replace")


def _number(facts: Mapping[str, np.ndarray], key: str, n: int) -> float | None:
    value = float(facts[key][n]) if key in facts else math.nan
    return value if math.isfinite(value) else None
