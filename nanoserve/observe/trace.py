"""Logs of arrivals: when each request came, how long its prompt and answer were, and what prompts have in common.

A log is JSON lines, of either form, in order of time:

    {"at_s": 0.5, "input_tokens": 900, "output_tokens": 40, "prefix": "agent-7", "prefix_tokens": 512,
     "session": "s1", "tenant": "acme", "priority": 0}
    {"timestamp": 500, "input_length": 900, "output_length": 40, "hash_ids": [17, 4]}

The second is that of Mooncake's published traces (Qin et al. 2024): milliseconds, and an id for each 512 tokens of the
prompt, equal where these tokens and all before them are equal. Tokens are made up; equal names give equal tokens.
"""

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.core.errors import ConfigError
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams

VOCAB_SIZE = 100_000
_HASHED_TOKENS = 512
_MAX_TOKENS = 10_000_000


class Arrival(NamedTuple):
    """One request and when it comes."""

    at_s: float
    request: GenerateRequest


def read_log(path: Path) -> Iterator[Arrival]:
    """The arrivals of a log file.

    Raises:
        ConfigError: it cannot be read, or a line is not one of the forms or goes back in time.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            yield from parse_log(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The trace {path} cannot be read: {getattr(error, 'strerror', 'it is not UTF-8')}."
        ) from None


def parse_log(lines: Iterable[str]) -> Iterator[Arrival]:
    """As ``read_log``, from lines."""
    last_s = 0.0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            arrival = _arrival(json.loads(line), number)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"Line {number} of the trace is no arrival: {error!r:.120}.") from None
        if arrival.at_s < last_s:
            raise ConfigError(f"Line {number} of the trace comes before the line above it ({arrival.at_s:g} s).")
        last_s = arrival.at_s
        yield arrival


def _arrival(fields: dict[str, Any], number: int) -> Arrival:
    hashed = "timestamp" in fields
    at_s = fields["timestamp"] / 1e3 if hashed else float(fields["at_s"])
    num_input, num_output = (fields[f"{name}_{'length' if hashed else 'tokens'}"] for name in ("input", "output"))
    if not (0 <= at_s < float("inf") and 1 <= num_input <= _MAX_TOKENS and 1 <= num_output <= _MAX_TOKENS):
        raise ValueError(f"times must be >= 0, tokens in 1..{_MAX_TOKENS}")
    if hashed:
        ids = fields.get("hash_ids", [])[: num_input // _HASHED_TOKENS + 1]
        pieces = [_tokens(f"hash {id_}", _HASHED_TOKENS) for id_ in ids]
        prompt = tuple(token_id for piece in pieces for token_id in piece)[:num_input]
    else:
        prompt = _tokens(f"prefix {fields.get('prefix')}", min(fields.get("prefix_tokens", 0), num_input))
    request = make_request(
        number,
        prompt + _tokens(f"own {number}", num_input - len(prompt)),
        num_output,
        session_id=str(fields.get("session", "")),
        tenant=str(fields.get("tenant", "")),
        priority=int(fields.get("priority", 0)),
    )
    return Arrival(at_s, request)


def make_request(number: int, prompt: tuple[int, ...], num_output: int, **fields: Any) -> GenerateRequest:
    """A request that generates exactly ``num_output`` tokens."""
    sampling = SamplingParams(max_tokens=num_output, seed=0, temperature=0, ignore_eos=True)
    return GenerateRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling=sampling, **fields)


def answer(number: int, index: int) -> int:
    """The made-up token ``index`` of the answer to request ``number``."""
    return (number * 7919 + index * 104_729) % VOCAB_SIZE


def _tokens(name: str, count: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(VOCAB_SIZE), k=count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Sessions that share system prompts: a session's turn is its last prompt, the answer, and something new.

    Lengths are ranges of tokens. A session longer than ``max_tokens`` begins anew. System prompts are drawn by a
    power law, the first one most often.
    """

    num_requests: int = 3000
    requests_per_s: float = 40.0
    num_systems: int = 40
    num_sessions: int = 240
    system_tokens: tuple[int, int] = (256, 1536)
    turn_tokens: tuple[int, int] = (16, 128)
    output_tokens: tuple[int, int] = (8, 64)
    max_tokens: int = 3000
    seed: int = 0

    def arrivals(self) -> Iterator[Arrival]:
        rng = random.Random(self.seed)
        vocabulary = range(VOCAB_SIZE)

        def tokens(low: int, high: int) -> tuple[int, ...]:
            return tuple(rng.choices(vocabulary, k=rng.randint(low, high)))

        systems = [tokens(*self.system_tokens) for _ in range(self.num_systems)]
        weights = [1 / (place + 1) for place in range(self.num_systems)]
        said = rng.choices(systems, weights, k=self.num_sessions)
        fresh = iter(rng.choices(systems, weights, k=self.num_requests))
        now_s = 0.0
        for number in range(self.num_requests):
            now_s += rng.expovariate(self.requests_per_s)
            session = rng.randrange(self.num_sessions)
            before = said[session] if len(said[session]) <= self.max_tokens else next(fresh)
            prompt, num_output = before + tokens(*self.turn_tokens), rng.randint(*self.output_tokens)
            said[session] = prompt + tuple(answer(number, index) for index in range(num_output))
            yield Arrival(now_s, make_request(number, prompt, num_output, session_id=f"s{session}"))
