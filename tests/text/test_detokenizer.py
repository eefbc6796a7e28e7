"""No broken character is ever shown, and nothing differs from decoding all ids at once."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.text.detokenizer import Detokenizer
from nanoserve.text.tokenizer import Tokenizer
from tests.text.answers import groups
from tests.text.small_tokenizer import random_cut

TEXT = "Zürich 🧵 日本語 — naïve café ✅"


@given(
    ids=st.lists(st.integers(0, 500), min_size=1, max_size=40), sizes=st.lists(st.integers(1, 5)), skip=st.booleans()
)
@settings(deadline=None)
def test_pieces_join_to_the_decoded_whole(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.feed(piece) for piece in groups(ids, sizes)) + detokenizer.finish()
    assert text == tokenizer.pretrained.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("seed", range(5))
def test_characters_split_over_tokens_are_shown_whole(
    tokenizer: Tokenizer, pieces: dict[bytes, int], seed: int
) -> None:
    ids = random_cut(pieces, TEXT, random.Random(seed))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    shown = [detokenizer.feed((token_id,)) for token_id in ids]
    assert "".join(shown) == TEXT
    assert not any("\ufffd" in piece for piece in shown)
    assert any("\ufffd" in tokenizer.decode([token_id]) for token_id in ids)


def test_an_unfinished_character_is_not_lost(tokenizer: Tokenizer, pieces: dict[bytes, int]) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=True)
    assert detokenizer.feed((pieces[b"a"], pieces[b"\xf0"])) == "a"
    assert detokenizer.finish() == "\ufffd"
