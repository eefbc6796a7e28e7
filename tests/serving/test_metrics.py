"""One scrape shows every engine and every router."""

from prometheus_client.parser import text_string_to_metric_families

from nanoserve.core.outputs import StepStats
from nanoserve.serving.feed import Peer
from nanoserve.serving.metrics import Metrics, render


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found[(sample.name, *sample.labels.values())] = sample.value
    return found


def test_engines_are_shown_by_replica() -> None:
    metrics = Metrics("r1")
    peers = [Peer("e1", 0.0), Peer("e2", 0.0)]
    peers[0].stats = StepStats(num_running=3, num_blocks=10, num_free_blocks=4, num_generated_tokens_total=70)
    peers[1].stats = StepStats(num_preemptions_total=2)
    metrics.step("e1", StepStats(schedule_s=0.001, execute_s=0.01, update_s=0.001))
    found = samples(render(metrics.engine_families(peers)))
    assert found["nanoserve_requests_running", "e1"] == 3
    assert found["nanoserve_kv_blocks_free", "e1"] == 4
    assert found["nanoserve_generation_tokens_total", "e1"] == 70
    assert found["nanoserve_preemptions_total", "e2"] == 2
    assert found["nanoserve_step_seconds_count", "e1"] == 1
    assert found["nanoserve_step_seconds_sum", "e1"] == 0.012


def test_the_families_of_several_routers_become_one() -> None:
    first, second = Metrics("r1"), Metrics("r2")
    first.first_token(0.02)
    first.next_tokens(0.01)
    first.finished("stop", 1.0)
    second.finished("abort", 2.0)
    second.resubmitted()
    text = render([*first.door_families(2), *second.door_families(5)])
    assert text.count(b"# TYPE nanoserve_time_to_first_token_seconds histogram") == 1
    found = samples(text)
    assert found["nanoserve_door_requests_open", "r1"] == 2
    assert found["nanoserve_door_requests_open", "r2"] == 5
    assert found["nanoserve_time_to_first_token_seconds_count", "r1"] == 1
    assert found["nanoserve_time_to_first_token_seconds_count", "r2"] == 0
    assert found["nanoserve_door_requests_total", "stop", "r1"] == 1
    assert found["nanoserve_door_requests_total", "abort", "r2"] == 1
    assert found["nanoserve_door_resubmits_total", "r2"] == 1
