"""``nanoserve batch``: OpenAI batch files through Ray Data, on a Ray of its own."""

import argparse
import time
from pathlib import Path

from nanoserve.cli.engine_flags import add_engine_flags, engine_settings
from nanoserve.core.errors import ConfigError

_OBJECT_STORE_BYTES = 256 * 2**20
_QUIET = {"RAY_BACKEND_LOG_LEVEL": "fatal"}
"""Ray's native code warns on the terminal that an actor's arguments are kept elsewhere, which is as it should be."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help='a folder, a hub id or "demo"')
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE", help=".jsonl or .parquet")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="what it holds is not redone")
    parser.add_argument("--replicas", dest="concurrency", type=int, default=1, metavar="N", help="engines (default: 1)")
    parser.add_argument("--served-model-name", metavar="NAME", help="the name that requests use (default: MODEL)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="lines that are written together")
    parser.add_argument("--no-progress", dest="bar", action="store_false", help="no progress bar")
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """A run that was ended, however, goes on where it was when it is started again."""
    from nanoserve.data.config import EngineConfig
    from nanoserve.model.folder import resolve_model
    from nanoserve.serving.private_ray import PrivateRay

    settings = {name: value for name, value in engine_settings(options).items() if name != "model"}
    if options.served_model_name:
        settings["served_model_name"] = options.served_model_name
    config = EngineConfig(
        model_source=options.model,
        engine_kwargs=settings,
        concurrency=options.concurrency,
        batch_size=options.batch_size,
        max_concurrent_batches=_batches_for(settings.get("max_num_seqs", 64), options.batch_size),
    )
    resolve_model(options.model)
    if not options.input.is_file():
        raise ConfigError(f"{options.input} is no file.", param="input")
    ray, began_s = PrivateRay(), time.monotonic()
    try:
        ray.start(object_store_bytes=_OBJECT_STORE_BYTES, environment=_QUIET)
        from nanoserve.data.batch import run_batch  # imports Ray, which reads its environment once

        summary = run_batch(options.input, options.output, config, bar=options.bar)
    finally:
        ray.end()
    print(
        f"{summary.num_lines} lines: {summary.num_known} were answered before, {summary.num_errors} errors, "
        f"{summary.num_tokens} tokens in {time.monotonic() - began_s:.1f} s. Answers: {options.output}"
    )
    return 0


def _batches_for(max_num_seqs: int, batch_size: int) -> int:
    """Enough rows at work to keep the engine full while the rows of a batch end one by one."""
    return max(2, -(-3 * max_num_seqs // batch_size))
