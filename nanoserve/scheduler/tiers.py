"""What lies below the device's KV pool: a host-memory tier and a disk tier, each a cache of blocks by prefix.

Cached blocks that the pool evicts go down to the host, what the host displaces goes down to the disk, and prefix hits
come up. So a preempted request is swapped without further ado: its full blocks go down as others take their places and
come up when it is admitted again; only the rest of its last block is computed twice.

Decided here, done by the executor: every move is a ``BlockCopy``. Invariant: an executor that makes the copies in order
has in every slot what the tier's index says, once the plan that holds them is executed. Only copies from and to the
disk may fail: what comes from there counts when the step's result says that it came.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from nanoserve.core.hashing import BlockHash
from nanoserve.core.plan import BlockCopy
from nanoserve.scheduler.sequence import PrefixNode


class Tier:
    """Slots and the prefix that each holds, least recently used first. Pinned entries are not displaced."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._entries: OrderedDict[BlockHash, tuple[int, PrefixNode]] = OrderedDict()
        self._free = list(range(num_blocks))[::-1]
        self._pins: Counter[BlockHash] = Counter()

    @property
    def num_cached(self) -> int:
        return len(self._entries)

    def find(self, node: PrefixNode) -> int | None:
        """The slot that holds exactly this prefix; it counts as used now."""
        entry = self._entries.get(node.hash)
        if entry is None or not entry[1].is_same_prefix(node):
            return None
        self._entries.move_to_end(node.hash)
        return entry[0]

    def pin(self, node: PrefixNode) -> None:
        self._pins[node.hash] += 1

    def unpin(self, node: PrefixNode) -> None:
        self._pins[node.hash] -= 1
        if not self._pins[node.hash]:
            del self._pins[node.hash]

    def take(self) -> tuple[int, PrefixNode | None] | None:
        """A slot for new content and the prefix that is displaced; None while all are pinned."""
        if self._free:
            return self._free.pop(), None
        hash_ = next((hash_ for hash_ in self._entries if hash_ not in self._pins), None)
        return None if hash_ is None else self._entries.pop(hash_)

    def file(self, node: PrefixNode, slot: int) -> None:
        """Make a taken slot findable. Where the hash is taken, by a twin or by a collision, the slot is free again."""
        if node.hash in self._entries:
            self._free.append(slot)
        else:
            self._entries[node.hash] = (slot, node)

    def give_back(self, slot: int) -> None:
        """A taken slot got no content."""
        self._free.append(slot)

    def drop(self, slot: int) -> PrefixNode | None:
        """Forget what the slot holds; nothing where it is not filed."""
        node = next((node for held, node in self._entries.values() if held == slot), None)
        if node is not None:
            del self._entries[node.hash]
            self._free.append(slot)
        return node

    def check_invariants(self, num_taken: int) -> None:
        """``num_taken`` slots are neither free nor filed.

        Raises:
            AssertionError: the tier lost or invented a slot.
        """
        slots = [*self._free, *(slot for slot, _ in self._entries.values())]
        assert len(set(slots)) == len(slots) == self.num_blocks - num_taken, f"slots {slots}, {num_taken} taken"
        assert all(node.hash == hash_ for hash_, (_, node) in self._entries.items())


class LowerTiers:
    """Owns both tiers and the copies that the next plan carries. Without host blocks it keeps nothing.

    ``on_forget`` hears of each prefix that fell out of both.
    """

    def __init__(self, *, num_host_blocks: int, num_disk_blocks: int, on_forget: Callable[[PrefixNode], None]) -> None:
        self.host = Tier(num_host_blocks)
        self.disk = Tier(num_disk_blocks)
        self._on_forget = on_forget
        self._copies: list[BlockCopy] = []
        self._coming_up: list[PrefixNode] = []
        self._arriving: dict[int, tuple[PrefixNode, int]] = {}  # by host slot: the prefix, and its slot on the disk
        self._arriving_hashes: set[BlockHash] = set()
        self.num_kept = 0
        self.num_brought_up = 0
        self.num_fetched = 0
        self.num_lost = 0

    def drain_copies(self) -> tuple[BlockCopy, ...]:
        """The copies decided since the last call, in order."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def keep(self, block_id: int, node: PrefixNode) -> None:
        """The pool evicts this block; its content goes down, unless it lies there already."""
        if not self.host.num_blocks or self.host.find(node) is not None:
            return
        slot = self._host_slot()
        if slot is not None:
            self.host.file(node, slot)
            self._copies.append(BlockCopy(source_block_id=block_id, target_block_id=slot, target="host"))
            self.num_kept += 1

    def holds(self, node: PrefixNode) -> bool:
        return self.host.find(node) is not None or self.disk.find(node) is not None

    def pin(self, node: PrefixNode) -> None:
        """A hit in the host tier that this step brings up."""
        self.host.pin(node)
        self._coming_up.append(node)

    def bring_up(self, node: PrefixNode, block_id: int) -> None:
        """Fill a block of the pool with a pinned prefix."""
        slot = self.host.find(node)
        assert slot is not None, "a pinned prefix was displaced"
        self._copies.append(BlockCopy(source_block_id=slot, target_block_id=block_id, source="host"))
        self.num_brought_up += 1

    def unpin_all(self) -> None:
        """Every hit of the step has come up."""
        for node in self._coming_up:
            self.host.unpin(node)
        self._coming_up.clear()

    def is_arriving(self, node: PrefixNode) -> bool:
        return node.hash in self._arriving_hashes

    def fetch(self, node: PrefixNode) -> bool:
        """Copy a prefix from the disk to the host; whether it is on its way now."""
        if self.is_arriving(node):
            return True
        disk_slot = self.disk.find(node)
        if disk_slot is None:
            return False
        self.disk.pin(node)
        slot = self._host_slot()
        if slot is None:
            self.disk.unpin(node)
            return False
        self._arriving[slot] = (node, disk_slot)
        self._arriving_hashes.add(node.hash)
        self._copies.append(BlockCopy(source_block_id=disk_slot, target_block_id=slot, source="disk", target="host"))
        return True

    def settle(self, copies: Iterable[BlockCopy], lost: Iterable[BlockCopy]) -> None:
        """A step's copies are done, except those in ``lost``: what these read or wrote on the disk is gone."""
        lost = set(lost)
        for copy in copies:
            if copy.source == "disk":
                self._arrive(copy, is_lost=copy in lost)
        for copy in lost:
            self.num_lost += 1
            node = self.disk.drop(copy.source_block_id if copy.source == "disk" else copy.target_block_id)
            if node is not None:
                self._forget(node)

    def check_invariants(self) -> None:
        """Every slot is free, filed or arriving; nothing is pinned for a step that is over."""
        self.host.check_invariants(len(self._arriving))
        self.disk.check_invariants(0)
        assert not self._coming_up
        assert {node.hash for node, _ in self._arriving.values()} == self._arriving_hashes

    def _arrive(self, copy: BlockCopy, *, is_lost: bool) -> None:
        node, _ = self._arriving.pop(copy.target_block_id)
        self._arriving_hashes.remove(node.hash)
        self.disk.unpin(node)
        if is_lost:
            self.host.give_back(copy.target_block_id)
        else:
            self.host.file(node, copy.target_block_id)
            self.num_fetched += 1

    def _host_slot(self) -> int | None:
        """A slot of the host tier; what it held goes down to the disk."""
        taken = self.host.take()
        if taken is None:
            return None
        slot, displaced = taken
        if displaced is not None:
            self._keep_on_disk(slot, displaced)
            self._forget(displaced)
        return slot

    def _keep_on_disk(self, host_slot: int, node: PrefixNode) -> None:
        if not self.disk.num_blocks or self.disk.find(node) is not None:
            return
        taken = self.disk.take()
        if taken is None:
            return
        slot, displaced = taken
        self.disk.file(node, slot)
        self._copies.append(BlockCopy(source_block_id=host_slot, target_block_id=slot, source="host", target="disk"))
        if displaced is not None:
            self._forget(displaced)

    def _forget(self, node: PrefixNode) -> None:
        if not self.holds(node):
            self._on_forget(node)
