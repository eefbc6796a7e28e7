"""What a door hands to an engine: tokens and settings, checked, never text."""

from dataclasses import dataclass

from nanoserve.core.pooling import PoolingParams
from nanoserve.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that all sampled tokens must follow, in the text form that llguidance compiles.

    ``eos_token_ids`` may follow once it is complete.
    """

    text: str
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How many tokens the thoughts may have; ``close_id`` is chosen when these are used up, whatever the model wants.

    Thoughts start with the output, or behind ``open_id`` where the model has to open them itself.
    """

    num_tokens: int
    close_id: int
    open_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate; ``n`` choices are ``n`` of these. Made in ``text/preprocess``, valid by construction.

    ``sampling`` is resolved: ``n`` is 1, ``seed`` and ``max_tokens`` are set, ``stop`` is empty (the door judges stop
    strings), ``structured_outputs`` and ``thinking_token_budget`` are unset (they became ``grammar`` and ``thinking``),
    and ``stop_token_ids`` holds the model's EOS ids (unless ``ignore_eos``) and the request's own.
    ``priority``: lower runs first. ``deadline_s``: ``time.time()`` after which the request ends with an error.
    ``arrival_s``: ``time.time()`` when the door accepted it. ``cache_salt`` separates prefix caches of tenants.
    ``session_id``: requests of one session prefer one replica; engines ignore it.
    ``num_prior_output_tokens``: how many trailing ids of ``prompt_token_ids`` were generated before (a continued
    request): they count as output for penalties, positions, ``max_tokens`` and ``min_tokens``, not as prompt.
    ``pooling``: nothing is generated; the request ends with its last prompt token, which is pooled. ``sampling`` is
    ``NO_SAMPLING`` then.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    grammar: Grammar | None = None
    thinking: ThinkingBudget | None = None
    adapter: str | None = None
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None
    cache_salt: str = ""
    session_id: str = ""
    num_prior_output_tokens: int = 0
    pooling: PoolingParams | None = None
