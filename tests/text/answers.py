"""An answer joined from its deltas, as a client joins a stream."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nanoserve.core.outputs import FinishReason, RequestOutput
from nanoserve.core.plan import TokenLogprobs
from nanoserve.core.request import GenerateRequest
from nanoserve.core.sampling import SamplingParams
from nanoserve.text.policy import OutputPolicy
from nanoserve.text.postprocess import ChoiceProcessor, Delta, TokenText
from nanoserve.text.tokenizer import Tokenizer


@dataclass
class Answer:
    """Everything a client sees of one choice; ids of calls are checked, then forgotten, since they are random."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0
    stopped_by_text: bool = field(default=False, compare=False)  # whether the engine knew, which grouping may change

    def add(self, delta: Delta) -> None:
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.tool_calls:
            assert (call.id is None) == (call.name is None)
            if call.name is not None:
                assert call.index == len(self.calls)
                self.calls.append((call.name, ""))
            name, arguments = self.calls[call.index]
            self.calls[call.index] = (name, arguments + call.arguments)
        self.logprobs += delta.logprobs
        self.token_ids += delta.new_token_ids
        assert self.finish_reason is None or delta.finish_reason is None
        self.finish_reason = self.finish_reason or delta.finish_reason
        self.stop_reason = self.stop_reason if delta.stop_reason is None else delta.stop_reason
        self.num_tokens = delta.num_completion_tokens
        self.stopped_by_text |= delta.stopped_by_text


def groups(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """``ids`` in pieces of the given sizes, the last one taking what is left."""
    start = 0
    for size in sizes:
        if start + size >= len(ids):
            break
        yield tuple(ids[start : start + size])
        start += size
    yield tuple(ids[start:])


def answer(
    tokenizer: Tokenizer,
    policy: OutputPolicy,
    ids: Sequence[int],
    sizes: Sequence[int] = (),
    *,
    finish: FinishReason = FinishReason.STOP,
    stop_token_id: int | None = None,
    min_tokens: int = 0,
) -> Answer:
    """What a client sees of an engine's output ``ids``, delivered in pieces of ``sizes``."""
    sampling = SamplingParams(max_tokens=max(len(ids), min_tokens), min_tokens=min_tokens)
    request = GenerateRequest(request_id="r-0", prompt_token_ids=(1, 2), sampling=sampling)
    processor = ChoiceProcessor(tokenizer, policy, request)
    joined = Answer()
    pieces = list(groups(ids, sizes))
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        output = RequestOutput(
            request_id="r-0",
            new_token_ids=piece,
            finish_reason=finish if last else None,
            stop_token_id=stop_token_id if last else None,
            logprobs=tuple(TokenLogprobs(i, -0.5, 1, ((i, -0.5), (0, -2.0))) for i in piece),
        )
        joined.add(processor.feed(output))
    return joined


def random_sizes(rng: random.Random, total: int) -> list[int]:
    return [rng.choice((1, 1, 2, 3, 7)) for _ in range(total)]
