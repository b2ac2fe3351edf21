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
    assert 7 == len(found)
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


@pytest.mark.parametrize("busy", ["kvspec_held_prompts", "num_requests_running"])
def test_manifests_drain_until_the_engine_is_at_rest(busy: str, tmp_path: Path) -> None:
    """The command of `preStop` reads vLLM's own metrics. It waits for as long as one is above 0."""
    commands = {
        each["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"][
            "command"
        ][2]
        for each in manifests()
        if each["kind"] == "Deployment"
    }
    [command] = commands
    page, slept = tmp_path / "metrics", tmp_path / "slept"
    page.write_text(f'# HELP vllm:{busy} text 5\nvllm:{busy}{{engine="0"}} 2.0\n', "utf-8")
    program = f"""
        curl() {{ cat {page}; }}
        sleep() {{ echo "$1" >> {slept}; [ "$1" = 20 ] || sed -i 's/ 2.0$/ 0.0/' {page}; }}
        {command}
    """
    subprocess.run(["/bin/sh", "-c", program], check=True, timeout=60)  # noqa: S603
    assert ["20", "1"] == slept.read_text("utf-8").split()


def test_manifests_read_the_secret_that_the_pages_create() -> None:
    """The pages create the key of the secret, which is the name of the mounted file."""
    pages = [
        (ROOT / "docs" / "operate" / f"{name}.md").read_text("utf-8")
        for name in ("kubernetes", "secrets")
    ]
    for page in pages:
        assert "create secret generic kvspec --from-literal=secrets=" in page
    for each in manifests():
        if each["kind"] == "Deployment":
            pod = each["spec"]["template"]["spec"]
            variables = {item["name"]: item.get("value") for item in pod["containers"][0]["env"]}
            assert "KVSPEC_SECRET" not in variables
            assert "/etc/kvspec/secrets" == variables["KVSPEC_SECRET_FILE"]
            mounts = {
                item["name"]: item["mountPath"] for item in pod["containers"][0]["volumeMounts"]
            }
            assert "/etc/kvspec" == mounts["secrets"]


def test_batch_script_can_be_parsed() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", BATCH], check=True)  # noqa: S603 - our own file
