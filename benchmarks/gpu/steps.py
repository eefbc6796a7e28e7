"""One step of a run: ``python -m benchmarks.gpu.steps NAME`` prints its figures as JSON on the last line."""

import json
import logging
import sys
from importlib import import_module

LIMITS_S = {
    "ceilings": 40,
    "kernels": 90,
    "attention": 90,
    "copies": 40,
    "equality": 90,
    "logits": 60,
    "start": 60,
    "engine_0.6b": 90,
    "engine_0.6b_eager": 90,
    "transformers_0.6b": 120,
    "latency_0.6b": 60,
    "engine_8b": 120,
}
"""Every step and the seconds that it may take, in the order of a run: what later figures are judged by comes first."""

_WHERE = {
    "ceilings": "speeds:ceilings",
    "kernels": "checks:kernels",
    "attention": "speeds:attention",
    "copies": "speeds:copies",
    "equality": "engines:equality",
    "logits": "engines:logits",
    "start": "engines:start",
    "engine_0.6b": "engines:engine_small",
    "engine_0.6b_eager": "engines:engine_small_eager",
    "transformers_0.6b": "engines:transformers_small",
    "latency_0.6b": "engines:latency_small",
    "engine_8b": "engines:engine_large",
}


def main() -> None:
    """Runs the named step. Whatever it logs goes to the standard error."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    module, function = _WHERE[sys.argv[1]].split(":")
    figures = getattr(import_module(f"benchmarks.gpu.{module}"), function)()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
