"""Test the answers of `kvspec view`, its server, and its page in a real browser."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("typer", reason="needs the cli extra")

from typer.testing import CliRunner

from kvspec.cli import app as cli
from kvspec.cli.answer import LAYOUTS, MAX_BLOCK, MAX_PAGE_RANKS, answer, choices, page
from kvspec.models import catalogue

# 8 KV heads, 28 layers, keys and values of 128 bfloat16 elements.
QUESTION = {"model": "Qwen3-0.6B", "producer": "tp=2", "consumer": "tp=3", "tokens": "16"}
BYTES_OF_A_TOKEN = 8 * 28 * 2 * 128 * 2


def test_answer_counts_the_bytes_and_names_the_heads_of_each_pair() -> None:
    """Consumer tp1 holds heads 2 to 4, of which producer tp1 owns only head 4."""
    found = answer(QUESTION)
    assert 16 * BYTES_OF_A_TOKEN == found["bytes"] == sum(pair["bytes"] for pair in found["pairs"])
    assert [("tp0", "tp0"), ("tp0", "tp1"), ("tp1", "tp1"), ("tp1", "tp2")] == [
        (edge["producer"], edge["consumer"]) for edge in found["edges"]
    ]
    assert ["k+v head 4"] == found["edges"][2]["heads"]
    assert [] == found["unread"]


def test_answer_names_producer_ranks_that_nobody_reads() -> None:
    """Of 16 ranks with 8 heads, one of each two has a replica that nobody reads."""
    assert 8 == len(answer(QUESTION | {"producer": "tp=16", "consumer": "tp=8"})["unread"])


def test_answer_draws_the_plan_and_the_memory_of_each_pair() -> None:
    pictures = [answer(QUESTION)["picture"], answer(QUESTION | {"pair": "3"})["picture"]]
    assert all(ET.fromstring(picture).tag.endswith("svg") for picture in pictures)  # noqa: S314 - our own


def test_answer_reads_no_file_of_the_name_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with that name is common where the models are stored."""
    (tmp_path / "Qwen3-0.6B").mkdir()
    monkeypatch.chdir(tmp_path)
    assert 16 * BYTES_OF_A_TOKEN == answer(QUESTION)["bytes"]


def test_answer_names_a_command_that_prints_the_same_plan() -> None:
    found = answer(QUESTION)
    arguments = [*found["command"].split()[1:], "--json"]
    printed = json.loads(CliRunner().invoke(cli.app, arguments, prog_name="kvspec").stdout)
    assert found["bytes"] == sum(edge["bytes"] for edge in printed["edges"])


@pytest.mark.parametrize(
    ("field", "question"),
    [
        ("model", {"model": "none"}),
        ("model", {"model": "/etc/hostname"}),  # A question never opens a file.
        ("producer.tp_size", {"producer": "tp=0"}),
        ("consumer.layout", {"consumer": "layout=XYZ"}),
        ("consumer", {"consumer": "tp"}),
        ("producer", {"producer": f"tp={MAX_PAGE_RANKS},pp=2"}),
        ("consumer.block_size", {"consumer": f"block={MAX_BLOCK + 1}"}),
        ("tokens", {"tokens": "-1"}),
        ("tokens", {"tokens": "9" * 5000}),
        ("tokens", {"tokens": "٣"}),
        ("replica_policy", {"policy": "none"}),
        ("ranks_per_node", {"policy": "nearest"}),
        ("pair", {"pair": "4"}),
    ],
    ids=repr,
)
def test_answer_to_an_invalid_question_names_the_field(
    field: str, question: dict[str, str]
) -> None:
    (fault,) = answer(QUESTION | question)["fault"]
    assert field == fault["field"]
    assert fault["text"]


@pytest.mark.parametrize("model", catalogue.names())
def test_every_model_of_the_catalogue_has_an_answer(model: str) -> None:
    found = answer({"model": model, "tokens": "64", "producer": "tp=4", "consumer": "tp=2"})
    assert found["bytes"] > 0


def test_every_offered_layout_has_an_answer() -> None:
    for layout in LAYOUTS:
        assert answer(QUESTION | {"producer": f"layout={layout}"})["bytes"] > 0


def test_page_contains_the_choices() -> None:
    text = page()
    _, _, rest = text.partition("const choices = ")
    offered, _ = json.JSONDecoder().raw_decode(rest)
    assert json.loads(json.dumps(choices())) == offered
    # The page works without a network.
    assert "http" not in text.replace("http-equiv", "")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Run `kvspec view` and return its address."""
    pytest.importorskip("starlette", reason="needs the view extra")
    pytest.importorskip("uvicorn", reason="needs the view extra")
    command = [sys.executable, "-m", "kvspec.cli", "view", "--port=0", "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()


def _get(address: str, host: str | None = None) -> str:
    request = urllib.request.Request(address, headers={"Host": host} if host else {})  # noqa: S310
    with urllib.request.urlopen(request, timeout=30) as reply:  # noqa: S310 - our own server
        text: str = reply.read().decode()
        return text


def test_server_sends_the_page_and_the_answers(server: str) -> None:
    assert page() == _get(server)
    assert answer(QUESTION) == json.loads(_get(f"{server}answer?{urlencode(QUESTION)}"))


def test_server_refuses_requests_for_another_host(server: str) -> None:
    """A page of another site could otherwise reach the server under a name of its own."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        _get(server, host="other.example")
    assert 400 == raised.value.code
    raised.value.close()


def test_view_refuses_a_port_in_use(server: str) -> None:
    port = server.rstrip("/").rpartition(":")[2]
    result = CliRunner().invoke(cli.app, ["view", "--port", port, "--no-browser"])
    assert 2 == result.exit_code
    assert f"port={port}" in result.stderr


def test_view_without_starlette_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = CliRunner().invoke(cli.app, ["view", "--no-browser"])
    assert 2 == result.exit_code
    assert "kvspec[view]" in result.stderr


@pytest.fixture
def tab(server: str) -> Iterator[Any]:
    """Open the page in Chromium and return its tab. An error of the page fails the test."""
    browsers = pytest.importorskip("playwright.sync_api", reason="needs the browser group")
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    if chromium is None:
        pytest.skip("needs Chromium, such as the package chromium of Debian")
    faults: list[str] = []
    with browsers.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 390, "height": 800})
        opened.on("pageerror", lambda error: faults.append(str(error)))
        opened.goto(server)
        yield opened
        browser.close()
    assert [] == faults


@pytest.mark.slow
def test_page_shows_the_answer_in_a_browser(tab: Any) -> None:
    """A newcomer changes a size, sees the new plan, one block, and then what is wrong."""
    tab.wait_for_selector("#plan svg")
    assert "896 MiB" == tab.inner_text("#moved")
    assert 4 == tab.locator("#pairs tr").count()

    tab.select_option("select[name=model]", "DeepSeek-V3")
    tab.fill("input[name='consumer.tp']", "8")
    tab.wait_for_function("document.querySelectorAll('#pairs tr').length === 8")
    assert "consumer.tp=8" in tab.url
    expected = answer({"model": "DeepSeek-V3", "producer": "", "consumer": "tp=8"})
    assert f"{expected['descriptors']:,}" == tab.inner_text("#descriptors")

    tab.locator("#pairs button").nth(5).click()
    tab.wait_for_selector("#memory svg")
    assert "tp5" in tab.inner_text("#memory-title")

    tab.fill("input[name='producer.tp']", "0")
    tab.wait_for_selector("#fault li")
    assert "producer.tp" == tab.locator("#question .wrong").get_attribute("name")

    # The address contains the question, so a link shows the same answer.
    tab.goto(tab.url.replace("producer.tp=0", "producer.tp=4"))
    tab.wait_for_selector("#plan svg")
    assert "4" == tab.input_value("input[name='producer.tp']")


@pytest.mark.slow
def test_page_fits_a_narrow_screen(tab: Any) -> None:
    """Only pictures and tables scroll sideways, each in its own box."""
    tab.wait_for_selector("#plan svg")
    root = "document.documentElement"
    assert tab.evaluate(f"{root}.scrollWidth <= {root}.clientWidth")
