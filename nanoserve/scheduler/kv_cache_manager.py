"""Which sequence holds which blocks: prefix hits, fresh blocks, release.

Invariant: a commit has two passes, every hit of the step first and fresh blocks after them. Sequence by sequence, one's
fresh block could be the very block that the next one counted as a hit.

A block is findable once its KV was computed. Within one step a sequence may also read what another one computes in it:
every layer stores the KV of all tokens of the step before any of them attends.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from nanoserve.core.hashing import BlockHash
from nanoserve.scheduler.block_pool import BlockPool
from nanoserve.scheduler.sequence import PrefixNode, Sequence

Promise = tuple[Sequence, int]
"""A block that the step computes: the sequence that does, and the block's index in its table."""


class KVCacheManager:
    """Owns the block pool, and the block tables and published counts of sequences."""

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        return self._pool.num_cached

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def find_hits(self, sequence: Sequence) -> list[int]:
        """The cached blocks that hold the sequence's prefix, in order. Nothing is reserved yet."""
        hits: list[int] = []
        if not self._enable_prefix_caching:
            return hits
        for index in range(sequence.max_hit_tokens // self._block_size):
            found = self._pool.find(sequence.name_block(index, self._block_size))
            if found is None:
                break
            block_id, filed = found
            hits.append(block_id)
            if filed is not sequence.nodes[index]:  # share the node, so that the next comparison ends at once
                sequence.nodes[index:] = [filed]
        return hits

    def promise(self, sequence: Sequence, first: int, promised: dict[BlockHash, Promise]) -> None:
        """Note the full blocks from ``first`` on of a sequence whose known tokens are all computed by this step."""
        if self._enable_prefix_caching:
            for index in range(first, sequence.num_target_tokens // self._block_size):
                promised.setdefault(sequence.name_block(index, self._block_size).hash, (sequence, index))

    def find_promised(self, sequence: Sequence, first: int, promised: dict[BlockHash, Promise]) -> list[Promise]:
        """The blocks from ``first`` on that another sequence computes in this step."""
        found: list[Promise] = []
        for index in range(first, sequence.max_hit_tokens // self._block_size if promised else 0):
            node = sequence.name_block(index, self._block_size)
            promise = promised.get(node.hash)
            if promise is None:
                break
            theirs = promise[0].nodes[promise[1]]
            if not theirs.is_same_prefix(node):
                break
            found.append(promise)
            sequence.nodes[index:] = [theirs]
        return found

    def num_blocks_taken(self, sequence: Sequence, hits: list[int]) -> int:
        """Blocks that leave the free list when the sequence is admitted with these hits."""
        num_hits_in_use = sum(self._pool.num_holders(block_id) > 0 for block_id in hits)
        return self.num_blocks_for(sequence.num_target_tokens) - num_hits_in_use

    def releases(self, youngest_first: Iterable[Sequence]) -> Iterator[int]:
        """How many blocks come free with each sequence when they are released one after the other."""
        num_given: Counter[int] = Counter()
        for sequence in youngest_first:
            num_given.update(sequence.block_ids)
            yield sum(num_given[block_id] == self._pool.num_holders(block_id) for block_id in sequence.block_ids)

    def adopt(self, sequence: Sequence, hits: list[int]) -> None:
        """First pass: start the sequence's table with its hits."""
        for block_id in hits:
            self._pool.adopt(block_id)
        sequence.block_ids = hits
        sequence.num_slots = len(hits) * self._block_size
        sequence.num_computed_tokens = sequence.num_slots
        sequence.num_published = len(hits)

    def join(self, sequence: Sequence, promises: list[Promise]) -> None:
        """Second pass, before fresh blocks: go on with blocks that sequences before it compute in this step.

        They are not counted as published: each holder offers them when the step is done, and the first files them.
        """
        for other, index in promises:
            self._pool.adopt(other.block_ids[index])
            sequence.block_ids.append(other.block_ids[index])
        sequence.num_slots = sequence.num_computed_tokens = len(sequence.block_ids) * self._block_size

    def grow(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Second pass: fresh blocks until the table holds ``num_tokens`` tokens; the new block ids."""
        num_missing = self.num_blocks_for(num_tokens) - len(sequence.block_ids)
        new_block_ids = tuple(self._pool.take() for _ in range(num_missing))
        sequence.block_ids.extend(new_block_ids)
        sequence.num_slots = len(sequence.block_ids) * self._block_size
        return new_block_ids

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks findable whose KV has been computed by now."""
        if not self._enable_prefix_caching:
            return
        for index in range(sequence.num_published, sequence.num_computed_tokens // self._block_size):
            self._pool.publish(sequence.block_ids[index], sequence.name_block(index, self._block_size))
            sequence.num_published = index + 1

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back, tail first."""
        self._pool.release(reversed(sequence.block_ids))
        sequence.reset()

    def drain_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The keys of blocks published and evicted since the last call."""
        return self._pool.drain_events()

    def check_invariants(self, running: Iterable[Sequence]) -> None:
        """Held + free = total, counts equal holders, shared and findable blocks are full, computed and rightly named.

        Raises:
            AssertionError: one of them does not hold.
        """
        filed = self._pool.filed_nodes()
        holders: dict[int, list[tuple[Sequence, int]]] = {}
        for sequence in running:
            assert sequence.num_slots == len(sequence.block_ids) * self._block_size
            assert sequence.num_computed_tokens <= sequence.num_slots, (
                f"{sequence.request_id} computed beyond its table"
            )
            for index, block_id in enumerate(sequence.block_ids):
                holders.setdefault(block_id, []).append((sequence, index))
        self._pool.check_invariants({block_id: len(tables) for block_id, tables in holders.items()})
        for block_id, tables in holders.items():
            if len(tables) > 1 or block_id in filed:
                nodes = [self._computed_node(sequence, index) for sequence, index in tables]
                common = filed.get(block_id, nodes[0])
                assert all(node.is_same_prefix(common) for node in nodes), f"block {block_id} holds another prefix"

    def _computed_node(self, sequence: Sequence, index: int) -> PrefixNode:
        end = (index + 1) * self._block_size
        assert end <= sequence.num_computed_tokens, f"block {index} of {sequence.request_id} is shared too early"
        token_ids = tuple(sequence.token_ids[end - self._block_size : end])
        assert token_ids == sequence.nodes[index].token_ids, f"block {index} of {sequence.request_id} is misnamed"
        return sequence.nodes[index]
