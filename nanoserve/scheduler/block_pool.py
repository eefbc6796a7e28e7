"""The KV blocks of one engine: who counts on them, which are free, and what prefix each holds.

Invariant: a block is in the free list exactly while nobody refers to it. A free block keeps its content, and stays
findable, until it is taken. Every operation is O(1) a block.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from nanoserve.core.hashing import block_key
from nanoserve.scheduler.sequence import PrefixNode


class BlockPool:
    """Owns reference counts, the free list and the prefix index; only the KV manager calls it.

    The free list is taken from its front. Blocks that nobody can find again go to the front, findable ones to the back,
    so it is in order of last use among those worth keeping. ``keep`` may save a block that is about to be evicted;
    whether it did.
    """

    def __init__(self, num_blocks: int, keep: Callable[[int, PrefixNode], bool] = lambda block_id, node: False) -> None:
        self.num_blocks = num_blocks
        self._keep = keep
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_holders = [0] * num_blocks
        self._nodes: list[PrefixNode | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._published: list[int] = []
        self._evicted: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that nobody refers to, cached or not."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix can find, in use or not."""
        return len(self._index)

    def num_holders(self, block_id: int) -> int:
        return self._num_holders[block_id]

    def find(self, node: PrefixNode) -> tuple[int, PrefixNode] | None:
        """The block that holds exactly this prefix, and the node it is filed under."""
        block_id = self._index.get(node.hash)
        if block_id is None:
            return None
        filed = self._nodes[block_id]
        assert filed is not None, f"block {block_id} is findable without a prefix"
        return (block_id, filed) if filed.is_same_prefix(node) else None

    def adopt(self, block_id: int) -> None:
        """One more holder of a found block."""
        if not self._num_holders[block_id]:
            del self._free[block_id]
        self._num_holders[block_id] += 1

    def take(self) -> int:
        """A block for new content; what it held can no longer be found."""
        assert self._free, "the commit takes more blocks than the decision promised"
        block_id, _ = self._free.popitem(last=False)
        node = self._nodes[block_id]
        if node is not None:
            del self._index[node.hash]
            self._nodes[block_id] = None
            if not self._keep(block_id, node):
                self._evicted.append(block_key(node.hash))
        self._num_holders[block_id] = 1
        return block_id

    def release(self, block_ids: Iterable[int]) -> None:
        """One holder less of each. Give a table tail first, so that prefixes outlive suffixes."""
        for block_id in block_ids:
            self._num_holders[block_id] -= 1
            assert self._num_holders[block_id] >= 0, f"block {block_id} was released twice"
            if not self._num_holders[block_id]:
                self._free[block_id] = None
                if self._nodes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def publish(self, block_id: int, node: PrefixNode) -> None:
        """Make a computed block findable, unless its hash is taken: a twin's, or another prefix's by collision."""
        if node.hash not in self._index:
            self._index[node.hash] = block_id
            self._nodes[block_id] = node
            self._published.append(block_key(node.hash))

    def forget(self, node: PrefixNode) -> None:
        """Whoever kept an evicted prefix keeps it no longer."""
        if self.find(node) is None:
            self._evicted.append(block_key(node.hash))

    def drain_events(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The keys of blocks published and evicted since the last call."""
        events = tuple(self._published), tuple(self._evicted)
        self._published.clear()
        self._evicted.clear()
        return events

    def filed_nodes(self) -> dict[int, PrefixNode]:
        """The node of every findable block, for checks."""
        return {block_id: node for block_id, node in enumerate(self._nodes) if node is not None}

    def check_invariants(self, num_holders: dict[int, int]) -> None:
        """Compare with the ``num_holders`` of each block counted from the tables that exist.

        Raises:
            AssertionError: the pool lost or invented a block, a count or a prefix.
        """
        counted = [num_holders.get(block_id, 0) for block_id in range(self.num_blocks)]
        assert counted == self._num_holders, f"holders {self._num_holders} but the tables say {counted}"
        unheld = {block_id for block_id, count in enumerate(counted) if not count}
        assert unheld == set(self._free), f"free list {list(self._free)} but nobody holds {sorted(unheld)}"
        filed = {node.hash: block_id for block_id, node in self.filed_nodes().items()}
        assert filed == self._index, f"index {self._index} but blocks are filed as {filed}"
