"""A door without engines: it replays chosen outputs, and remembers what was opened and closed."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoserve.core.outputs import FinishReason, RequestOutput
from nanoserve.core.request import GenerateRequest
from nanoserve.serving.door import Health, ServedModel


class ScriptedStream:
    """Gives the outputs one by one, then waits for ever: like an engine that has nothing new."""

    def __init__(self, outputs: Sequence[RequestOutput]) -> None:
        self._outputs = list(outputs)
        self.num_given = 0
        self.closed = False

    async def next(self) -> RequestOutput:
        await asyncio.sleep(0)
        if self.num_given == len(self._outputs):
            await asyncio.Event().wait()
        self.num_given += 1
        return self._outputs[self.num_given - 1]

    def close(self) -> None:
        self.closed = True


@dataclass
class ScriptedDoor:
    """Answers every request with ``token_ids``, one a call, then ``finish`` (None: the answer never ends)."""

    served: Sequence[ServedModel]
    token_ids: Sequence[int] = ()
    finish: FinishReason | None = FinishReason.STOP
    stop_token_id: int | None = None
    error: tuple[str, str] | None = None
    refusal: Exception | None = None
    state: Health = field(default_factory=lambda: Health(healthy=True, ready=True))
    opened: list[GenerateRequest] = field(default_factory=list)
    streams: list[ScriptedStream] = field(default_factory=list)

    async def open(self, request: GenerateRequest, model: str) -> ScriptedStream:
        await asyncio.sleep(0)
        if self.refusal is not None:
            raise self.refusal
        self.opened.append(request)
        self.streams.append(ScriptedStream(self._outputs(request.request_id)))
        return self.streams[-1]

    def _outputs(self, request_id: str) -> list[RequestOutput]:
        news = [RequestOutput(request_id=request_id, new_token_ids=(token_id,)) for token_id in self.token_ids]
        if self.finish is None:
            return news
        end = () if self.stop_token_id is None else (self.stop_token_id,)
        last = RequestOutput(
            request_id=request_id,
            new_token_ids=end,
            finish_reason=self.finish,
            stop_token_id=self.stop_token_id,
            error=self.error,
        )
        return [*news, last]

    def models(self) -> Sequence[ServedModel]:
        return self.served

    async def health(self) -> Health:
        return self.state

    async def metrics(self) -> bytes:
        return b"# HELP nanoserve_requests_running Requests.\n"
