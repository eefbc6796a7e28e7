"""Who asks: the key behind a request, and what its tenant's requests carry to the engines.

Tenants come from the operator's configuration alone, never from a request, so their number is bounded.
"""

import hmac
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pydantic import SecretStr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoserve.core.errors import InvalidRequestError, NanoserveError
from nanoserve.core.outputs import RequestOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.protocol.errors import AuthenticationError, QuotaError
from nanoserve.serving.backstage import Backstage
from nanoserve.serving.config import ApiKey
from nanoserve.serving.door import Door, Health, RequestStream, ServedModel
from nanoserve.serving.front import error_response
from nanoserve.serving.quotas import Quota
from nanoserve.serving.usage import Usage

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
TIMEOUT_HEADER = "x-request-timeout-s"
BATCH_PRIORITY = 100
"""Requests of the class "batch" run at this priority or worse: behind every online one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The owner of a key. ``floor``: the best priority that its requests may have; None: any."""

    tenant: str
    weight: float
    floor: int | None
    quota: Quota
    has_own_cache: bool

    def stamped(self, request: GenerateRequest, deadline_s: float | None) -> GenerateRequest:
        """The request as this caller's."""
        priority = request.priority if self.floor is None else max(self.floor, request.priority)
        salt = f"{self.tenant}\0{request.cache_salt}" if self.has_own_cache else request.cache_salt
        return replace(
            request,
            tenant=self.tenant,
            weight=self.weight,
            priority=priority,
            cache_salt=salt,
            deadline_s=deadline_s,
        )


def callers_of(
    keys: Sequence[str | ApiKey], num_routers: int, clock: Callable[[], float] = time.monotonic
) -> list[tuple[bytes, Caller]]:
    """Each key with its owner. A key without a tenant is a tenant of its own, ``key-1`` and so on."""
    full = [key if isinstance(key, ApiKey) else ApiKey(key=SecretStr(key)) for key in keys]
    return [_caller(key, number, num_routers, clock) for number, key in enumerate(full, 1)]


def _caller(key: ApiKey, number: int, num_routers: int, clock: Callable[[], float]) -> tuple[bytes, Caller]:
    caller = Caller(
        tenant=key.tenant or f"key-{number}",
        weight=key.weight,
        floor=BATCH_PRIORITY if key.service_class == "batch" else 0,
        quota=Quota(key, num_routers, clock),
        has_own_cache=bool(key.tenant),
    )
    return key.key.get_secret_value().encode(), caller


def anybody() -> Caller:
    """Whoever asks where there are no keys."""
    quota = Quota(ApiKey(), 1, time.monotonic)
    return Caller(tenant="", weight=1.0, floor=None, quota=quota, has_own_cache=False)


class Callers:
    """Refuses every request without a key, except OPTIONS and ``OPEN_PATHS``, and those beyond their key's quota.

    The others know their caller as ``scope["caller"]``. No keys: everything is open. Only POST counts as a request.
    """

    def __init__(self, app: ASGIApp, callers: Sequence[tuple[bytes, Caller]], usage: Usage) -> None:
        self._app = app
        self._callers = callers
        self._usage = usage
        self._anybody = anybody()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        caller = self._anybody if self._is_open(scope) else self._find(scope)
        if caller is None:
            message = "Give a valid API key in the header `Authorization: Bearer KEY` (or `x-api-key: KEY`)."
            refusal = error_response(AuthenticationError(message, code="invalid_api_key"), scope["path"])
            return await refusal(scope, receive, send)
        scope["caller"] = caller
        if scope["method"] != "POST":
            return await self._app(scope, receive, send)
        return await self._count(caller, scope, receive, send)

    async def _count(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start" and (headers := caller.quota.headers()):
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        try:
            caller.quota.enter()
        except QuotaError as error:
            self._usage.refused(caller.tenant, "quota")
            return await error_response(error, scope["path"])(scope, receive, send_with_limits)
        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            caller.quota.leave()

    def _is_open(self, scope: Scope) -> bool:
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        return not self._callers or scope["method"] == "OPTIONS" or path in OPEN_PATHS

    def _find(self, scope: Scope) -> Caller | None:
        """Compares with every key, each in constant time, so that the time tells nothing about them."""
        given = [_bearer_token(value) for name, value in scope["headers"] if name == b"authorization"]
        given += [value for name, value in scope["headers"] if name == b"x-api-key"]
        found = None
        for token in given[:2]:
            for key, caller in self._callers:
                found = caller if hmac.compare_digest(token, key) else found
        return found


def _bearer_token(authorization: bytes) -> bytes:
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""


def deadline(asked_s: float | str | None, max_s: float | None, now_s: float) -> float | None:
    """When a request has to be done: after the time it gives itself, and the server's at the latest.

    Raises:
        InvalidRequestError: the time asked for is not a number of seconds above 0.
    """
    if asked_s is None:
        return None if max_s is None else now_s + max_s
    try:
        seconds = float(asked_s)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        message = f"`timeout_s` must be a number of seconds > 0. Given: {asked_s!r:.60}."
        raise InvalidRequestError(message, param="timeout_s")
    return now_s + (seconds if max_s is None else min(seconds, max_s))


class CallersDoor:
    """The door as one HTTP request of a caller goes through it: stamped, paid for and counted."""

    def __init__(self, door: Door, scope: Scope, backstage: Backstage, deadline_s: float | None) -> None:
        self._door = door
        self._scope = scope
        self._caller: Caller = scope["caller"]
        self._usage = backstage.usage
        self._timelines = backstage.timelines
        self._deadline_s = deadline_s
        self._paid_prompt: tuple[int, ...] | None = None

    async def open(self, request: GenerateRequest, model: str) -> RequestStream:
        """The choices of one prompt come one after the other and pay for it once."""
        request = self._caller.stamped(request, self._deadline_s)
        prompt, tenant = request.prompt_token_ids, self._caller.tenant
        self._timelines.received(request, model, self._scope["request_id"], self._scope.get("trace"))
        num_tokens = 0 if prompt is self._paid_prompt else len(prompt)
        try:
            self._caller.quota.reserve(num_tokens)
            self._paid_prompt = prompt
            stream = await self._door.open(request, model)
        except NanoserveError as error:
            self._timelines.note(request.request_id, "refused", reason=error.message)
            if isinstance(error, QuotaError):
                self._usage.refused(tenant, "quota")
            else:
                self._caller.quota.spend(-num_tokens)
                self._usage.refused(tenant, error.code or error.type)
            raise
        self._usage.opened(tenant, model, num_tokens)
        return _Metered(stream, self._caller, self._usage, model)

    def models(self) -> Sequence[ServedModel]:
        return self._door.models()

    async def health(self) -> Health:
        return await self._door.health()

    async def metrics(self) -> bytes:
        return await self._door.metrics()


class _Metered:
    """A stream whose tokens are paid for as they are read."""

    def __init__(self, stream: RequestStream, caller: Caller, usage: Usage, model: str) -> None:
        self._stream = stream
        self._caller = caller
        self._usage = usage
        self._model = model
        self._opened_s = time.monotonic()
        self._has_token = False
        self._is_open = True

    async def next(self) -> RequestOutput:
        output = await self._stream.next()
        if num_tokens := len(output.new_token_ids):
            self._caller.quota.spend(num_tokens)
            ttft_s = None if self._has_token else time.monotonic() - self._opened_s
            self._has_token = True
            self._usage.generated(self._caller.tenant, self._model, num_tokens, ttft_s)
        return output

    def close(self) -> None:
        self._stream.close()
        if self._is_open:
            self._is_open = False
            self._usage.closed(self._caller.tenant, self._model)
