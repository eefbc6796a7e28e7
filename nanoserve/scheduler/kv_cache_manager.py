"""Which sequence holds which blocks: prefix hits, fresh blocks, release.

Invariant: a commit has two passes, every hit of the step first and fresh blocks after them. Sequence by sequence, one's
fresh block could be the very block that the next one counted as a hit.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from nanoserve.scheduler.block_pool import BlockPool
from nanoserve.scheduler.sequence import Sequence


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
        """Held + free = total, counts equal holders, shared blocks are full, nothing findable was not computed.

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
            assert len(tables) == 1 or block_id in filed, f"block {block_id} is shared but not a full, computed block"
            for sequence, index in tables if block_id in filed else ():
                self._check_filed(sequence, index)
                assert sequence.nodes[index].is_same_prefix(filed[block_id]), f"block {block_id} holds another prefix"

    def _check_filed(self, sequence: Sequence, index: int) -> None:
        end = (index + 1) * self._block_size
        assert end <= sequence.num_computed_tokens, f"block {index} of {sequence.request_id} is findable too early"
        token_ids = tuple(sequence.token_ids[end - self._block_size : end])
        assert token_ids == sequence.nodes[index].token_ids, f"block {index} of {sequence.request_id} is misnamed"
