"""Dashboard and alerts against what the service really shows, with Prometheus's own tools where they are installed."""

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from nanoserve.core.outputs import StepStats
from nanoserve.serving.feed import Peer
from nanoserve.serving.metrics import Metrics, render
from nanoserve.serving.step_totals import StepMeter
from tests.k8s.strict import K8S
from tests.serving.service import Service, answer, free_port

FOLDER = K8S / "monitoring"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def shown_text() -> str:
    metrics = Metrics("r", "m")
    meter, peer = StepMeter(), Peer("e", 0.0)
    meter.add(StepStats(step_id=1))
    peer.totals = meter.totals()
    metrics.finished("stop", 1.0)
    metrics.resubmitted()
    return render([*metrics.engine_families([peer]), *metrics.door_families(1)]).decode()


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return found


def queries() -> list[str]:
    """The dashboard's, with Grafana's variables as Grafana fills them in."""
    filled = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [text.replace("$__rate_interval", "1m").replace("$model", ".*") for text in filled]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_every_name_that_is_asked_for_is_shown() -> None:
    shown = set(re.findall(r"^(nanoserve_\w+)", shown_text(), re.MULTILINE))
    for text in [*queries(), *[rule["expr"] for rule in rules()]]:
        asked = set(re.findall(r"nanoserve_\w+", text))
        assert asked <= shown, asked - shown
    labels = set(re.findall(r'(\w+)="', shown_text())) | {"job", "instance"}
    for text in queries():
        used = set(re.findall(r'(\w+)=~?"', text)) | {
            name for group in re.findall(r"by \(([^)]*)\)", text) for name in re.split(r",\s*", group)
        }
        assert used <= labels, used - labels


def test_the_dashboards_panels_are_apart_and_numbered() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert variables == {"source", "model"}


@needs_promtool
@pytest.mark.parametrize(
    "words",
    [("check", "rules", "alerts.yaml"), ("check", "config", "prometheus.yaml"), ("test", "rules", "alerts.test.yaml")],
)
def test_promtool_agrees(words: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *words], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_finds_nothing_to_say_about_the_metrics() -> None:
    done = subprocess.run(["promtool", "check", "metrics"], input=shown_text(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_alert_is_tested() -> None:
    tests = yaml.safe_load((FOLDER / "alerts.test.yaml").read_text())["tests"]
    told = {case["alertname"] for test in tests for case in test["alert_rule_test"]}
    assert told == {rule["alert"] for rule in rules()}


# A real Prometheus


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    running = Service(tmp_path, proxy="auto", num_routers=2, num_replicas=2)
    yield running
    running.make_sure_it_is_gone()


@pytest.fixture
def prometheus(service: Service, tmp_path: Path) -> Iterator[str]:
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{service.port}"]}]
    shutil.copy(FOLDER / "alerts.yaml", tmp_path)
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    port = free_port()
    process = subprocess.Popen(
        ["prometheus", "--config.file", "prometheus.yaml", "--storage.tsdb.path", str(tmp_path / "data"),
         "--web.listen-address", f"127.0.0.1:{port}"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield f"http://127.0.0.1:{port}/api/v1"
    process.terminate()
    process.wait(10)


def results(url: str, query: str) -> list[Any]:
    reply = httpx.get(f"{url}/query", params={"query": query}, timeout=10).json()
    assert reply["status"] == "success", reply
    found: list[Any] = reply["data"]["result"]
    return found


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_real_prometheus_reads_a_live_service(service: Service, prometheus: str) -> None:
    service.wait_for("Ready")
    for round_ in range(8):
        asyncio.run(ask_four(service.url, round_))
        time.sleep(1)
    give_up_s = time.monotonic() + 60
    while not results(prometheus, "sum(nanoserve_requests_finished_total) >= 32"):
        assert time.monotonic() < give_up_s
        time.sleep(0.5)
    assert len(results(prometheus, "count by (replica) (nanoserve_kv_blocks)")) == 2
    assert len(results(prometheus, "count by (router) (nanoserve_door_requests_open)")) == 2
    for query in queries():
        assert results(prometheus, query.replace("[1m]", "[20s]")), query
    groups = httpx.get(f"{prometheus}/rules").json()["data"]["groups"]
    states = {rule["name"]: rule["state"] for group in groups for rule in group["rules"]}
    assert states == {rule["alert"]: "inactive" for rule in rules()}


async def ask_four(url: str, round_: int) -> None:
    await asyncio.gather(*[answer(url, seed + 10 * round_, 10) for seed in range(1, 5)])
