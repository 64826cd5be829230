"""The file for Kubernetes on the page about clusters: valid for Kubernetes, and for pipepart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipepart.cli.config import checked, compose_config
from pipepart.cli.train import check_run

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


def _documents() -> list[dict[str, Any]]:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return list(yaml.safe_load_all(text))


def test_kubernetes_takes_the_file() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="there is no kubernetes-validate")
    documents = _documents()
    assert [document["kind"] for document in documents] == ["Service", "Secret", "Job"]
    for document in documents:
        validate.validate(document, validate.latest_version(), strict=True)
    documents[2]["spec"]["completionModus"] = "Indexed"
    with pytest.raises(validate.ValidationError):
        validate.validate(documents[2], validate.latest_version(), strict=True)


def test_the_parts_of_the_file_belong_together() -> None:
    service, secret, job = _documents()
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    name, count = job["metadata"]["name"], job["spec"]["completions"]
    assert service["metadata"]["name"] == pods["subdomain"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": secret["metadata"]["name"], "key": "token"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pods["volumes"]}
    assert job["spec"]["parallelism"] == count
    config = checked(compose_config([word for word in container["args"] if not word.startswith("output=")]))
    launcher = config["launcher"]
    assert launcher["nodes"] == count
    assert launcher["address"].partition(":")[0] == f"{name}-0.{pods['subdomain']}"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == config["devices"]
    check_run(config)
