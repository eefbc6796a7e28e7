"""The manifests in ``k8s/``, judged offline: strict schemas, Ray's own schema, and that the parts fit each other."""

import copy
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from nanoserve.serving.config import ModelArgs, ServingArgs
from tests.k8s import core, strict

Json = dict[str, Any]

MANIFESTS = sorted(strict.K8S.glob("*.yaml"))
DEPLOYMENTS = strict.K8S.parent / "deployments"
RAYSERVICE: Json = json.loads(strict.RAYSERVICE.read_text())
CRD_VARIABLE = "NANOSERVE_TEST_RAYSERVICE_CRD"

every_manifest = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
every_service = pytest.mark.parametrize(
    "service", strict.documents("RayService"), ids=lambda service: service["metadata"]["name"]
)


def faults(document: Json, rayservice: Json = RAYSERVICE) -> list[str]:
    schema = rayservice if document["kind"] == "RayService" else core.KINDS[document["kind"]]
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


@every_manifest
def test_every_document_keeps_to_its_schema(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        assert faults(document) == []


def _typo(service: Json) -> None:
    group = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]
    group["maxReplica"] = group.pop("maxReplicas")


def _deep_typo(service: Json) -> None:
    pod = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    pod["containers"][0]["imagee"] = "x"


def _wrong_type(service: Json) -> None:
    service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["replicas"] = "two"


def _missing(service: Json) -> None:
    del service["spec"]["rayClusterConfig"]["headGroupSpec"]


@every_service
@pytest.mark.parametrize("spoil", [_typo, _deep_typo, _wrong_type, _missing])
def test_the_schema_would_see_a_mistake(service: Json, spoil: Callable[[Json], None]) -> None:
    spoiled = copy.deepcopy(service)
    spoil(spoiled)
    assert len(faults(spoiled)) == 1


@pytest.mark.skipif(CRD_VARIABLE not in os.environ, reason=f"{CRD_VARIABLE} does not name KubeRay's rayservices CRD")
def test_the_small_schema_is_the_crds() -> None:
    whole = strict.of_crd(Path(os.environ[CRD_VARIABLE]))
    services = strict.documents("RayService")
    assert strict.used(whole, services) == RAYSERVICE
    for service in services:
        assert faults(service, whole) == []


@every_service
def test_a_services_configuration_is_a_file_of_deployments(service: Json) -> None:
    text = service["spec"]["serveConfigV2"]
    config = yaml.safe_load(text)
    same = [path.name for path in DEPLOYMENTS.glob("*.yaml") if yaml.safe_load(path.read_text()) == config]
    assert len(same) == 1
    schema = ServeDeploySchema.model_validate(config)
    assert schema.http_options.host == "0.0.0.0", "the probes and the service come from outside the pod"
    for app in schema.applications:
        ServingArgs.model_validate(app.args)


def test_every_file_of_deployments_has_its_manifest() -> None:
    configs = [yaml.safe_load(service["spec"]["serveConfigV2"]) for service in strict.documents("RayService")]
    for path in DEPLOYMENTS.glob("*.yaml"):
        assert yaml.safe_load(path.read_text()) in configs, path.name


def _groups(service: Json) -> Iterator[Json]:
    cluster = service["spec"]["rayClusterConfig"]
    yield cluster["headGroupSpec"]
    yield from cluster["workerGroupSpecs"]


def _args(service: Json) -> ServingArgs:
    (app,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return ServingArgs.model_validate(app["args"])


@every_service
def test_a_pod_lives_long_enough_to_drain(service: Json) -> None:
    drain_s = _args(service).drain_s
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        hook = " ".join(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"])
        (deadline_s,) = re.findall(r"--deadline-remaining-seconds (\d+)", hook)
        assert f"sleep {deadline_s}" in hook
        assert drain_s + 5 <= int(deadline_s) < pod["terminationGracePeriodSeconds"]


@every_service
def test_pods_offer_what_kuberay_and_prometheus_look_for(service: Json) -> None:
    for group in _groups(service):
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": "serve", "containerPort": 8000} in container["ports"]
        assert {"name": "metrics", "containerPort": 8080} in container["ports"]
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"


@every_service
def test_ray_the_image_and_the_code_are_of_one_version(service: Json) -> None:
    version = service["spec"]["rayClusterConfig"]["rayVersion"]
    assert f"FROM rayproject/ray:{version}-" in (strict.K8S / "Dockerfile").read_text()
    lock = (strict.K8S.parent / "requirements.lock").read_text()
    assert f"\nray=={version}\n" in lock
    from nanoserve import __version__

    images = {group["template"]["spec"]["containers"][0]["image"] for group in _groups(service)}
    assert images == {f"nanoserve:{__version__}"}


@every_service
def test_the_workers_hold_what_the_configuration_asks_for(service: Json) -> None:
    args = _args(service)
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    wanted = sum((model.max_replicas or model.num_replicas) * _cpus(model) for model in args.served)
    cpus = sum(
        group["maxReplicas"] * float(group["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])
        for group in workers
    )
    assert cpus >= wanted + args.num_routers * 0.1


def _cpus(model: ModelArgs) -> float:
    """Of all ranks of one engine."""
    return (model.num_cpus or 0.1) * model.engine.tensor_parallel_size


@every_service
def test_a_worker_holds_all_ranks_of_an_engine(service: Json) -> None:
    """On one machine they sum through its memory or between its GPUs; over the network they would crawl."""
    pods = [
        group["template"]["spec"]["containers"][0]["resources"]["requests"]
        for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    ]
    for model in _args(service).served:
        num_gpus = model.engine.tensor_parallel_size if model.engine.device == "cuda" else 0
        assert any(
            float(pod["cpu"]) > _cpus(model) and int(pod.get("nvidia.com/gpu", 0)) == num_gpus for pod in pods
        ), model.name


def test_every_name_that_is_referred_to_is_there() -> None:
    secrets = {document["metadata"]["name"]: document["stringData"] for document in strict.documents("Secret")}
    claims = {document["metadata"]["name"] for document in strict.documents("PersistentVolumeClaim")}
    text = json.dumps(strict.documents("RayService"))
    for name, key in re.findall(r'"secretKeyRef": {"name": "([^"]+)", "key": "([^"]+)"}', text):
        assert key in secrets[name]
    assert set(re.findall(r'"claimName": "([^"]+)"', text)) == claims
    (redis,) = strict.documents("Service")
    port = redis["spec"]["ports"][0]["port"]
    assert f'"redisAddress": "{redis["metadata"]["name"]}:{port}"' in text


@pytest.mark.parametrize("name", ["nanoserve", "nanoserve-many", "nanoserve-tp", "nanoserve-tp-gpu"])
def test_a_disruption_budget_is_of_the_engines(name: str) -> None:
    budgets = {document["metadata"]["name"]: document for document in strict.documents("PodDisruptionBudget")}
    wanted = budgets[f"{name}-engines"]["spec"]["selector"]["matchLabels"].items()
    (service,) = [each for each in strict.documents("RayService") if each["metadata"]["name"] == name]
    head, *workers = [group["template"]["metadata"]["labels"].items() for group in _groups(service)]
    assert all(wanted <= labels for labels in workers)
    assert not wanted <= head


def test_an_incremental_upgrade_has_what_kuberay_asks_for() -> None:
    """KubeRay refuses it without Ray's autoscaler."""
    found = [
        service["spec"]
        for service in strict.documents("RayService")
        if service["spec"].get("upgradeStrategy", {}).get("type") == "NewClusterWithIncrementalUpgrade"
    ]
    assert found
    for spec in found:
        assert spec["rayClusterConfig"]["enableInTreeAutoscaling"] is True
        options = spec["upgradeStrategy"]["clusterUpgradeOptions"]
        assert options["stepSizePercent"] <= options["maxSurgePercent"]
        assert spec["rayClusterDeletionDelaySeconds"] > 120
