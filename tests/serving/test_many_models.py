"""Several models behind one address: each has engines of its own, and one that is broken stops no other."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from nanoserve.model.folder import resolve_model
from tests.serving.service import command, free_port

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(240)]

QUESTION = [{"role": "user", "content": "What is 12 + 7?"}]


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A checkpoint whose weights are cut short."""
    folder = tmp_path / "broken"
    shutil.copytree(resolve_model("demo"), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    return folder


@pytest.fixture
def service(tmp_path: Path, broken: Path) -> Iterator[tuple[str, str]]:
    """(url, what it printed until it was ready)."""
    small = {"num_threads": 1, "max_num_seqs": 8, "kv_cache_memory": "32MiB"}
    models = [
        {"model": str(broken), "served_model_name": "team/broken", **small},
        {"model": "demo", "served_model_name": "team/one", "num_replicas": 1, **small},
        {"model": "demo", "served_model_name": "two", "min_replicas": 1, "max_replicas": 2, **small},
    ]
    port = free_port()
    app = {"import_path": "nanoserve.serving:build", "args": {"models": models}}
    config = tmp_path / "serve.yaml"
    config.write_text(yaml.safe_dump({"http_options": {"port": port}, "applications": [app]}))
    process = subprocess.Popen(
        command("serve", "--config", str(config)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "Ready" in line:
            break
    yield f"http://127.0.0.1:{port}", said
    process.terminate()
    process.communicate(timeout=90)


def test_the_others_serve(service: tuple[str, str], broken: Path) -> None:
    url, said = service
    assert "Ready" in said, said
    assert "team-broken is not served: model.safetensors" in said
    assert "Traceback" not in said
    with httpx.Client(base_url=url, timeout=60) as client:
        served = {model["id"] for model in client.get("/v1/models").json()["data"]}
        assert served == {"team/one", "two"}
        assert client.get("/v1/models/team/one").json()["id"] == "team/one"
        for name in sorted(served):
            body = {"model": name, "messages": QUESTION, "temperature": 0}
            reply = client.post("/v1/chat/completions", json=body).json()
            assert reply["choices"][0]["message"]["content"] == "12 + 7 = 19"
            assert reply["model"] == name
        refusal = client.post("/v1/chat/completions", json={"model": "team/broken", "messages": QUESTION})
        assert refusal.status_code == 404
        assert "team/one, two" in refusal.json()["error"]["message"]
        health = client.get("/health")
        assert health.status_code == 200
        troubles = {name: model["trouble"] for name, model in health.json()["models"].items()}
        assert troubles["team/one"] is None
        assert troubles["two"] is None
        assert troubles["team/broken"]
        metrics = client.get("/metrics").text
    for name in ("team/one", "two"):
        assert f'nanoserve_requests_finished_total{{model="{name}"' in metrics
    assert json.dumps(str(broken)) not in refusal.text
