"""Which replica holds which blocks, as one door learns it from the feeds. Pure Python; keys are ``hashing.block_key``.

One bit a replica: a block maps to the set of its holders as an integer, so a prompt is walked once, however many
replicas there are. Besides the blocks that replicas have told of, a door knows those that it has just sent work for:
a burst of requests with a new prefix then goes to one place instead of everywhere.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from zlib import crc32

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


class Hits:
    """Who holds how much of one prompt, as (blocks, holders) from the longest part down."""

    __slots__ = ("_bits", "_block_size", "_groups", "_replicas")

    def __init__(
        self, groups: list[tuple[int, int]], bits: Mapping[str, int], replicas: Mapping[int, str], block_size: int
    ) -> None:
        self._groups = groups
        self._bits = bits
        self._replicas = replicas
        self._block_size = block_size

    def tokens(self, replica: str) -> int:
        """Leading tokens of the prompt that the replica need not compute."""
        bit = self._bits.get(replica, 0)
        return next((depth * self._block_size for depth, mask in self._groups if mask & bit), 0)

    def deepest(self, count: int, tie: str) -> list[str]:
        """Up to ``count`` replicas that hold the most; where many hold as much, ``tie`` says with which to begin."""
        found: list[str] = []
        for _, mask in self._groups:
            start = crc32(tie.encode()) % mask.bit_length()
            for part in (mask >> start << start, mask & ((1 << start) - 1)):
                while part and len(found) < count:
                    bit = part & -part
                    found.append(self._replicas[bit])
                    part ^= bit
        return found


NO_HITS = Hits([], {}, {}, 1)
"""Where there is no choice, or nothing to look for."""


class KVIndex:
    """Owns what is known of the replicas' prefix caches; one door changes it."""

    def __init__(self) -> None:
        self._bits: dict[str, int] = {}
        self._replicas: dict[int, str] = {}
        self._all = 0
        self._holders: dict[int, int] = {}
        self._expected: dict[int, Counter[int]] = {}

    def reset(self, replica: str, blocks: Iterable[int]) -> None:
        """All that the replica holds now; what was known of it is forgotten."""
        self.forget(replica)
        bit = (self._all + 1) & ~self._all
        self._bits[replica], self._replicas[bit] = bit, replica
        self._all |= bit
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
        self._all &= ~bit
        del self._replicas[bit]
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

    def find(self, chain: PrefixChain) -> Hits:
        """Who holds how much of the prompt."""
        groups: list[tuple[int, int]] = []
        mask = self._all
        for depth, key in enumerate(chain):
            here = mask & (self._holders.get(key, 0) | sum(self._expected.get(key, ())))
            if here != mask:
                groups.append((depth, mask & ~here))
                mask = here
            if not mask:
                break
        groups.append((len(chain), mask))
        held = [(depth, mask) for depth, mask in reversed(groups) if depth and mask]
        return Hits(held, self._bits, self._replicas, chain.block_size)

    def hit_tokens(self, chain: PrefixChain) -> dict[str, int]:
        """How many leading tokens of the prompt each replica need not compute; replicas without any are left out."""
        hits = self.find(chain)
        return {replica: num_tokens for replica in self._bits if (num_tokens := hits.tokens(replica))}

    def num_blocks(self, replica: str) -> int:
        """Blocks that the replica has told of, for checks."""
        bit = self._bits[replica]
        return sum(1 for mask in self._holders.values() if mask & bit)
