"""The nouns refuse what cannot work, naming the field; hashes name the whole prefix."""

import math
from typing import Any

import pytest

from nanoserve.core.config import parse_bytes
from nanoserve.core.errors import ConfigError, InvalidRequestError
from nanoserve.core.hashing import block_hash, root_hash
from nanoserve.core.sampling import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("temperature", True), ("top_p", 0), ("top_p", 1.01), ("min_p", -1), ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan), ("repetition_penalty", 0), ("n", 0), ("n", 1.5), ("top_k", -2),
        ("max_tokens", -3), ("seed", 2**64), ("seed", -(2**63) - 1), ("logprobs", 9999), ("stop", ""),
        ("stop", ["ok", ""]),
        ("stop", [1, 2]), ("stop_token_ids", [-1]), ("logit_bias", {-1: 1.0}), ("logit_bias", {1: 250.0}),
        ("logit_bias", {1: math.nan}),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        SamplingParams(min_tokens=9, max_tokens=3)


def test_values_are_normalised() -> None:
    params = SamplingParams(stop="a", top_k=-1, seed=-1, temperature=0)
    assert (params.stop, params.top_k, params.seed, params.temperature) == (("a",), 0, 2**64 - 1, 0.0)


def test_a_block_hash_depends_on_every_earlier_token_and_the_salt() -> None:
    root = root_hash("model")
    assert block_hash(block_hash(root, (1, 2)), (3, 4)) != block_hash(block_hash(root, (2, 1)), (3, 4))
    assert root_hash("a", "b") != root_hash("ab", "") != root_hash("", "ab")
    assert block_hash(root, (1,)) == block_hash(root_hash("model"), [1])


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 2**32), ("1MiB", 2**20), (512, 512), ("1.5kb", 1500), ("2e3", 2000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "4 parsecs", "1..2MB", "nan"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)
