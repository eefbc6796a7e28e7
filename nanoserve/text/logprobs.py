"""Log probabilities as a reader wants them: with the words of the tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenText:
    """One position: the token, what it adds to the text, and the best alternatives (best first, empty below them).

    ``token`` is the token's own text (a special token's name); ``bytes`` joined over all entries are the UTF-8 of the
    text, so a token that adds nothing has none. ``logprob`` is finite; None only for the first token of a prompt.
    ``text_offset``: characters of the text before this token.
    """

    token: str
    token_id: int
    bytes: bytes
    logprob: float | None
    top: tuple["TokenText", ...] = ()
    text_offset: int = 0
