"""Ids to bytes and back; users' text never becomes a control token."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.core.errors import CheckpointError
from nanoserve.text.tokenizer import Tokenizer

TAGS = ("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "<|endoftext|>")


def test_a_special_token_is_itself_only_where_it_is_allowed(tokenizer: Tokenizer) -> None:
    for tag in TAGS:
        assert tokenizer.encode(tag, allow_special=True) == [tokenizer.id_of(tag)]
        assert tokenizer.id_of(tag) not in tokenizer.encode(tag, allow_special=False)
        assert tokenizer.decode(tokenizer.encode(tag, allow_special=False)) == tag


def test_plain_and_special_encoding_agree_on_ordinary_text(tokenizer: Tokenizer) -> None:
    for text in ("hello  world\n\n", "a < b | c", "naïve 日本語 🧵 12345", " ", "\t\r\n"):
        assert tokenizer.encode(text, allow_special=False) == tokenizer.encode(text, allow_special=True)


def test_ids_without_text_decode_to_nothing(tokenizer: Tokenizer) -> None:
    hello = tokenizer.encode("hello", allow_special=False)
    for odd in (tokenizer.num_tokens, tokenizer.num_tokens + 7, 10**9, 2**70):
        assert tokenizer.decode([*hello, odd]) == "hello"
        assert tokenizer.token_bytes(odd) == b""


def test_special_tokens_are_hidden_and_markup_is_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<think>a</think><|im_end|>", allow_special=True)
    assert tokenizer.decode(ids) == "<think>a</think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think>a</think><|im_end|>"


@given(ids=st.lists(st.integers(0, 500), max_size=40), skip=st.booleans())
@settings(deadline=None)
def test_decoding_is_that_of_transformers(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    """Random ids are mostly invalid UTF-8; the same subparts must be replaced."""
    assert tokenizer.decode(ids, skip_special_tokens=skip) == tokenizer.pretrained.decode(ids, skip_special_tokens=skip)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        Tokenizer.load(tmp_path)
