"""Kubernetes schemas made strict, and cut to the fields that our manifests use.

A CRD's ``openAPIV3Schema`` lets unknown fields pass (the API server prunes them), so a typo would be silent. Here every
object with known properties refuses others.

    python -m tests.k8s.strict CRD.yaml

writes ``rayservice.schema.json`` anew, from KubeRay's rayservices CRD (ray-project/kuberay, Apache-2.0,
``ray-operator/config/crd/bases/ray.io_rayservices.yaml`` at commit feeaf72).
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

Json = dict[str, Any]

FOLDER = Path(__file__).parent
K8S = FOLDER.parents[1] / "k8s"
RAYSERVICE = FOLDER / "rayservice.schema.json"
_KEPT = ("type", "enum", "pattern", "minimum", "maximum", "required", "anyOf", "minItems", "maxItems", "default")


def strict(schema: Mapping[str, Any]) -> Json:
    """As a JSON schema of draft 2020-12 that refuses unknown fields; ``default`` stands in for a required field."""
    made = {name: schema[name] for name in _KEPT if name in schema}
    if schema.get("x-kubernetes-int-or-string"):
        made = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    if properties := schema.get("properties"):
        made["properties"] = {name: strict(value) for name, value in properties.items()}
        defaulted = {name for name, value in properties.items() if "default" in value}
        made["required"] = sorted(set(schema.get("required", ())) - defaulted)
        made["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    elif isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(schema["additionalProperties"])
    if isinstance(schema.get("items"), dict):
        made["items"] = strict(schema["items"])
    return made


def used(schema: Json, documents: list[Any]) -> Json:
    """The part of a strict schema that these documents touch, and what it requires."""
    if properties := schema.get("properties"):
        objects = [document for document in documents if isinstance(document, dict)]
        names = {name for found in objects for name in found} | set(schema["required"])
        kept = {
            name: used(properties[name], [found[name] for found in objects if name in found])
            for name in sorted(names & properties.keys())
        }
        return schema | {"properties": kept}
    if "items" in schema:
        inner = [item for document in documents if isinstance(document, list) for item in document]
        return schema | {"items": used(schema["items"], inner)}
    return schema


def of_crd(path: Path) -> Json:
    """The strict schema of version v1."""
    crd = yaml.safe_load(path.read_text())
    (version,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1"]
    made = strict(version["schema"]["openAPIV3Schema"])
    made["properties"]["metadata"] = _METADATA
    return made


_METADATA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def documents(kind: str) -> list[Any]:
    """Our manifests of a kind."""
    found = [document for path in sorted(K8S.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]
    return [document for document in found if document["kind"] == kind]


def main(crd: Path) -> None:
    schema = used(of_crd(crd), documents("RayService"))
    RAYSERVICE.write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
