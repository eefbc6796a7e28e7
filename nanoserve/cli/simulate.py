"""``nanoserve simulate``: a log of arrivals through the real scheduler and router, in virtual time."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from nanoserve.core.config import SchedulerConfig
from nanoserve.core.errors import ConfigError
from nanoserve.observe.simulate import CostModel, DoorChooser, Fleet, report
from nanoserve.observe.trace import Arrival, Chats, read_log

_COST, _CHATS, _LIMITS = CostModel(), Chats(), SchedulerConfig(num_blocks=6000, max_model_len=32768)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help='JSON lines of arrivals (see README), or "chats": made up')
    parser.add_argument("--replicas", type=int, default=4, metavar="N", help="engines (default: 4)")
    parser.add_argument("--sessions", action="store_true", help="route by session as with the header x-session-id")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the figures as JSON")
    group = parser.add_argument_group("chats")
    group.add_argument("--requests", type=int, default=_CHATS.num_requests, metavar="N")
    group.add_argument("--rate", type=float, default=_CHATS.requests_per_s, metavar="R", help="requests a second")
    group.add_argument("--seed", type=int, default=0, metavar="N")
    group = parser.add_argument_group("engine")
    for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
        default = getattr(_LIMITS, name)
        group.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N", help=f"({default})")
    group = parser.add_argument_group("cost of a step")
    group.add_argument("--step-ms", type=float, default=1e3 * _COST.step_s, metavar="MS", help="whatever it holds")
    default_us = 1e6 * _COST.prefill_token_s
    group.add_argument("--prefill-us", type=float, default=default_us, metavar="US", help="a prompt token")
    group.add_argument("--decode-us", type=float, default=1e6 * _COST.decode_s, metavar="US", help="a running request")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    _check(options)
    config = SchedulerConfig(
        num_blocks=options.num_blocks,
        block_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
    )
    cost = CostModel(
        step_s=options.step_ms / 1e3, prefill_token_s=options.prefill_us / 1e6, decode_s=options.decode_us / 1e6
    )
    fleet = Fleet(options.replicas, config, cost, DoorChooser(sessions=options.sessions))
    fleet.play(_arrivals(options))
    figures = report(fleet)
    if not figures["requests"]:
        raise ConfigError("None of the trace's requests could be served; see --max-model-len and --num-blocks.")
    print("\n".join(f"{name:<20}{value:>14.4g}" for name, value in figures.items()))
    if options.output:
        options.output.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _check(options: argparse.Namespace) -> None:
    for name in ("replicas", "requests"):
        if getattr(options, name) < 1:
            raise ConfigError(f"`--{name}` must be >= 1. Given: {getattr(options, name)}.")
    if not options.rate > 0:
        raise ConfigError(f"`--rate` must be > 0. Given: {options.rate}.")
    for name in ("step_ms", "prefill_us", "decode_us"):
        if not 0 <= getattr(options, name) < 1e9:
            raise ConfigError(f"`--{name.replace('_', '-')}` must be >= 0. Given: {getattr(options, name)}.")
    if not options.step_ms + min(options.prefill_us, options.decode_us) > 0:
        raise ConfigError("A step must take time: set --step-ms, or both --prefill-us and --decode-us, above 0.")
    if options.output and not options.output.parent.is_dir():
        raise ConfigError(f"There is no folder for --output {options.output}.")


def _arrivals(options: argparse.Namespace) -> Iterable[Arrival]:
    if options.trace != "chats":
        return read_log(Path(options.trace))
    return Chats(num_requests=options.requests, requests_per_s=options.rate, seed=options.seed).arrivals()
