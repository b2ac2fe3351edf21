"""Test the files and commands of the section "Operate" of the site."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML")

ROOT = Path(__file__).parents[2]
MANIFESTS, BATCH = ROOT / "ops" / "kubernetes.yml", ROOT / "ops" / "slurm.sh"
START = (ROOT / "docs" / "operate" / "start.md").read_text(encoding="utf-8")
CONNECTOR = (ROOT / "docs" / "vllm-pair.md").read_text(encoding="utf-8")
SETTINGS = {
    name
    for row in re.findall(r"^\| (`[\w`, ]+) \|", CONNECTOR, re.MULTILINE)
    for name in re.findall(r"`(\w+)`", row)
}


def manifests() -> list[dict[str, Any]]:
    """Return the objects of the manifests."""
    return list(yaml.safe_load_all(MANIFESTS.read_text(encoding="utf-8")))


def configurations() -> list[dict[str, Any]]:
    """Return each `--kv-transfer-config` of the pages and files."""
    pod = [
        each["spec"]["template"]["spec"]["containers"][0]["args"][0].replace('\\"', '"')
        for each in manifests()
        if each["kind"] == "Deployment"
    ]
    texts = [START, BATCH.read_text("utf-8"), *pod]
    found = [
        each for text in texts for each in re.findall(r"\{\s*\"kv_conn.*?\}\}", text, re.DOTALL)
    ]
    return [json.loads(each) for each in found]


def test_configurations_name_settings_that_the_connector_has() -> None:
    found = configurations()
    assert 5 == len(found)
    for each in found:
        assert "kvspec.adapters.vllm.connector" == each["kv_connector_module_path"]
        assert set(each["kv_connector_extra_config"]) <= SETTINGS
    roles = [each["kv_role"] for each in found]
    assert {"kv_producer", "kv_consumer", "$ROLE", "%s"} == set(roles)


def test_manifests_have_an_engine_of_each_role() -> None:
    deployments = [each for each in manifests() if each["kind"] == "Deployment"]
    roles = {
        variable["value"]
        for each in deployments
        for variable in each["spec"]["template"]["spec"]["containers"][0]["env"]
        if variable["name"] == "ROLE"
    }
    assert {"kv_producer", "kv_consumer"} == roles


def test_manifests_fit_the_schema_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for each in manifests():
        validate.validate(each, "1.31", strict=True)


def test_batch_script_can_be_parsed() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", BATCH], check=True)  # noqa: S603 - our own file
