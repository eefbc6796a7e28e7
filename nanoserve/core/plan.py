"""The plan of one step and its result: what crosses between the scheduler and whoever owns the tensors.

Values of which there is one a request and step are NamedTuples: a frozen dataclass costs a microsecond to make.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from nanoserve.core.pooling import PoolingParams
from nanoserve.core.request import Grammar, ThinkingBudget
from nanoserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmittedState:
    """What an executor must know to start (or, after a preemption, restart) a request.

    ``token_ids``: every token known so far, prompt then output. ``num_prompt_tokens``: how many of them are prompt.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None
    adapter: str | None = None


class ScheduledRequest(NamedTuple):
    """One request's share of a step. One shape for new, continuing, resumed and speculating requests.

    ``token_ids`` are computed now, at positions ``num_computed_tokens ...``. ``new_block_ids`` are appended to the
    request's block table before the step. Logits are needed for the last ``num_logits`` of the positions; the last
    ``num_samples`` of those sample a token (0: the prompt goes on; 1: usual; k + 1: k drafts are verified). The rows
    before them only score the token that follows (prompt logprobs). ``admitted`` is set when the executor does not
    hold the request; ``new_block_ids`` is then its whole table, prefix hits included. ``pooling`` is set in the step
    that computes the last token of a request that pools it.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    new_block_ids: tuple[int, ...] = ()
    num_logits: int = 0
    num_samples: int = 0
    admitted: AdmittedState | None = None
    pooling: PoolingParams | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy one block's KV of all layers before the step. ``source``/``target``: "device", "host" or "disk".

    Copies are made in order, or so that nobody sees the difference. One from the disk may take until the step's end:
    nothing of the step reads what it brings.
    """

    source_block_id: int
    target_block_id: int
    source: str = "device"
    target: str = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step: pure data, picklable, no tensors, no live sequences.

    ``released_request_ids``: requests that the executor forgets before it admits anything (finished, aborted,
    preempted).
    """

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    released_request_ids: tuple[str, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.scheduled)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities of one position: the token, its rank (1 is the most likely), and the best alternatives."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class SampledTokens(NamedTuple):
    """What one request got from a step.

    ``token_ids``: sampled now, several when drafts were accepted. ``logprobs``: one entry a token when asked for.
    ``prompt_logprobs``: one entry for each scored prompt position, in order: the entry of position p is of token p + 1.
    ``error``: (type, message) of what ends this request alone, such as a grammar that grew too complex.
    ``pooled``: what ``ScheduledRequest.pooling`` asked for, in the form that ``PoolingParams`` describes.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: tuple[str, str] | None = None
    pooled: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """The result of one step, by request id. A request that only went on with its prompt may be absent.

    ``lost_copies``: those from or to the disk that failed, because the file or what it held is broken.
    """

    step_id: int
    sampled: Mapping[str, SampledTokens] = field(default_factory=dict)
    lost_copies: tuple[BlockCopy, ...] = ()
