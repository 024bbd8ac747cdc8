"""What is promised about an output, and the checks that refuse a mismatch before any device work."""

import dataclasses
import enum
from collections.abc import Sequence


class ContractError(ValueError):
    """Two parts that do not belong together, or a request that cannot be honoured."""


class Promise(enum.StrEnum):
    """What a decoded text is, compared with plain decoding by the same sampling parameters."""

    GREEDY_IDENTICAL = "greedy_identical"
    """The argmax at every position: the tokens of plain greedy decoding (up to floating-point ties)."""
    EXACT_SAMPLING = "exact_sampling"
    """The same law as plain sampling."""
    RELAXED = "relaxed"
    """Another law, by a rule that was asked for by name."""


class Law(enum.StrEnum):
    """How a proposer chose its tokens. A static fact that decides which rules may judge them."""

    POINT_MASS = "point_mass"
    """Chosen by any rule that does not look at the verifier's noise: argmax, lookup, a sampled and pruned tree."""
    IID = "iid"
    """Each node drawn from the recorded law of its parent, independently of its siblings."""
    WITHOUT_REPLACEMENT = "without_replacement"
    """Siblings drawn one after the other without replacement from the recorded law, kept in draw order. Those beyond
    the support of that law were chosen in any way that does not look at the verifier's noise."""
    TOP_AND_SAMPLE = "top_and_sample"
    """Of k siblings the first was drawn from the recorded law, which leaves out the k - 1 others: the draft's most
    likely tokens (the greedy draft)."""


class Shapes(enum.StrEnum):
    """Which trees a rule can judge."""

    CHAIN = "chain"
    STATIC = "static"
    """Any `Tree`: the parents are known when the decoder is built."""
    ANY = "any"
    """Dynamic trees too."""


def check_pair(proposer, rule) -> None:
    """Refuses a rule that cannot judge what the proposer supplies.

    Raises:
      ContractError: the proposal's law or tree is not one that the rule keeps exact.
    """
    if proposer.law not in rule.laws:
        raise ContractError(
            f"rule {rule.name!r} cannot judge proposals of law {proposer.law.value!r} "
            f"(from {type(proposer).__name__}); it accepts {sorted(law.value for law in rule.laws)}. "
            "Rule 'match' is exact for every law."
        )
    tree = proposer.tree
    if rule.shapes == Shapes.CHAIN and not tree.is_chain:
        raise ContractError(
            f"rule {rule.name!r} judges chains, and {type(proposer).__name__} proposes {tree}; use a chain, or one of "
            "the rules for trees: 'match', 'recursive', 'traversal'"
        )
    if rule.shapes == Shapes.STATIC and not hasattr(tree, "parents"):
        raise ContractError(
            f"rule {rule.name!r} judges static trees, and {type(proposer).__name__} grows its tree from the draft's "
            f"scores ({tree}); rule 'match' accepts as much of it and is exact"
        )


def check_tree(tree, vocab_size: int, max_len: int) -> None:
    """Refuses a tree that this target and buffer can never use.

    Raises:
      ContractError: a node has more children than there are tokens, or a path is longer than a text may be.
    """
    if tree.max_children > vocab_size:
        raise ContractError(
            f"a node of the tree has {tree.max_children} children and the vocabulary has {vocab_size} tokens: give "
            "each node at most as many children as there are tokens"
        )
    if tree.max_depth >= max_len:
        raise ContractError(
            f"the tree is {tree.max_depth} tokens deep and a text has at most max_len={max_len}, prompt included: it "
            "can never be accepted whole; use a shallower tree or a larger max_len"
        )


def check_proposal(proposal, proposer) -> None:
    """Refuses a proposal that is not what its proposer declared, on which the choice of the rule was based.

    Raises:
      ContractError: law or tree differ.
    """
    if (proposal.law, proposal.tree) != (proposer.law, proposer.tree):
        raise ContractError(
            f"{type(proposer).__name__} declares law {str(proposer.law)!r} and {proposer.tree}, and proposed law "
            f"{str(proposal.law)!r} and {proposal.tree}; a sampled tree that was pruned or sorted by value is no "
            "longer a sample: declare law 'point_mass'"
        )
    if (proposal.parents_BxN is None) != hasattr(proposal.tree, "parents"):
        raise ContractError(
            f"{type(proposer).__name__} must give parents_BxN with a dynamic tree and only then, got {proposal.tree}"
        )
    if (proposal.draft_probs_BxNxV is None) != (proposal.law == Law.POINT_MASS):
        raise ContractError(f"{type(proposer).__name__} must give draft_probs with every law but 'point_mass'")


def check_draft(target, draft) -> None:
    """Refuses a draft model whose tokens do not mean what the target's tokens mean.

    Raises:
      ContractError: vocabulary size or tokenizer differ.
    """
    if draft.vocab_size != target.vocab_size:
        raise ContractError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens and the target one of "
            f"{target.vocab_size}; a draft must share the target's tokens, choose another draft"
        )
    ours, theirs = (getattr(model, "tokenizer", None) for model in (target, draft))
    if ours is not None and theirs is not None and ours.fingerprint != theirs.fingerprint:
        raise ContractError(
            f"the draft model's tokenizer ({theirs.fingerprint[:12]}) is not the target's "
            f"({ours.fingerprint[:12]}), although both have {target.vocab_size} tokens: the same id would be "
            "another text; choose a draft made for this target's tokenizer"
        )


def check_head(target, head) -> None:
    """Refuses a draft head that was made for another target.

    Raises:
      ContractError: vocabulary size or fingerprint differ.
    """
    if head.vocab_size != target.vocab_size:
        raise ContractError(
            f"the draft head is for a vocabulary of {head.vocab_size} tokens and the target has {target.vocab_size}; "
            "use the target that it was trained for"
        )
    wanted, found = head.target_fingerprint, getattr(target, "fingerprint", None)
    if None not in (wanted, found) and wanted != found:
        raise ContractError(
            f"the draft head was trained for another target (fingerprint {wanted[:12]}, this one's is {found[:12]}): "
            "its guesses would mean nothing; use the target that it was trained for, or train a head for this one"
        )


def check_prompt(tokens: Sequence[int], vocab_size: int, max_len: int, name: str) -> None:
    """Refuses a prompt that cannot be decoded from.

    Raises:
      ContractError: it is empty, does not leave room for a token, or holds an id outside the vocabulary.
    """
    if not len(tokens):
        raise ContractError(f"{name} is empty: give at least one token to continue from")
    if len(tokens) >= max_len:
        raise ContractError(
            f"{name} has {len(tokens)} tokens and max_len is {max_len}: no room for a new token; "
            "shorten the prompt or build the decoder with a larger max_len"
        )
    for index, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise ContractError(
                f"{name} has token id {token} at index {index}, outside the vocabulary 0..{vocab_size - 1}; "
                "was it made by another tokenizer?"
            )


@dataclasses.dataclass(frozen=True)
class Contract:
    """The promise of one result, with the rule that keeps it."""

    promise: Promise
    rule: str

    @classmethod
    def of(cls, rule, temperature: float) -> "Contract":
        if not rule.exact:
            return cls(Promise.RELAXED, rule.describe())
        greedy = temperature == 0.0
        return cls(Promise.GREEDY_IDENTICAL if greedy else Promise.EXACT_SAMPLING, rule.describe())
