"""Guesses of a request's next tokens from its own earlier ones (prompt lookup: Saxena 2023; Yang et al. 2023).

Invariant: guesses change when tokens come, never which. A token is a function of (logits, seed, position), so the step
that verifies k drafts samples at each of their positions the very token that k steps would have sampled, and a draft
counts exactly when it is that token. So rejection sampling (Leviathan et al. 2023), which keeps the distribution only,
is not needed; it would not accept more either: a lookup proposes one token with certainty, and both ways accept it with
the probability that the model gives it.
"""

from collections.abc import Sequence

_MIN_MATCH = 2  # tokens that must repeat before anything is guessed
_MAX_MATCH = 8  # beyond that a longer match says nothing more
_MAX_CANDIDATES = 16
_FIRST_NUM_DRAFTS = 4
_MAX_PAUSE = 31

MAX_ROWS = 16
"""Tokens of a step up to which drafts are tried at all.

Up to about as many rows a step reads weights for longer than it multiplies: two bf16 operations a weight and row at
470 GFLOP/s against two bytes at 37 GB/s meet at 13 rows on two AVX-512 cores (a GPU's ratio is larger). Beyond it a
refuted draft costs what a token costs.
"""


def spare_rows(num_rows: int, num_decoding: int, num_waiting: int) -> int:
    """Drafts that each of ``num_decoding`` requests may add to a step of ``num_rows`` tokens.

    None while requests wait: their prompts will fill the step, or they wait for the blocks that drafts would take.
    """
    if num_waiting or not num_decoding:
        return 0
    return max(0, MAX_ROWS - num_rows) // num_decoding


class Drafter:
    """Guesses for one request: an index of its tokens, and a pace that follows how its guesses fare.

    The index holds every pair of tokens in a chain of places, latest first, as deflate does (RFC 1951, section 4); it
    grows by one entry a token. The pace doubles while all drafts of a step are accepted, falls to the number accepted
    otherwise, and after k steps in a row without any rests for 2 ** k - 1 tokens, at most 31: a text that does not
    repeat itself costs one refuted draft in 32 tokens.
    """

    __slots__ = ("_latest", "_max_drafts", "_num_drafts", "_pause", "_previous", "_resume_at")

    def __init__(self, max_drafts: int) -> None:
        self._max_drafts = max_drafts
        self._num_drafts = min(_FIRST_NUM_DRAFTS, max_drafts)
        self._pause = 0
        self._resume_at = 0
        self._latest: dict[int, int] = {}
        self._previous = [0] * _MIN_MATCH

    def guess(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """Up to ``limit`` tokens that may follow ``token_ids``, which must have only grown since the last call."""
        self._index(token_ids)
        num_drafts = min(limit, self._num_drafts)
        if num_drafts < 1 or len(token_ids) < self._resume_at:
            return ()
        start = self._find(token_ids)
        if not start:
            return ()
        # A match that overlaps the end repeats with the distance between the two.
        period = len(token_ids) - start
        return tuple(token_ids[start + i % period] for i in range(num_drafts))

    def learn(self, num_drafts: int, num_accepted: int, num_tokens: int) -> None:
        """Take note that ``num_accepted`` of ``num_drafts`` were right; ``num_tokens`` are known now."""
        if num_accepted == num_drafts:
            self._num_drafts = min(2 * self._num_drafts, self._max_drafts)
        else:
            self._num_drafts = max(1, num_accepted)
        self._pause = 0 if num_accepted else min(2 * self._pause + 1, _MAX_PAUSE)
        self._resume_at = num_tokens + self._pause

    def _index(self, token_ids: Sequence[int]) -> None:
        """File every place that a token follows, under the pair before it. The end is followed by nothing yet."""
        latest, previous = self._latest, self._previous
        for place in range(len(previous), len(token_ids)):
            pair = _pair(token_ids, place)
            previous.append(latest.get(pair, 0))
            latest[pair] = place

    def _find(self, token_ids: Sequence[int]) -> int:
        """The place after the longest, then latest, earlier match of the end; 0 when there is none."""
        end = len(token_ids)
        place, best, best_length = self._latest.get(_pair(token_ids, end), 0), 0, 0
        for _ in range(_MAX_CANDIDATES):
            if not place or best_length == _MAX_MATCH:
                break
            length = _match_length(token_ids, place, end)
            if length > best_length:
                best, best_length = place, length
            place = self._previous[place]
        return best


def _pair(token_ids: Sequence[int], place: int) -> int:
    return token_ids[place - 2] << 32 | token_ids[place - 1]


def _match_length(token_ids: Sequence[int], place: int, end: int) -> int:
    """How many tokens before ``place`` equal those before ``end``; both are preceded by one pair."""
    length = _MIN_MATCH
    while length < min(_MAX_MATCH, place) and token_ids[place - length - 1] == token_ids[end - length - 1]:
        length += 1
    return length
