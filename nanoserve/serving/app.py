"""``build``: typed arguments in, a Serve application out.

Deployments: ``Router`` (the ingress), and ``Engine``, or ``Engine:<model>`` where there are several models.
"""

import os
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from nanoserve.serving.config import ModelArgs, ServingArgs, deployment_name
from nanoserve.serving.replica import EngineFactory, EngineReplica, load_engine
from nanoserve.serving.router import MakeApp, Router

ENGINE_CPUS = 0.1
"""What Ray reserves for an engine on a CPU; small, so that any number fits a laptop. Threads are set by the engine."""

ROUTER_CPUS = 0.1

ROUTER_END_S = 20.0
"""A stopping router ends its streams itself after ``drain_s``; this much later Serve would."""

QUEUED_STEPS = 4
"""Steps of waiting prompt tokens for each engine, beyond which another one is called for."""


def build(args: ServingArgs) -> Application:
    """The Serve builder: ``import_path: nanoserve.serving:build``.

    The API key may come from the environment (``NANOSERVE_API_KEY``), as a Kubernetes secret gives it.

    Raises:
        ConfigError: an argument is wrong.
    """
    from nanoserve.serving.http_door import http_app

    if (key := os.environ.get("NANOSERVE_API_KEY")) and not args.api_keys:
        args = args.model_copy(update={"api_keys": (key,)})
    return assemble(args, load_engine, http_app)


def assemble(args: ServingArgs, make_engine: EngineFactory, make_app: MakeApp) -> Application:
    """The application from its two changeable parts: what makes an engine, and what makes the HTTP app."""
    router = serve.deployment(serve.ingress()(Router), name="Router").options(
        num_replicas=args.num_routers,
        max_ongoing_requests=10 * args.max_open_requests,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=args.drain_s + ROUTER_END_S,
        ray_actor_options={"num_cpus": ROUTER_CPUS},
    )
    num_siblings = sum(model.max_replicas or model.num_replicas for model in args.served)
    engines = {
        model.name: _engine(deployment_name(args, model), model, args).bind(
            model.engine, make_engine, num_siblings, args.door_grace_s
        )
        for model in args.served
    }
    return router.bind(args, engines, make_app)


def _engine(name: str, model: ModelArgs, args: ServingArgs) -> Any:
    return serve.deployment(EngineReplica, name=name).options(
        # Leases only; the doors bound the requests.
        max_ongoing_requests=100_000,
        request_router_config=RequestRouterConfig(
            request_router_class="nanoserve.serving.engine_router.EngineRouter",
            request_router_kwargs={"deployment": name},
        ),
        health_check_period_s=1.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=args.drain_s,
        max_constructor_retry_count=3,
        ray_actor_options=_engine_resources(model),
        **_scale(model),
    )


def _scale(args: ModelArgs) -> dict[str, Any]:
    if args.min_replicas is None or args.max_replicas is None:
        return {"num_replicas": args.num_replicas}
    policy = AutoscalingPolicy(
        policy_function="nanoserve.serving.autoscaling:BySignals",
        policy_kwargs={
            "requests_per_replica": args.engine.max_num_seqs,
            "queued_tokens_per_replica": QUEUED_STEPS * args.engine.max_num_batched_tokens,
            "ttft_goal_s": args.ttft_goal_s,
        },
    )
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=args.min_replicas,
            initial_replicas=max(1, args.min_replicas),
            max_replicas=args.max_replicas,
            metrics_interval_s=1.0,
            look_back_period_s=5.0,
            upscale_delay_s=args.upscale_delay_s,
            downscale_delay_s=args.downscale_delay_s,
            policy=policy,
        )
    }


def _engine_resources(args: ModelArgs) -> dict[str, Any]:
    num_cpus = ENGINE_CPUS if args.num_cpus is None else args.num_cpus
    num_gpus = args.num_gpus if args.num_gpus is not None else float(args.engine.device == "cuda")
    return {"num_cpus": num_cpus, "num_gpus": num_gpus}
