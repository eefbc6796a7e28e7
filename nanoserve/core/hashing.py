"""Chained block hashes: the name of a block says every token before it, so equal names mean equal KV.

The chain starts from a salt (model, adapter, tenant), so two tenants never share a name. BLAKE2b with a 16-byte digest:
a collision that an attacker could search for would leak another request's KV, which rules out fast non-cryptographic
hashes; a match in the block pool compares the tokens themselves besides.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockHash = bytes


def block_key(hash_: BlockHash) -> int:
    """The hash in short, as doors keep it by the hundred thousand: its first eight bytes. Routing may err by it."""
    return int.from_bytes(hash_[:8], "little")


def root_hash(*salts: str) -> BlockHash:
    """The parent of a first block, made from the salts (model, adapter, tenant) in order."""
    digest = blake2b(digest_size=16)
    for salt in salts:
        data = salt.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The name of the full block that holds ``token_ids`` after the block named ``parent``."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()
