"""Real HTTP servers of SGLang on a CPU, and SGLang's own router.

SGLang runs here without CUDA, with the stand-ins of `bench/cross`. Its Python is named by
`KVSPEC_SGLANG_PYTHON`, and the one of its router by `KVSPEC_SGLANG_ROUTER_PYTHON`.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

from servers import ROOT, Server, free_port

CROSS = ROOT / "bench" / "cross"
PYTHON = os.environ.get("KVSPEC_SGLANG_PYTHON", str(ROOT / ".venv-sglang/bin/python"))
ROUTER = os.environ.get("KVSPEC_SGLANG_ROUTER_PYTHON", str(ROOT / ".venv-sglang-router/bin/python"))
LAUNCH = Path(__file__).with_name("sglang_launch.py")
# The files of SGLang's models that are imported. All 300 take a minute on a slow machine.
MODELS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_causal")
SETTINGS = (
    "--served-model-name", "tiny", "--device", "cpu", "--dtype", "float32",
    "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
    "--disable-overlap-schedule", "--disable-hybrid-swa-memory", "--skip-server-warmup",
    "--max-running-requests", "16", "--enable-metrics", "--host", "127.0.0.1",
)  # fmt: skip


class SGLang(Server):
    """One server of SGLang.

    Args:
        name: Name of the log.
        folder: Folder of the log.
        model: Folder of the model.
        role: "prefill", "decode", or "null" for an engine that serves alone.
        tokens: Tokens of the pool.
        page: Tokens of a page.
        context: The most tokens of a request.
        tp: Tensor parallel size.
        backend: The transfer backend.
        settings: The settings of kvspec.
        more: More arguments.
        plugins: Folders with more plug-ins of SGLang.
        environment: More variables.

    Attributes:
        bootstrap: The port of the bootstrap server.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        model: Path,
        role: str = "null",
        *,
        tokens: int = 32_768,
        page: int = 16,
        context: int = 1024,
        tp: int = 1,
        backend: str = "kvspec",
        settings: dict[str, Any] | None = None,
        more: tuple[str, ...] = (),
        plugins: tuple[Path, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.bootstrap = free_port()
        command = [
            PYTHON, str(LAUNCH), "--model-path", str(model), *SETTINGS,
            "--max-total-tokens", str(tokens), "--page-size", str(page), "--tp-size", str(tp),
            "--context-length", str(context), *more,
        ]  # fmt: skip
        if role != "null":
            command += ["--disaggregation-mode", role]
            command += ["--disaggregation-transfer-backend", backend]
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap)]
        if role == "decode":
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        own = _environment(tp, settings or {}, plugins) | (environment or {})
        super().__init__(name, folder, command, own)

    def loads(self) -> dict[str, Any]:
        """Return the current state of the scheduler's memory and queues."""
        with urllib.request.urlopen(f"{self.url}/v1/loads", timeout=20) as answer:  # noqa: S310
            found: dict[str, Any] = json.loads(answer.read())["loads"][0]
            return found

    def held(self) -> float:
        """Return the tokens in use, and each request that waits in a queue as one more."""
        found = self.loads()
        waiting = [found["num_waiting_reqs"], found["num_running_reqs"]]
        queues = found["disaggregation"] or {}
        waiting += [number for name, number in queues.items() if name.endswith("_queue_reqs")]
        return float(found["num_used_tokens"] + sum(waiting))


def _environment(tp: int, settings: dict[str, Any], plugins: tuple[Path, ...]) -> dict[str, str]:
    """Return the variables with which SGLang runs without CUDA."""
    files = Path(PYTHON).parent.parent.glob("lib/*/site-packages/sglang/srt/models/*.py")
    others = sorted(file.stem for file in files if file.stem not in MODELS)
    found = {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, CROSS / "site", CROSS / "stub", *plugins))),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(others),
        "KVSPEC_SGLANG": json.dumps(settings),
    }
    if tp > 1:
        found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
    return found


def sglang_router(folder: Path, prefill: SGLang, decode: SGLang, *more: str) -> Server:
    """Start SGLang's router, which sends both halves of a request at once."""
    command = [
        ROUTER, "-m", "sglang_router.launch_router", "--pd-disaggregation",
        "--prefill", prefill.url, str(prefill.bootstrap), "--decode", decode.url,
        "--host", "127.0.0.1", "--prometheus-port", str(free_port()), *more,
    ]  # fmt: skip
    return Server("router", folder, command)
