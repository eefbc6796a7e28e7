"""Ids to text as they come. Joined, the pieces equal decoding all ids at once, for any ids in any grouping."""

from codecs import getincrementaldecoder
from collections.abc import Iterable

from nanoserve.text.tokenizer import Tokenizer

_Utf8 = getincrementaldecoder("utf-8")


class Detokenizer:
    """One answer's bytes. A character is given out once its last byte is there; what is no UTF-8 becomes U+FFFD.

    Python's decoder and the tokenizers library replace the same maximal subparts (Unicode 15, section 3.9, table 3-8),
    so holding back the incomplete tail is all the state there is.
    """

    __slots__ = ("_decode", "_table")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._table = tokenizer.byte_table(skip_special_tokens=skip_special_tokens)
        self._decode = _Utf8("replace").decode

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that became complete."""
        table = self._table
        return self._decode(b"".join([table[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        """What is left: U+FFFD for bytes that never became a character."""
        return self._decode(b"", True)
