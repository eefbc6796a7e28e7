"""A request on its way through the engine: the tokens known, the tokens computed, the blocks held.

Invariant: ``0 <= num_computed_tokens < num_target_tokens`` for every open sequence, so there is always something to
compute. Only the scheduler and its KV manager change a sequence.
"""

from nanoserve.core.hashing import BlockHash, block_hash, root_hash
from nanoserve.core.plan import AdmittedState
from nanoserve.core.request import GenerateRequest
from nanoserve.scheduler.drafts import Drafter

Rank = tuple[int, int]


class PrefixNode:
    """The identity of a full block: its tokens and the node of every block before it, under one hash.

    The root of a chain holds the salts as its tokens. Two nodes are the same prefix only if all of that is equal, so a
    hash collision is a miss and never another request's KV.
    """

    __slots__ = ("hash", "parent", "token_ids")

    def __init__(self, parent: "PrefixNode | None", token_ids: tuple[int, ...] | tuple[str, ...], hash_: BlockHash):
        self.parent = parent
        self.token_ids = token_ids
        self.hash = hash_

    def is_same_prefix(self, other: "PrefixNode") -> bool:
        """Compare up the chains until they meet; after a hit they meet at once, because hits share their nodes."""
        mine: PrefixNode | None = self
        theirs: PrefixNode | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine.hash != theirs.hash or mine.token_ids != theirs.token_ids:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


def root_node(*salts: str) -> PrefixNode:
    """The parent of first blocks under these salts (model, adapter, tenant)."""
    return PrefixNode(None, salts, root_hash(*salts))


class Share:
    """One tenant's account: ``used`` counts the tokens it was served over its ``weight``; see ``fairness``."""

    __slots__ = ("used", "weight")

    def __init__(self, weight: float = 1.0, used: float = 0.0) -> None:
        self.weight = weight
        self.used = used


class Sequence:
    """One open request. Ordered by ``rank``: (priority, arrival); lower is served first.

    ``max_length``: tokens at which it ends with LENGTH. ``num_scored_tokens`` of the ``num_prompt_tokens - 1`` prompt
    log probabilities were delivered. ``num_slots``: tokens that ``block_ids`` can hold. ``nodes``: the full blocks
    named so far; the first ``num_published`` of them were offered to the prefix cache. ``is_decoding``: all but the
    last known token are computed, and that one was sampled since the last admission. ``num_cached_tokens`` is -1 before
    the first admission. ``num_fetched`` blocks of its prefix were looked for on the disk. ``drafter`` guesses its next
    tokens; it outlives preemptions. ``share``: its tenant's account.
    """

    __slots__ = ("block_ids", "draft_token_ids", "drafter", "is_decoding", "is_running", "max_length", "nodes",
                 "num_cached_tokens", "num_computed_tokens", "num_draft_tokens", "num_fetched", "num_fixed_tokens",
                 "num_prompt_tokens", "num_published", "num_scored_tokens", "num_slots", "rank", "request",
                 "request_id", "root", "share", "stop_token_ids", "token_ids")  # fmt: skip

    def __init__(self, request: GenerateRequest, *, rank: Rank, max_length: int, root: PrefixNode) -> None:
        self.request = request
        self.request_id = request.request_id
        self.rank = rank
        self.max_length = max_length
        self.root = root
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids) - request.num_prior_output_tokens
        self.num_fixed_tokens = 0 if self.samples or request.pooling else 1
        self.num_scored_tokens = self.num_prompt_tokens - 1 if request.sampling.prompt_logprobs is None else 0
        self.stop_token_ids = frozenset(request.sampling.stop_token_ids or ())
        self.nodes: list[PrefixNode] = []
        self.drafter: Drafter | None = None
        self.share = Share()
        self.num_cached_tokens = -1
        self.is_running = False
        self.reset()

    def reset(self) -> None:
        """Forget what was computed: as it was before its first admission, but for the tokens and scores it has."""
        self.num_computed_tokens = 0
        self.num_published = 0
        self.num_fetched = 0
        self.block_ids: list[int] = []
        self.num_slots = 0
        self.is_decoding = False
        self.clear_drafts()

    def clear_drafts(self) -> None:
        self.draft_token_ids: tuple[int, ...] = ()
        self.num_draft_tokens = 0

    @property
    def samples(self) -> bool:
        """Whether a token may follow the known ones. A request that only scores its prompt has none."""
        return len(self.token_ids) < self.max_length

    @property
    def num_target_tokens(self) -> int:
        """Tokens to compute; a request that only scores its prompt does not need the last one, one that pools does."""
        return len(self.token_ids) - self.num_fixed_tokens

    @property
    def num_pending_tokens(self) -> int:
        return len(self.token_ids) - self.num_fixed_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated, those of a continued request's earlier life included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_unscored_tokens(self) -> int:
        return self.num_prompt_tokens - 1 - self.num_scored_tokens

    @property
    def max_hit_tokens(self) -> int:
        """Tokens that prefix hits may cover: never the last one, and no position whose score is still to come."""
        limit = self.num_target_tokens - 1
        return min(limit, self.num_scored_tokens) if self.num_unscored_tokens else limit

    def name_block(self, index: int, block_size: int) -> PrefixNode:
        """The node of full block ``index``; the blocks before it must have theirs."""
        if index < len(self.nodes):
            return self.nodes[index]
        parent = self.nodes[index - 1] if index else self.root
        token_ids = tuple(self.token_ids[index * block_size : (index + 1) * block_size])
        node = PrefixNode(parent, token_ids, block_hash(parent.hash, token_ids))
        self.nodes.append(node)
        return node

    def admitted_state(self) -> AdmittedState:
        return AdmittedState(
            token_ids=tuple(self.token_ids),
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.request.sampling,
            grammar=self.request.grammar,
            thinking=self.request.thinking,
            adapter=self.request.adapter,
        )
