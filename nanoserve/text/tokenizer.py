"""The model's tokenizer: text to ids and ids to the bytes they stand for, byte-level BPE only.

Ids never fail to decode: a padding row of the embedding, or any id that the tokenizer does not know, is no text.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from nanoserve.core.errors import CheckpointError

# A noncharacter that no text needs: it breaks up control tokens typed by users until the template's own are found.
_MARK = "\ufdd0"


def _byte_of_char() -> dict[str, int]:
    """The printable stand-ins of GPT-2's byte-level BPE (Radford et al. 2019, ``bytes_to_unicode``), backwards."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()

_LONG_CHARS = 4096


class ByteTable(dict[int, bytes]):
    """id -> bytes, filled on first use. Ids in ``hidden`` and unknown ids stand for nothing."""

    def __init__(self, backend: Any, hidden: Iterable[int] = ()) -> None:
        super().__init__(dict.fromkeys(hidden, b""))
        self._token_of = backend.id_to_token
        self._num_tokens = backend.get_vocab_size(with_added_tokens=True)

    def __missing__(self, token_id: int) -> bytes:
        known = 0 <= token_id < self._num_tokens
        data = _bytes_of_token(self._token_of(token_id) or "") if known else b""
        if known:  # unknown ids are not kept, so that nobody can fill the memory with them
            self[token_id] = data
        return data


def _bytes_of_token(token: str) -> bytes:
    """A token with a character outside the byte alphabet stands for itself, as in the tokenizers library's decoder."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


class Tokenizer:
    """Reads only; safe to share between threads. ``num_tokens`` may be less than the embedding has rows."""

    def __init__(self, pretrained: Any) -> None:
        backend: Any = getattr(pretrained, "backend_tokenizer", None)
        if "ByteLevel" not in str(getattr(backend, "decoder", None)):
            raise CheckpointError("The tokenizer is not a byte-level BPE with a tokenizer.json; only those are served.")
        self.pretrained = pretrained
        self._backend = backend
        self._plain = _without_added_tokens(backend)
        self._added = {token.content: token_id for token_id, token in pretrained.added_tokens_decoder.items()}
        self.special_ids = frozenset(pretrained.all_special_ids)
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.num_tokens = max(vocabulary.values(), default=-1) + 1
        self.eos_token_id: int | None = pretrained.eos_token_id
        # One character stands for one byte, except in added tokens that are outside the byte alphabet.
        self.max_token_bytes = max(*map(len, vocabulary), *(len(token.encode()) for token in self._added), 1)
        self._full = ByteTable(backend)
        self._visible = ByteTable(backend, hidden=self.special_ids)
        self._control = _any_of(self._added)
        self._special = _any_of(token for token, i in self._added.items() if i in self.special_ids)
        self._suspect = _suspect_pattern(self._added)

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """The tokenizer in a model folder.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of a kind that is not served.
        """
        from transformers import AutoTokenizer

        try:
            pretrained = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises nearly every class here
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise CheckpointError(f"The tokenizer of {folder.name} cannot be loaded: {reason}") from error
        return cls(pretrained)

    def encode(self, text: str, *, allow_special: bool, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text.

        With ``allow_special``, names of special tokens in it become these tokens, and ``add_special_tokens`` adds those
        that the tokenizer puts around every text (Qwen3's: none); without it everything is plain text.
        """
        if allow_special:
            return _encode(self._backend, text, add_special_tokens=add_special_tokens)
        return _encode(self._plain, text)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. Unknown ids are no text."""
        table = self.byte_table(skip_special_tokens=skip_special_tokens)
        return b"".join([table[token_id] for token_id in token_ids]).decode("utf-8", "replace")

    def byte_table(self, *, skip_special_tokens: bool) -> ByteTable:
        """id -> the bytes it adds to a text; shared, for hot loops."""
        return self._visible if skip_special_tokens else self._full

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, a special one's name included; they may be a part of a character."""
        return self._full[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    def id_of(self, token: str) -> int | None:
        """The id of an added token (``"<think>"``), None when the tokenizer lacks it."""
        return self._added.get(token)

    # Prompts made of a template and of users' text: control tokens count only where the template wrote them.

    def mark(self, text: str) -> str:
        """The text with every beginning of a control token broken up, to be rendered by a template."""
        return self._suspect.sub(lambda match: match[0] + _MARK, text)

    def unmark(self, text: str) -> str:
        return text.replace(_MARK, "")

    def encode_marked(self, text: str) -> list[int]:
        """Ids of a rendered template whose inputs went through ``mark``: unbroken control tokens are the template's."""
        ids: list[int] = []
        end = 0
        for match in self._control.finditer(text):
            ids += self._encode_plain(text[end : match.start()])
            ids.append(self._added[match[0]])
            end = match.end()
        ids += self._encode_plain(text[end:])
        return ids

    def last_turn(self, marked: str) -> str:
        """What follows the last special token of a rendered, marked text."""
        end = 0
        for match in self._special.finditer(marked):
            end = match.end()
        return marked[end:]

    def _encode_plain(self, marked: str) -> Sequence[int]:
        return _encode(self._plain, self.unmark(marked)) if marked else ()


def _encode(backend: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """``encode`` holds the interpreter's lock while it works, seconds for megabytes; the batched form lets it go."""
    if len(text) < _LONG_CHARS:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def _without_added_tokens(backend: Any) -> Any:
    """The same BPE, blind to added tokens: ``encode_special_tokens`` would still match those that are not special."""
    import tokenizers

    plain = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Leftmost, then longest, as the tokenizers library matches added tokens. No token: matches nowhere."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")


def _suspect_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """First characters of control tokens. Punctuation is suspect anywhere, so halves in two messages never join; a

    token that starts with a letter or a space only where it stands whole.
    """
    marks = {token[0] for token in tokens if not (token[0].isalnum() or token[0].isspace())}
    words = [
        f"{re.escape(token[0])}(?={re.escape(token[1:])})"
        for token in tokens
        if token[1:] and (token[0].isalnum() or token[0].isspace())
    ]
    return re.compile("|".join([re.escape(mark) for mark in sorted(marks)] + words) or r"(?!)")
