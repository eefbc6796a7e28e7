"""One scrape shows every engine and every router."""

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanoserve.core.outputs import StepStats
from nanoserve.serving.feed import Peer
from nanoserve.serving.metrics import Metrics, render
from nanoserve.serving.step_totals import StepMeter

_ORDER = ("model", "router", "replica", "reason", "phase", "le")


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = [sample.labels[name] for name in _ORDER if name in sample.labels]
            found[(sample.name, *labels)] = sample.value
    return found


def test_engines_are_shown_by_model_and_replica() -> None:
    metrics = Metrics("r1", "m")
    peers = [Peer("e1", 0.0), Peer("e2", 0.0)]
    peers[0].stats = StepStats(num_running=3, num_blocks=10, num_free_blocks=4, num_generated_tokens_total=70)
    peers[1].stats = StepStats(num_preemptions_total=2)
    found = samples(render(metrics.engine_families(peers)))
    assert found["nanoserve_requests_running", "m", "e1"] == 3
    assert found["nanoserve_kv_blocks_free", "m", "e1"] == 4
    assert found["nanoserve_generation_tokens_total", "m", "e1"] == 70
    assert found["nanoserve_preemptions_total", "m", "e2"] == 2


def test_steps_are_shown_by_what_they_took_and_held() -> None:
    meter = StepMeter()
    one = StepStats(num_running=3, num_scheduled_tokens=40, schedule_s=0.001, execute_s=0.01, update_s=0.002)
    meter.add(replace(one, step_id=1, queue_times_s=(0.5, 2.0)))
    meter.add(replace(one, step_id=2, num_running=4, num_scheduled_tokens=4))
    meter.add(replace(one, step_id=2))
    peer = Peer("e1", 0.0)
    peer.totals = meter.totals()
    found = samples(render(Metrics("r1", "m").engine_families([peer, Peer("silent", 0.0)])))
    assert found["nanoserve_step_seconds_sum", "m", "e1"] == pytest.approx(0.026)
    assert found["nanoserve_step_requests_sum", "m", "e1"] == 7
    assert found["nanoserve_step_requests_count", "m", "e1"] == 2
    assert found["nanoserve_step_requests_bucket", "m", "e1", "2.0"] == 0
    assert found["nanoserve_step_requests_bucket", "m", "e1", "4.0"] == 2
    assert found["nanoserve_step_tokens_sum", "m", "e1"] == 44
    assert found["nanoserve_queue_seconds_count", "m", "e1"] == 2
    assert found["nanoserve_queue_seconds_sum", "m", "e1"] == 2.5
    assert found["nanoserve_step_phase_seconds_total", "m", "e1", "execute"] == 0.02
    assert found["nanoserve_step_phase_seconds_total", "m", "e1", "update"] == 0.004


def test_steps_are_counted_once_however_many_routers_see_them() -> None:
    """Each router once kept a histogram of every engine's steps, so a sum over routers was too large."""
    meter = StepMeter()
    meter.add(StepStats(step_id=1, num_running=1))
    peer = Peer("e1", 0.0)
    peer.totals = meter.totals()
    first, second = Metrics("r1", "m"), Metrics("r2", "m")
    first.step("e1", StepStats(step_id=1))
    second.step("e1", StepStats(step_id=1))
    text = render([*first.engine_families([peer]), *first.door_families(0), *second.door_families(0)])
    counts = [value for name, value in samples(text).items() if name[0] == "nanoserve_step_seconds_count"]
    assert counts == [1]


def test_the_families_of_several_routers_become_one() -> None:
    first, second = Metrics("r1", "m"), Metrics("r2", "m")
    first.first_token(0.02)
    first.next_tokens(0.01)
    first.paced(0.03)
    first.finished("stop", 1.0)
    second.finished("abort", 2.0)
    second.resubmitted()
    text = render([*first.door_families(2), *second.door_families(5)])
    assert text.count(b"# TYPE nanoserve_time_to_first_token_seconds histogram") == 1
    found = samples(text)
    assert found["nanoserve_door_requests_open", "m", "r1"] == 2
    assert found["nanoserve_door_requests_open", "m", "r2"] == 5
    assert found["nanoserve_time_to_first_token_seconds_count", "m", "r1"] == 1
    assert found["nanoserve_time_to_first_token_seconds_count", "m", "r2"] == 0
    assert found["nanoserve_time_per_output_token_seconds_sum", "m", "r1"] == 0.03
    assert found["nanoserve_door_requests_total", "m", "r1", "stop"] == 1
    assert found["nanoserve_door_requests_total", "m", "r2", "abort"] == 1
    assert found["nanoserve_door_resubmits_total", "m", "r2"] == 1
