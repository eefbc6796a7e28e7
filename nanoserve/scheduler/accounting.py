"""What the result of a step does to one sequence: tokens appended, drafts rolled back, scores taken.

Invariant: a token is appended only after the check whether the one before it ended the sequence.
"""

from nanoserve.core.outputs import FinishReason
from nanoserve.core.plan import SampledTokens, ScheduledRequest, TokenLogprobs
from nanoserve.scheduler.sequence import Sequence


def append(sequence: Sequence, token_id: int) -> FinishReason | None:
    """Append a sampled token; why the sequence ends with it, if it does."""
    sequence.token_ids.append(token_id)
    if token_id in sequence.stop_token_ids and sequence.num_output_tokens > sequence.request.sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.token_ids) >= sequence.max_length else None


def append_verified(
    sequence: Sequence, request: ScheduledRequest, token_ids: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Append the accepted drafts and the sample after them, up to the first that ends the sequence; roll the rest back.

    The KV of a refuted draft is not counted as computed, and will be overwritten.
    """
    num_sampled, num_drafts = len(token_ids), request.num_samples - 1
    drafts = request.token_ids[len(request.token_ids) - num_drafts :]
    assert 0 < num_sampled <= num_drafts + 1, f"{num_sampled} samples of {num_drafts + 1} planned: {request}"
    assert token_ids[:-1] == drafts[: num_sampled - 1], f"samples {token_ids} do not follow the drafts {drafts}"
    finish_reason: FinishReason | None = None
    num_kept = 0
    while num_kept < num_sampled and finish_reason is None:
        finish_reason = append(sequence, token_ids[num_kept])
        num_kept += 1
    num_computed_tokens = sequence.num_computed_tokens - (request.num_samples - num_sampled)
    sequence.num_computed_tokens = min(num_computed_tokens, len(sequence.token_ids))
    return token_ids[:num_kept], finish_reason


def take_scores(sequence: Sequence, request: ScheduledRequest, sampled: SampledTokens) -> tuple[TokenLogprobs, ...]:
    """The prompt log probabilities that are news; rows beyond the prompt (a continued request's output) are dropped."""
    num_rows = request.num_logits - request.num_samples
    assert len(sampled.prompt_logprobs) == num_rows, f"{len(sampled.prompt_logprobs)} scores of {num_rows}: {request}"
    scores = sampled.prompt_logprobs[: sequence.num_unscored_tokens]
    sequence.num_scored_tokens += len(scores)
    return scores
