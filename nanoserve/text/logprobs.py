"""Log probabilities as a reader wants them: with the words of the tokens."""

from codecs import utf_8_decode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nanoserve.core.plan import TokenLogprobs
from nanoserve.text.tokenizer import Tokenizer

# JSON has no -Infinity; vLLM and OpenAI's clients know this value for "impossible".
FLOOR = -9999.0
_REPLACEMENT = "\ufffd".encode()


@dataclass(frozen=True, slots=True)
class TokenText:
    """One position: the token, what it adds to the text, and the best alternatives (best first, empty below them).

    ``token`` is the token's own text (a special token's name); ``bytes`` joined over all entries are the UTF-8 of the
    text, so a token that adds nothing has none. ``logprob`` is finite; None only for the first token of a prompt.
    ``top``: as many as asked for, and the token itself where it is not among them. ``text_offset``: characters of the
    text before this token. ``rank``: 1 for the most likely token of its position, None where it is not known.
    """

    token: str
    token_id: int
    bytes: bytes
    logprob: float | None
    top: tuple["TokenText", ...] = ()
    text_offset: int = 0
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class _Waiting:
    token_id: int
    entry: TokenLogprobs | None
    num_bytes: int


class LogprobWriter:
    """One text's entries. A token is written once all its bytes are settled: part of a character, or replaced.

    ``num_chars`` is the offset at which the next written token starts.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_top: int, skip_special_tokens: bool, num_chars: int = 0) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.byte_table(skip_special_tokens=skip_special_tokens)
        self._num_top = num_top
        self.num_chars = num_chars
        self._data = b""  # from a character's beginning on; the tokens of its first ``_num_written`` bytes are written
        self._num_written = 0
        self._waiting: list[_Waiting] = []

    def add(self, token_id: int, entry: TokenLogprobs | None, *, hidden: bool = False) -> None:
        """Append a token; ``hidden``: it ended the answer and adds nothing to the text."""
        data = b"" if hidden else self._table[token_id]
        self._data += data
        self._waiting.append(_Waiting(token_id, entry, len(data)))

    def take(self, *, final: bool = False) -> tuple[TokenText, ...]:
        """The entries that are settled; all of them when the text is at its end."""
        if not self._waiting:
            return ()
        spans = list(_spans(self._data, final=final))
        settled = spans[-1][1] if spans else 0
        written, start = [], self._num_written
        while self._waiting and (final or start + self._waiting[0].num_bytes <= settled):
            waiting = self._waiting.pop(0)
            end = start + waiting.num_bytes
            written.append(self._entry(waiting, _share(self._data, spans, start, end)))
            start = end
        boundary = _boundary(self._data, spans, start)
        self._data, self._num_written = self._data[boundary:], start - boundary
        return tuple(written)

    def _entry(self, waiting: _Waiting, data: bytes) -> TokenText:
        offset = self.num_chars
        self.num_chars += sum((byte & 0xC0) != 0x80 for byte in data)  # characters that begin here
        token = self._tokenizer.token_bytes(waiting.token_id).decode("utf-8", "replace")
        if waiting.entry is None:
            return TokenText(token, waiting.token_id, data, None, (), offset)
        logprob = max(waiting.entry.logprob, FLOOR)
        top = self._top(waiting.entry, offset)
        return TokenText(token, waiting.token_id, data, logprob, top, offset, waiting.entry.rank)

    def _top(self, entry: TokenLogprobs, offset: int) -> tuple[TokenText, ...]:
        if not self._num_top:
            return ()
        best = [(*pair, rank) for rank, pair in enumerate(entry.top[: self._num_top], start=1)]
        if all(token_id != entry.token_id for token_id, _, _ in best):
            best.append((entry.token_id, entry.logprob, entry.rank))
        return tuple(self._alternative(*item, offset) for item in best)

    def _alternative(self, token_id: int, logprob: float, rank: int, offset: int) -> TokenText:
        data = self._tokenizer.token_bytes(token_id)
        return TokenText(data.decode("utf-8", "replace"), token_id, data, max(logprob, FLOOR), (), offset, rank)


def _spans(data: bytes, *, final: bool) -> Iterator[tuple[int, int, bool]]:
    """(start, end, is valid) of the settled parts of ``data``: runs of characters, and subparts that get replaced."""
    start = 0
    while start < len(data):
        try:
            _, num_bytes = utf_8_decode(data[start:], "strict", final)
        except UnicodeDecodeError as error:
            if error.start:
                yield start, start + error.start, True
            yield start + error.start, start + error.end, False
            start += error.end
        else:
            if num_bytes:
                yield start, start + num_bytes, True
            return


def _boundary(data: bytes, spans: Sequence[tuple[int, int, bool]], end: int) -> int:
    """Where the character or replaced subpart begins that the byte before ``end`` is a part of; ``end`` between two."""
    for span_start, span_end, valid in spans:
        if span_start < end < span_end:
            if not valid:
                return span_start
            while data[end] & 0xC0 == 0x80:
                end -= 1
    return end


def _share(data: bytes, spans: Sequence[tuple[int, int, bool]], start: int, end: int) -> bytes:
    """What the bytes ``start .. end`` add to the text; a replaced subpart counts for the token in which it begins."""
    parts = []
    for span_start, span_end, valid in spans:
        if valid:
            parts.append(data[max(start, span_start) : max(start, min(end, span_end))])
        elif start <= span_start < end:
            parts.append(_REPLACEMENT)
    return b"".join(parts)
