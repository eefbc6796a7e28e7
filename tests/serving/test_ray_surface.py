"""What we lean on in Ray Serve, by name and signature: a new Ray that changes it is found here and not by users.

Nothing private is imported. What is not promised by Ray: the classes of ``ray.serve.request_router`` (alpha), the
environment variables that place HAProxy's files and ports, and the lines of its configuration that we correct.
"""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanoserve.serving import launch, proxy
from nanoserve.serving.autoscaling import BySignals
from nanoserve.serving.engine_router import EngineRouter

SERVE_FOLDER = Path(inspect.getfile(serve)).parent


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_tested_minor_version() -> None:
    assert ray.__version__.startswith("2.60.")


def test_a_request_router_hears_of_replicas_and_chooses() -> None:
    assert parameters(RequestRouter.update_replicas) == ["self", "replicas"]
    assert parameters(RequestRouter.choose_replicas) == ["self", "candidate_replicas", "pending_request"]
    assert inspect.iscoroutinefunction(RequestRouter.choose_replicas)
    assert "kwargs" in parameters(RequestRouter.initialize_state)
    assert parameters(EngineRouter.choose_replicas) == parameters(RequestRouter.choose_replicas)
    assert parameters(EngineRouter.update_replicas) == parameters(RequestRouter.update_replicas)
    assert {"kwargs", "future"} <= set(PendingRequest.__dataclass_fields__)
    assert isinstance(RunningReplica.replica_id, property)
    assert "unique_id" in ReplicaID.__dataclass_fields__


def test_handles_can_stream_pin_cancel_and_broadcast() -> None:
    options = parameters(DeploymentHandle.options)
    assert {"stream", "request_serialization", "response_serialization"} <= set(options) or "kwargs" in options
    assert parameters(DeploymentResponseGenerator.cancel) == ["self"]
    assert parameters(DeploymentHandle.broadcast)[:2] == ["self", "method_name"]
    assert inspect.iscoroutinefunction(DeploymentBroadcastResponse.results_async)
    assert issubclass(DeploymentUnavailableError, Exception)


def test_deployments_take_what_app_gives_them() -> None:
    taken = set(parameters(serve.deployment))
    assert {
        "name",
        "num_replicas",
        "max_ongoing_requests",
        "request_router_config",
        "health_check_period_s",
        "health_check_timeout_s",
        "graceful_shutdown_wait_loop_s",
        "graceful_shutdown_timeout_s",
        "max_constructor_retry_count",
        "ray_actor_options",
        "autoscaling_config",
    } <= taken
    assert "request_router_class" in RequestRouterConfig.model_fields
    policy = AutoscalingPolicy(
        policy_function="nanoserve.serving.autoscaling:BySignals", policy_kwargs={"requests_per_replica": 4}
    )
    assert AutoscalingConfig(min_replicas=1, max_replicas=3, policy=policy).max_replicas == 3
    assert policy.get_policy().__name__ == "BySignals"


def test_an_app_may_be_bound_late() -> None:
    class Late:
        async def __serve_build_asgi_app__(self) -> Any: ...

    assert serve.ingress()(Late)
    with pytest.raises(Exception, match="__serve_build_asgi_app__"):
        serve.ingress()(object)


def test_the_launch_finds_its_ways_in() -> None:
    assert {"targets", "wait_for_ingress_deployment_creation", "wait_for_applications_running"} <= set(
        parameters(serve.run_many)
    )
    assert {"name", "route_prefix"} <= set(parameters(serve.RunTarget))
    assert {"http_options"} <= set(parameters(serve.start))
    assert {"include_dashboard", "log_to_driver", "object_store_memory"} <= set(parameters(ray.init))
    assert "_temp_dir" in inspect.getsource(ray.init)


def test_every_environment_variable_is_still_read(tmp_path: Path) -> None:
    sources = [path.read_text() for path in (SERVE_FOLDER / "_private").glob("constants*.py")]
    chosen = proxy.Proxy("HAProxy", "found", "/bin/true").environment(tmp_path)
    names = {name for name in {**launch._ENVIRONMENT, **chosen} if name.startswith("RAY_SERVE_")}
    assert len(names) >= 10
    assert [name for name in sorted(names) if not any(f'"{name}"' in source for source in sources)] == []


def test_serve_itself_returns_the_request_id() -> None:
    assert 'headers.append("X-Request-ID", request_id)' in (SERVE_FOLDER / "_private" / "http_util.py").read_text()


def test_haproxys_file_has_the_lines_that_we_correct() -> None:
    template = (SERVE_FOLDER / "_private" / "haproxy_templates.py").read_text()
    assert re.search(r"^ +bind :\{\{ config\.metrics_port \}\}$", template, re.MULTILINE)
    assert re.search(r"^ +bind \*:\{\{ config\.stats_port \}\}$", template, re.MULTILINE)
    assert len(re.findall(r"^ +errorfile 50[234] ", template, re.MULTILINE)) == 3
    binds = re.findall(r"^ +bind (\S+)", template, re.MULTILINE)
    assert len(binds) == 4, "a new listener: is it on the loopback?"


def decide(num_now: int, *, low: int = 1, ttft_goal_s: float | None = None, **signals: float) -> int:
    """The policy's word on four engines at most, each of them with these signals."""

    class Context:
        aggregated_metrics = {  # noqa: RUF012
            name: {str(i): value for i in range(num_now)} for name, value in signals.items()
        }
        current_num_replicas = num_now
        capacity_adjusted_min_replicas = low
        capacity_adjusted_max_replicas = 4

    policy = BySignals(requests_per_replica=4, queued_tokens_per_replica=1000, ttft_goal_s=ttft_goal_s)
    return policy(Context())[0]


def test_the_policy_follows_the_most_demanding_signal() -> None:
    assert decide(1, running=4.0, waiting=5.0) == 3
    assert decide(1, running=40.0) == 4
    assert decide(1, running=1.0, waiting=1.0, waiting_tokens=1500.0) == 2
    assert decide(1, running=1.0, waiting=1.0, kv_usage=1.0) == 2
    assert decide(1, running=1.0, kv_usage=1.0) == 1, "a full pool without a queue is a good pool"
    assert decide(2, running=1.0, waiting=1.0, queue_s=3.0, ttft_goal_s=2.0) == 3
    assert decide(2, running=1.0, waiting=1.0, queue_s=3.0) == 2


def test_the_policy_lets_engines_go_with_a_margin() -> None:
    assert decide(3, running=2.4) == 3, "two engines would carry 7.2 requests, but hardly"
    assert decide(3, running=1.8) == 2
    assert decide(3) == 1
    assert decide(1, low=0) == 0
    assert decide(1, low=0, running=1.0) == 1
