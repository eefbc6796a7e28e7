"""Joins the HTTP app to the feeds: the door as ``serving/http.py`` sees it, with each model's text side."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nanoserve.core.errors import CheckpointError, ConfigError
from nanoserve.core.request import GenerateRequest
from nanoserve.model.folder import resolve_model
from nanoserve.serving.backstage import Backstage
from nanoserve.serving.config import ModelArgs, ServingArgs
from nanoserve.serving.door import Health, ServedModel
from nanoserve.serving.feed import FeedDoor, FeedStream
from nanoserve.serving.http import HttpConfig, build_app
from nanoserve.serving.wire import EngineCard
from nanoserve.text.defaults import GenerationDefaults
from nanoserve.text.embedding_recipe import EmbeddingRecipe
from nanoserve.text.pooling import PoolingPreprocessor
from nanoserve.text.preprocess import ModelLimits, Preprocessor
from nanoserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Scrape = Callable[[], Awaitable[bytes]]


class ModelDoor:
    """One model: the feed to its engines, and its text side."""

    def __init__(self, feed: FeedDoor, args: ModelArgs) -> None:
        folder = resolve_model(args.engine.model)
        self.feed = feed
        self._seed = args.engine.seed
        self._name = args.name
        self._tokenizer = Tokenizer.load(folder)
        self._defaults = GenerationDefaults.load(folder, self._tokenizer.eos_token_id)
        self._recipe = EmbeddingRecipe.load(folder)
        self._served: ServedModel | None = None

    def served(self) -> ServedModel | None:
        """The model, from its first engine's hello on."""
        if self._served is None and (card := self.feed.card()) is not None:
            self._served = self._serve(card)
        return self._served

    def details(self) -> dict[str, object]:
        card = self.feed.card()
        engines = [{"replica": peer.peer_id, "state": peer.health, "reason": peer.reason} for peer in self.feed.peers]
        told: dict[str, object] = {"engines": engines, "model": dict(card.info) if card else None}
        if self.feed.last_lost is not None:
            told["last_lost"] = asdict(self.feed.last_lost)
        return told

    def _serve(self, card: EngineCard) -> ServedModel:
        limits = ModelLimits(
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            max_kv_tokens=card.num_blocks * card.block_size,
        )
        tasks: Sequence[str] = card.info["tasks"]
        return ServedModel(
            name=self._name,
            created=int(time.time()),
            limits=limits,
            tokenizer=self._tokenizer,
            preprocessor=Preprocessor(
                self._tokenizer, limits, self._defaults, seed=self._seed, generates="generate" in tasks
            ),
            pooling=PoolingPreprocessor(
                self._tokenizer, limits, tasks=tasks, vector_size=card.info["hidden_size"], recipe=self._recipe
            ),
        )


class HttpDoor:
    """``door.Door`` over the feeds of one or several models, by the model's name. One that is broken stops no other."""

    def __init__(self, models: Mapping[str, ModelDoor], scrape: Scrape) -> None:
        self._models = models
        self._scrape = scrape

    async def open(self, request: GenerateRequest, model: str) -> FeedStream:
        return await self._models[model].feed.open(request)

    def models(self) -> Sequence[ServedModel]:
        return [served for model in self._models.values() if (served := model.served()) is not None]

    async def health(self) -> Health:
        """Well while at least one model can be asked; ``details`` tell of each."""
        troubles = {name: model.feed.trouble() for name, model in self._models.items()}
        fine = None in troubles.values()
        reason = " ".join(trouble for trouble in troubles.values() if trouble)
        return Health(healthy=fine, ready=fine, reason="" if fine else reason, details=self._details(troubles))

    def _details(self, troubles: Mapping[str, str | None]) -> dict[str, object]:
        if len(self._models) == 1:
            return next(iter(self._models.values())).details()
        return {"models": {name: {"trouble": troubles[name]} | self._models[name].details() for name in self._models}}

    async def metrics(self) -> bytes:
        return await self._scrape()


def http_door(feeds: Mapping[str, FeedDoor], scrape: Scrape, args: ServingArgs) -> HttpDoor:
    """Of several models, one whose files cannot be read is left out, with the reason in the log.

    Raises:
        ConfigError, CheckpointError: the only model cannot be read.
    """
    models: dict[str, ModelDoor] = {}
    for model in args.served:
        try:
            models[model.name] = ModelDoor(feeds[model.name], model)
        except (ConfigError, CheckpointError) as error:
            if len(args.served) == 1:
                raise
            logger.error("model left out model=%s reason=%s", model.name, error.message)
    return HttpDoor(models, scrape)


def http_app(feeds: Mapping[str, FeedDoor], backstage: Backstage, args: ServingArgs) -> Any:
    """The OpenAI-compatible app around the feeds of this process."""
    config = HttpConfig(
        returns_request_id=False,
        api_keys=args.api_keys,
        num_routers=args.num_routers,
        max_request_s=args.max_request_s,
        cors_origins=args.cors_origins,
        max_body_bytes=args.max_body_bytes,
    )
    return build_app(http_door(feeds, backstage.scrape, args), config, backstage)
