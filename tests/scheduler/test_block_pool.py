"""Blocks: LRU order, reference counts, and prefixes that only an equal prefix finds."""

from unittest.mock import patch

import pytest

from nanoserve.core.hashing import block_key
from nanoserve.scheduler.block_pool import BlockPool
from nanoserve.scheduler.sequence import PrefixNode, root_node


def chain(*blocks: tuple[int, ...], salts: tuple[str, ...] = ("model",), digest: bytes = b"") -> list[PrefixNode]:
    """The nodes of consecutive blocks; ``digest`` makes all hashes collide."""
    parent, nodes = root_node(*salts), []
    for token_ids in blocks:
        parent = PrefixNode(parent, token_ids, digest or parent.hash + bytes(token_ids))
        nodes.append(parent)
    return nodes


def test_the_least_recently_used_prefix_goes_first_and_tails_before_heads() -> None:
    pool = BlockPool(3)
    nodes = chain((1,), (2,), (3,))
    table = [pool.take() for _ in nodes]
    for block_id, node in zip(table, nodes, strict=True):
        pool.publish(block_id, node)
    pool.release(reversed(table))
    assert pool.num_free == 3
    assert [pool.take() for _ in range(3)] == table[::-1]
    keys = tuple(block_key(node.hash) for node in nodes)
    assert pool.drain_events() == (keys, keys[::-1])


def test_a_block_without_a_prefix_is_taken_before_any_cached_one() -> None:
    pool = BlockPool(2)
    cached, plain = pool.take(), pool.take()
    pool.publish(cached, chain((1,))[0])
    pool.release([cached])
    pool.release([plain])
    assert pool.take() == plain
    assert pool.find(chain((1,))[0]) is not None


def test_an_adopted_block_leaves_the_free_list_and_comes_back_last() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, chain((1,))[0])
    pool.publish(second, chain((2,))[0])
    pool.release([first, second])
    pool.adopt(first)
    assert (pool.num_free, pool.num_holders(first)) == (1, 1)
    pool.release([first])
    assert pool.take() == second


def test_a_collision_is_a_miss() -> None:
    """Equal hashes with other tokens, another parent or another tenant must not lead to the block."""
    pool = BlockPool(1)
    filed = chain((1, 2), (3, 4), digest=b"same")
    pool.publish(pool.take(), filed[1])
    assert pool.find(filed[1]) == (0, filed[1])
    assert pool.find(chain((1, 2), (3, 4), digest=b"same")[1]) == (0, filed[1])
    assert pool.find(chain((1, 2), (3, 5), digest=b"same")[1]) is None
    assert pool.find(chain((1, 9), (3, 4), digest=b"same")[1]) is None
    assert pool.find(filed[0]) is None
    with patch("nanoserve.scheduler.sequence.root_hash", lambda *salts: b"root"):
        one = chain((1, 2), salts=("model", "", "a"), digest=b"x")[0]
        other = chain((1, 2), salts=("model", "", "b"), digest=b"x")[0]
    assert not one.is_same_prefix(other)


def test_a_twin_of_a_filed_block_is_not_filed() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, chain((1,))[0])
    pool.publish(second, chain((1,))[0])
    assert pool.num_cached == 1
    assert pool.find(chain((1,))[0]) == (first, pool.filed_nodes()[first])


def test_an_empty_pool_and_a_double_release_are_impossible_states() -> None:
    pool = BlockPool(1)
    block_id = pool.take()
    with pytest.raises(AssertionError, match="more blocks than"):
        pool.take()
    pool.release([block_id])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block_id])
