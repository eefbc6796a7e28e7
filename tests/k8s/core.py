"""Strict schemas of the few core Kubernetes kinds in ``k8s/``, written after the Kubernetes API reference (v1.31)."""

from typing import Any

Json = dict[str, Any]


def obj(required: str = "", /, **properties: Any) -> Json:
    names = required.split()
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


TEXT: Json = {"type": "string"}
COUNT: Json = {"type": "integer", "minimum": 0}
TEXTS: Json = {"type": "object", "additionalProperties": TEXT}
QUANTITY: Json = {"anyOf": [{"type": "string"}, {"type": "number"}]}
QUANTITIES: Json = {"type": "object", "additionalProperties": QUANTITY}


def listed(item: Json) -> Json:
    return {"type": "array", "items": item, "minItems": 1}


METADATA = obj("name", name=TEXT, labels=TEXTS, annotations=TEXTS)
SELECTOR = obj("matchLabels", matchLabels=TEXTS)
CLAIM = obj(
    "accessModes resources",
    accessModes=listed({"enum": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"]}),
    resources=obj("requests", requests=QUANTITIES),
    storageClassName=TEXT,
)
SECRET_KEY = obj("secretKeyRef", secretKeyRef=obj("name key", name=TEXT, key=TEXT))
CONTAINER = obj(
    "name image",
    name=TEXT,
    image=TEXT,
    command=listed(TEXT),
    env=listed(obj("name", name=TEXT, value=TEXT, valueFrom=SECRET_KEY)),
    ports=listed(obj("containerPort", containerPort=COUNT, name=TEXT)),
    readinessProbe=obj("", tcpSocket=obj("port", port=COUNT), periodSeconds=COUNT),
    resources=obj("", requests=QUANTITIES, limits=QUANTITIES),
    volumeMounts=listed(obj("name mountPath", name=TEXT, mountPath=TEXT)),
)
TEMPLATE = obj(
    "metadata spec", metadata=obj("labels", labels=TEXTS), spec=obj("containers", containers=listed(CONTAINER))
)


def kind(api_version: str, name: str, required: str, **properties: Any) -> Json:
    known = {"apiVersion": {"const": api_version}, "kind": {"const": name}, "metadata": METADATA}
    return obj(f"apiVersion kind metadata {required}", **known, **properties)


KINDS: dict[str, Json] = {
    "Secret": kind("v1", "Secret", "stringData", type={"const": "Opaque"}, stringData=TEXTS),
    "PersistentVolumeClaim": kind("v1", "PersistentVolumeClaim", "spec", spec=CLAIM),
    "Service": kind(
        "v1",
        "Service",
        "spec",
        spec=obj("selector ports", selector=TEXTS, ports=listed(obj("port", name=TEXT, port=COUNT))),
    ),
    "PodDisruptionBudget": kind(
        "policy/v1",
        "PodDisruptionBudget",
        "spec",
        spec=obj("selector", maxUnavailable=COUNT, minAvailable=COUNT, selector=SELECTOR),
    ),
    "StatefulSet": kind(
        "apps/v1",
        "StatefulSet",
        "spec",
        spec=obj(
            "serviceName selector template",
            serviceName=TEXT,
            replicas=COUNT,
            selector=SELECTOR,
            template=TEMPLATE,
            volumeClaimTemplates=listed(obj("metadata spec", metadata=METADATA, spec=CLAIM)),
        ),
    ),
}
