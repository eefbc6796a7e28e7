"""Which replica holds which blocks, as one door learns it from the feeds. Pure Python; keys are ``hashing.block_key``.

One bit a replica: a block maps to the set of its holders as an integer, so a prompt is walked once, however many
replicas there are. Besides the blocks that replicas have told of, a door knows those that it has just sent work for:
a burst of requests with a new prefix then goes to one place instead of everywhere.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from nanoserve.core.hashing import block_hash, block_key, root_hash

MAX_WALKED_BLOCKS = 4096


class PrefixChain:
    """The keys of a prompt's full blocks, named as the engine names them, each made when it is first asked for.

    The last token is always computed anew, so a block that ends with it does not count.
    """

    def __init__(self, token_ids: Sequence[int], *, block_size: int, salts: tuple[str, ...]) -> None:
        self.block_size = block_size
        self.num_tokens = len(token_ids)
        self._token_ids = token_ids
        self._hash = root_hash(*salts)
        self._keys: list[int] = []
        self._length = min(max(len(token_ids) - 1, 0) // block_size, MAX_WALKED_BLOCKS)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        for index in range(self._length):
            if index == len(self._keys):
                start = index * self.block_size
                self._hash = block_hash(self._hash, self._token_ids[start : start + self.block_size])
                self._keys.append(block_key(self._hash))
            yield self._keys[index]


class KVIndex:
    """Owns what is known of the replicas' prefix caches; one door changes it."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._holders: dict[int, int] = {}
        self._expected: dict[int, Counter[int]] = {}

    def reset(self, replica: str, blocks: Iterable[int]) -> None:
        """All that the replica holds now; what was known of it is forgotten."""
        self.forget(replica)
        self._bits[replica] = self._free_bit()
        self.update(replica, blocks, ())

    def update(self, replica: str, published: Iterable[int], evicted: Iterable[int]) -> None:
        """The events of one step, in the order in which a step makes them: evictions first."""
        bit, holders = self._bits.get(replica, 0), self._holders
        if not bit:
            return  # lost meanwhile
        for key in evicted:
            if rest := holders.get(key, 0) & ~bit:
                holders[key] = rest
            else:
                holders.pop(key, None)
        for key in published:
            holders[key] = holders.get(key, 0) | bit

    def forget(self, replica: str) -> None:
        """The replica is gone, and its cache with it."""
        bit = self._bits.pop(replica, 0)
        if not bit:
            return
        for key, mask in list(self._holders.items()):
            if mask & bit:
                self._set(key, mask & ~bit)
        for key in list(self._expected):
            self._expected[key].pop(bit, None)
            if not self._expected[key]:
                del self._expected[key]

    def _set(self, key: int, mask: int) -> None:
        if mask:
            self._holders[key] = mask
        else:
            del self._holders[key]

    def expect(self, replica: str, chain: Iterable[int]) -> None:
        """Work was sent that will put these blocks there."""
        if bit := self._bits.get(replica):
            for key in chain:
                self._expected.setdefault(key, Counter())[bit] += 1

    def settle(self, replica: str, chain: Iterable[int]) -> None:
        """Undoes one ``expect``: the replica has told of the blocks by now, or never will."""
        bit = self._bits.get(replica, 0)
        for key in chain:
            counts = self._expected.get(key)
            if counts is None or bit not in counts:
                return  # the replica was forgotten meanwhile
            counts[bit] -= 1
            if not counts[bit]:
                del counts[bit]
            if not counts:
                del self._expected[key]

    def hit_tokens(self, chain: PrefixChain) -> dict[str, int]:
        """How many leading tokens of the prompt each replica need not compute; replicas without any are left out."""
        depth_of: dict[int, int] = {}
        mask = sum(self._bits.values())
        for depth, key in enumerate(chain):
            here = mask & (self._holders.get(key, 0) | sum(self._expected.get(key, ())))
            if here != mask:
                _note(depth_of, mask & ~here, depth)
                mask = here
            if not mask:
                break
        _note(depth_of, mask, len(chain))
        return {
            replica: depth_of[bit] * chain.block_size for replica, bit in self._bits.items() if depth_of.get(bit, 0)
        }

    def num_blocks(self, replica: str) -> int:
        """Blocks that the replica has told of, for checks."""
        bit = self._bits[replica]
        return sum(1 for mask in self._holders.values() if mask & bit)

    def _free_bit(self) -> int:
        used = sum(self._bits.values())
        return (used + 1) & ~used


def _note(depth_of: dict[int, int], mask: int, depth: int) -> None:
    """Every replica in ``mask`` was followed down to ``depth``."""
    while mask:
        bit = mask & -mask
        depth_of[bit] = depth
        mask ^= bit
