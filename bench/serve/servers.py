"""Real HTTP servers of vLLM on a CPU: start, ask, kill, and read their metrics and logs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTING = 420.0  # Seconds until a server answers.
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "UCX_NET_DEVICES": "lo",
    "UCX_LOG_LEVEL": "error",
    "KVSPEC_SECRET": "a secret for servers on one machine",
}
CONNECTORS: dict[str, dict[str, Any]] = {
    "KvspecConnector": {
        "kv_connector": "KvspecConnector",
        "kv_connector_module_path": "kvspec.adapters.vllm.connector",
    },
    "NixlConnector": {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
}


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Server:
    """One process with its children, its log and its HTTP address.

    Args:
        name: Name of the log.
        folder: Folder of the log.
        command: The program and its arguments, without the port.
        environment: More variables.
        port: The port, so that a server that restarts keeps its address.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        command: list[str],
        environment: dict[str, str] | None = None,
        port: int = 0,
    ) -> None:
        self.name, self.port = name, port or free_port()
        self.url, self.log = f"http://127.0.0.1:{self.port}", folder / f"{name}.log"
        self._command, self._environment = command, environment or {}
        self.log.unlink(missing_ok=True)
        self.start()

    def start(self) -> None:
        """Start the process. The log goes on."""
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._command, "--port", str(self.port)],
                stdout=log,
                stderr=log,
                env=os.environ | ENVIRONMENT | self._environment,
                start_new_session=True,
            )

    def ready(self) -> None:
        """Wait until the server answers."""
        end = time.monotonic() + STARTING
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} ended: {self.log}")
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"{self.url}/health", timeout=5),  # noqa: S310
            ):
                return
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} does not answer: {self.log}")

    def kill(self) -> None:
        """Kill the process and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def post(self, path: str, body: dict[str, Any], timeout: float = 60.0) -> dict[str, Any]:
        """Return the answer to one request."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310 - our own server
            self.url + path, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def metrics(self) -> dict[str, float]:
        """Return the sum of each metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=20) as answer:  # noqa: S310
            text = answer.read().decode()
        sums: dict[str, float] = {}
        for line in text.splitlines():
            if found := re.match(r"([\w:]+)(?:\{.*\})? ([\d.eE+-]+)$", line):
                sums[found[1]] = sums.get(found[1], 0.0) + float(found[2])
        return sums

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process.poll() is None

    @property
    def tracebacks(self) -> int:
        """The number of tracebacks in the log."""
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")


def vllm(
    name: str,
    folder: Path,
    model: Path,
    connector: dict[str, Any] | None,
    *,
    blocks: int,
    block_size: int = 32,
    tp: int = 1,
    more: tuple[str, ...] = (),
) -> Server:
    """Start the server of ``vllm serve`` on a CPU.

    *connector* is its ``--kv-transfer-config``. The command itself looks for a package of the name
    "vllm", and the one for CPUs has another name.
    """
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", "1024", "--max-num-seqs", "16", "--block-size", str(block_size),
        "--num-gpu-blocks-override", str(blocks), "--tensor-parallel-size", str(tp),
        "--host", "127.0.0.1", "--no-disable-hybrid-kv-cache-manager", *more,
    ]  # fmt: skip
    if connector is not None:
        command += ["--kv-transfer-config", json.dumps(connector)]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).with_name("site"))])
    side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "PYTHONPATH": path}
    return Server(name, folder, command, side)


def router(folder: Path, prefill: Server, decode: Server) -> Server:
    """Start the router of the examples."""
    program = [sys.executable, str(ROOT / "examples" / "router.py")]
    engines = ["--prefill", prefill.url, "--decode", decode.url]
    return Server("router", folder, [*program, *engines], {"PYTHONPATH": str(ROOT)})


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Wait until all *servers* answer. Kill them at the end."""
    try:
        for server in servers:
            server.ready()
        yield
    finally:
        for server in servers:
            server.kill()
