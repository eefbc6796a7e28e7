"""Keys: whose a request is, what it may use, and what it hears when that is used up."""

import argparse
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from nanoserve.cli.serve import api_key
from nanoserve.core.errors import ConfigError, QueueFullError
from nanoserve.protocol.errors import QuotaError
from nanoserve.serving.backstage import Backstage
from nanoserve.serving.callers import deadline
from nanoserve.serving.config import ApiKey, ServingArgs
from nanoserve.serving.door import ServedModel
from nanoserve.serving.http import HttpConfig, build_app
from nanoserve.serving.metrics import render
from nanoserve.serving.quotas import Bucket, Quota
from nanoserve.serving.usage import MAX_TENANTS, Usage
from tests.serving.conftest import ClientFor
from tests.serving.replies import refused
from tests.serving.scripted_door import ScriptedDoor


def key(name: str, **settings: object) -> ApiKey:
    return ApiKey(key=SecretStr(name), **settings)  # type: ignore[arg-type]


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 3}


# Quotas


@given(
    st.integers(1, 100),
    st.integers(1, 4),
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 3)), max_size=60),
)
def test_routers_together_never_grant_more_than_the_whole(
    per_minute: int, num_routers: int, asks: list[tuple[float, int]]
) -> None:
    """Over any time: at most the rate, the burst, and one that a small part is rounded up to at each router."""
    now_s = [0.0]
    quotas = [
        Quota(key("k", requests_per_minute=per_minute), num_routers, lambda: now_s[0]) for _ in range(num_routers)
    ]
    num_granted, waits_s = 0, list[float]()
    for pause_s, router in asks:
        now_s[0] += pause_s
        try:
            quotas[router % num_routers].enter()
            num_granted += 1
        except QuotaError as error:
            waits_s.append(error.retry_after_s)
    assert all(0 < wait_s <= 60 * num_routers / per_minute for wait_s in waits_s)
    assert num_granted <= per_minute * (1 + now_s[0] / 60) + num_routers


def test_after_retry_after_there_is_room() -> None:
    now_s = [0.0]
    quota = Quota(key("k", requests_per_minute=6), 1, lambda: now_s[0])
    for _ in range(6):
        quota.enter()
    with pytest.raises(QuotaError) as caught:
        quota.enter()
    now_s[0] += caught.value.retry_after_s
    quota.enter()


def test_answers_are_paid_for_afterwards_and_a_prompt_beyond_the_quota_goes_when_nothing_is_used() -> None:
    now_s = [0.0]
    quota = Quota(key("k", tokens_per_minute=60), 1, lambda: now_s[0])
    quota.reserve(50)
    quota.spend(40)
    with pytest.raises(QuotaError) as caught:
        quota.enter()
    assert caught.value.retry_after_s == pytest.approx(31)
    now_s[0] += 90
    quota.enter()
    quota.reserve(1000)
    with pytest.raises(QuotaError):
        quota.reserve(1)


def test_headers_count_down() -> None:
    quota = Quota(key("k", requests_per_minute=120, tokens_per_minute=6000), 1, lambda: 0.0)
    quota.enter()
    quota.spend(300)
    assert dict(quota.headers()) == {
        b"x-ratelimit-limit-requests": b"120",
        b"x-ratelimit-remaining-requests": b"119",
        b"x-ratelimit-reset-requests": b"500ms",
        b"x-ratelimit-limit-tokens": b"6000",
        b"x-ratelimit-remaining-tokens": b"5700",
        b"x-ratelimit-reset-tokens": b"3s",
    }


def test_a_bucket_does_not_save_up_more_than_a_minute() -> None:
    now_s = [0.0]
    bucket = Bucket(30, lambda: now_s[0])
    now_s[0] = 1e6
    assert bucket.credit() == 30


# Through HTTP


async def test_a_key_beyond_its_quota_hears_429_when_to_come_back_and_others_go_on(
    client_for: ClientFor, served: ServedModel
) -> None:
    config = HttpConfig(api_keys=(key("small", requests_per_minute=2), "free"))
    async with client_for(ScriptedDoor([served], token_ids=[65, 66]), config) as client:
        body = BODY | {"model": served.name}
        fine = await client.post("/v1/completions", json=body, headers=bearer("small"))
        assert (fine.status_code, fine.headers["x-ratelimit-remaining-requests"]) == (200, "1")
        await client.post("/v1/completions", json=body, headers=bearer("small"))
        late = await client.post("/v1/completions", json=body, headers=bearer("small"))
        error = refused(late, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert 1 <= int(late.headers["retry-after"]) <= 30
        assert late.headers["x-ratelimit-remaining-requests"] == "0"
        assert late.headers["x-request-id"]
        other = await client.post("/v1/completions", json=body, headers=bearer("free"))
        assert other.status_code == 200
        assert "x-ratelimit-limit-requests" not in other.headers
        assert (await client.get("/v1/models", headers=bearer("small"))).status_code == 200


async def test_open_requests_are_counted_until_their_answer_ends(client_for: ClientFor, served: ServedModel) -> None:
    config = HttpConfig(api_keys=(key("k", max_concurrent_requests=1),))
    async with client_for(ScriptedDoor([served], token_ids=[65]), config) as client:
        for _ in range(3):
            reply = await client.post("/v1/completions", json=BODY | {"model": served.name}, headers=bearer("k"))
            assert reply.status_code == 200


async def test_choices_pay_for_their_prompt_once_and_a_refused_prompt_is_given_back(
    client_for: ClientFor, served: ServedModel
) -> None:
    config = HttpConfig(api_keys=(key("k", tokens_per_minute=100),))
    door = ScriptedDoor([served], token_ids=[65, 66])
    async with client_for(door, config) as client:
        reply = await client.post("/v1/completions", json=BODY | {"model": served.name, "n": 3}, headers=bearer("k"))
        assert reply.status_code == 200
        door.refusal = QueueFullError("Full.", retry_after_s=3)
        full = await client.post("/v1/completions", json=BODY | {"model": served.name}, headers=bearer("k"))
        assert full.status_code == 429
        assert full.headers["retry-after"] == "3"
        assert int(full.headers["x-ratelimit-remaining-tokens"]) == 100 - 4 - 3 * 2


async def test_a_request_carries_its_tenant_and_cannot_better_its_class(
    client_for: ClientFor, served: ServedModel
) -> None:
    keys = (key("a", tenant="acme", weight=2, service_class="batch"), "plain")
    door = ScriptedDoor([served], token_ids=[65])
    async with client_for(door, HttpConfig(api_keys=keys)) as client:
        body = BODY | {"model": served.name, "priority": -5, "cache_salt": "s"}
        for name in ("a", "plain"):
            await client.post("/v1/completions", json=body, headers=bearer(name))
    acme, plain = door.opened
    assert (acme.tenant, acme.weight, acme.priority, acme.cache_salt) == ("acme", 2, 100, "acme\0s")
    assert (plain.tenant, plain.weight, plain.priority, plain.cache_salt) == ("key-2", 1, 0, "s")


async def test_a_deadline_comes_from_the_body_or_a_header_and_the_server_has_the_last_word(
    client_for: ClientFor, served: ServedModel
) -> None:
    door = ScriptedDoor([served], token_ids=[65])
    async with client_for(door, HttpConfig(max_request_s=50)) as client:
        body = BODY | {"model": served.name}
        await client.post("/v1/completions", json=body | {"timeout_s": 5})
        await client.post("/v1/completions", json=body, headers={"x-request-timeout-s": "7"})
        await client.post("/v1/completions", json=body | {"timeout_s": 500})
        await client.post("/v1/completions", json=body)
        left = [(request.deadline_s or 0) - time.time() for request in door.opened]
        assert left == [pytest.approx(s, abs=2) for s in (5, 7, 50, 50)]
        refused(await client.post("/v1/completions", json=body | {"timeout_s": 0}), 400, "timeout_s")
        refused(await client.post("/v1/completions", json=body, headers={"x-request-timeout-s": "soon"}), 400)
    assert deadline(None, None, 5.0) is None


async def test_a_tenants_use_is_counted(client_for: ClientFor, served: ServedModel) -> None:
    usage = Usage("r1")
    config = HttpConfig(api_keys=(key("a", tenant="acme", requests_per_minute=1),))
    transport = httpx.ASGITransport(
        build_app(ScriptedDoor([served], token_ids=[65, 66]), config, Backstage(usage=usage))
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for _ in range(2):
            await client.post("/v1/completions", json=BODY | {"model": served.name}, headers=bearer("a"))
    text = render(usage.families()).decode()
    found = {
        sample.name.removeprefix("nanoserve_tenant_"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["tenant"] == "acme" and "bucket" not in sample.name and "created" not in sample.name
    }
    assert found["requests_total"] == 1
    assert found["prompt_tokens_total"] == 4
    assert found["generation_tokens_total"] == 2
    assert found["refused_total"] == 1
    assert found["requests_open"] == 0
    assert found["time_to_first_token_seconds_count"] == 1


def test_the_labels_of_tenants_are_bounded() -> None:
    usage = Usage("r1")
    for number in range(3 * MAX_TENANTS):
        usage.opened(f"tenant{number}", "m", 1)
    text = render(usage.families()).decode()
    assert text.count("nanoserve_tenant_requests_total{") == MAX_TENANTS + 1
    assert f'nanoserve_tenant_requests_total{{model="m",router="r1",tenant="other"}} {2 * MAX_TENANTS}.0' in text


# Settings


def test_a_key_is_written_with_its_settings_on_the_command_line() -> None:
    assert api_key("k-1") == "k-1"
    given = api_key("k-1,tenant=acme,weight=2,rpm=60,tpm=1000,concurrent=4,class=batch")
    (parsed,) = ServingArgs.model_validate({"api_keys": [given]}).api_keys
    assert parsed == key(
        "k-1", tenant="acme", weight=2, requests_per_minute=60, tokens_per_minute=1000, max_concurrent_requests=4,
        service_class="batch",
    )  # fmt: skip
    with pytest.raises(argparse.ArgumentTypeError, match="rpm"):
        api_key("k-1,speed=9")


@pytest.mark.parametrize(
    "settings",
    [
        {"key": "s3cret", "weight": 0},
        {"key": "s3cret", "weigth": 1},
        {"key": "s3cret", "requests_per_minute": 0},
        {"key": "s3cret", "key_env": "NAME"},
        {"key": "s3cret", "tenant": "a b"},
        {"key": ["s3cret"]},
        {"key": "s3cret", "max_concurrent_requests": 1},
    ],
)
def test_a_wrong_setting_is_one_sentence_without_the_key(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServingArgs.model_validate({"api_keys": [settings], "num_routers": 2})
    assert "s3cret" not in caught.value.message
    assert "s3cret" not in repr(ServingArgs.model_validate({"api_keys": ["s3cret", {"key": "s3cret"}]}))


def test_a_key_may_come_from_the_environment() -> None:
    named = ApiKey(key_env="ACME_KEY", tenant="acme")
    assert named.resolved({"ACME_KEY": "x"}).key.get_secret_value() == "x"
    with pytest.raises(ConfigError, match="ACME_KEY"):
        named.resolved({})
