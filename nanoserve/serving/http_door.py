"""Joins the HTTP app to the feed: the door as ``serving/http.py`` sees it, with the model's text side."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from nanoserve.core.request import GenerateRequest
from nanoserve.model.folder import resolve_model
from nanoserve.serving.config import ServingArgs
from nanoserve.serving.door import Health, ServedModel
from nanoserve.serving.feed import FeedDoor, FeedStream
from nanoserve.serving.http import HttpConfig, build_app
from nanoserve.serving.wire import EngineCard
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.preprocess import ModelLimits, Preprocessor
from nanoserve.text.tokenizer import Tokenizer


class HttpDoor:
    """``door.Door`` over a feed."""

    def __init__(self, feed: FeedDoor, scrape: Callable[[], Awaitable[bytes]], args: ServingArgs) -> None:
        folder = resolve_model(args.engine.model)
        self._feed = feed
        self._scrape = scrape
        self._seed = args.engine.seed
        self._name = args.served_model_name or args.engine.model
        self._tokenizer = Tokenizer.load(folder)
        self._defaults = GenerationDefaults.load(folder, self._tokenizer.eos_token_id)
        self._models: list[ServedModel] = []

    async def open(self, request: GenerateRequest) -> FeedStream:
        return await self._feed.open(request)

    def models(self) -> Sequence[ServedModel]:
        """The model, from the first engine's hello on."""
        if not self._models and (card := self._feed.card()) is not None:
            self._models.append(self._serve(card))
        return self._models

    async def health(self) -> Health:
        trouble, card = self._feed.trouble(), self._feed.card()
        engines = [{"replica": peer.peer_id, "state": peer.health, "reason": peer.reason} for peer in self._feed.peers]
        details = {"engines": engines, "model": dict(card.info) if card else None}
        return Health(healthy=trouble is None, ready=trouble is None, reason=trouble or "", details=details)

    async def metrics(self) -> bytes:
        return await self._scrape()

    def _serve(self, card: EngineCard) -> ServedModel:
        limits = ModelLimits(
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            max_kv_tokens=card.num_blocks * card.block_size,
        )
        return ServedModel(
            name=self._name,
            created=int(time.time()),
            limits=limits,
            tokenizer=self._tokenizer,
            preprocessor=Preprocessor(self._tokenizer, limits, self._defaults, seed=self._seed),
        )


def http_app(feed: FeedDoor, scrape: Callable[[], Awaitable[bytes]], args: ServingArgs) -> Any:
    """The OpenAI-compatible app around the feed of this process."""
    config = HttpConfig(api_keys=args.api_keys, cors_origins=args.cors_origins, max_body_bytes=args.max_body_bytes)
    return build_app(HttpDoor(feed, scrape, args), config)
