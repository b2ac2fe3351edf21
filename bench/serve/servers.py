"""Real HTTP servers of vLLM on a CPU: start, ask, kill, and read their metrics and logs."""

from __future__ import annotations

import contextlib
import itertools
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
from typing import Any, Self

STARTING = 900.0  # Seconds until a server answers.
CONTEXT = 2048  # Tokens of the longest request of an engine.
DEVICE = "serve0"  # The network device of an engine in a namespace of its own.
ROOT = Path(__file__).resolve().parents[2]
# Ports below those that Linux gives to connections (`net.ipv4.ip_local_port_range`).
PORTS = itertools.chain(range(FIRST := 20000 + os.getpid() % 10000, 32000), range(20000, FIRST))
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # vLLM closes a connection that is idle for 5 s. The toy proxy fails if it uses it at this time.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
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
    """Return an unused port, and never the same one twice.

    A server binds its port seconds later. Meanwhile the kernel must not give the port to a
    connection, so it is not in the kernel's range.
    """
    while True:
        port = next(PORTS)
        with socket.socket() as taken, contextlib.suppress(OSError):
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", port))
            return port


class Server:
    """One process with its children, its log and its HTTP address.

    Args:
        name: Name of the log.
        folder: Folder of the log.
        command: The program and its arguments, without the port.
        environment: More variables.
        port: The port, so that a server that restarts keeps its address.
        host: The address at which it listens.
        inside: The network namespace in which it runs, or "".
        health: The path that answers when the server is ready.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        command: list[str],
        environment: dict[str, str] | None = None,
        port: int = 0,
        host: str = "127.0.0.1",
        inside: str = "",
        health: str = "/health",
    ) -> None:
        self.name, self.host, self.port = name, host, port or free_port()
        self.url, self.log = f"http://{host}:{self.port}", folder / f"{name}.log"
        self._health, self._environment = self.url + health, environment or {}
        self._command = ["ip", "netns", "exec", inside, *command] if inside else command
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
                urllib.request.urlopen(self._health, timeout=5),  # noqa: S310
            ):
                # Another process may have the port.
                if self.process.poll() is None:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} does not answer: {self.log}")

    def kill(self) -> None:
        """Kill the process and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def kill_rank(self) -> None:
        """Kill the worker of the last rank alone. vLLM then ends the others, and is killed after.

        The worker of a rank is the process whose title ends with "_TP" and the number.
        """
        ranks: dict[int, int] = {}
        for status in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                found = re.search(rb"Worker\S*?_TP(\d+)", status.read_bytes())
                if found and os.getsid(int(status.parent.name)) == self.process.pid:
                    ranks[int(found[1])] = int(status.parent.name)
        if len(ranks) < 2:
            raise RuntimeError(f"{self.name} has workers {ranks}, and the row kills one of several")
        os.kill(ranks[max(ranks)], signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=30)
        self.kill()

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
    host: str = "127.0.0.1",
    inside: str = "",
) -> Server:
    """Start the server of ``vllm serve`` on a CPU.

    *connector* is its ``--kv-transfer-config``. The command itself looks for a package of the name
    "vllm", and the one for CPUs has another name. With *inside*, it runs in this network namespace
    and listens at *host*.
    """
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager",
        "--max-model-len", str(CONTEXT), "--max-num-seqs", "16", "--block-size", str(block_size),
        "--num-gpu-blocks-override", str(blocks), "--tensor-parallel-size", str(tp),
        "--host", host, "--no-disable-hybrid-kv-cache-manager", *more,
    ]  # fmt: skip
    if connector is not None:
        command += ["--kv-transfer-config", json.dumps(connector)]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).with_name("site"))])
    side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "PYTHONPATH": path}
    side["KVSPEC_SERVE_SAMPLES"] = str(folder / f"{name}.samples")
    if inside:
        side |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_HOST_IP": host}
        side["UCX_NET_DEVICES"] = DEVICE
    return Server(name, folder, command, side, host=host, inside=inside)


def toy_proxy(program: Path, folder: Path, prefill: Server, decode: Server) -> Server:
    """Start vLLM's own ``toy_proxy_server.py``, which no package contains."""
    engines = ["--prefiller-hosts", prefill.host, "--prefiller-ports", str(prefill.port)]
    engines += ["--decoder-hosts", decode.host, "--decoder-ports", str(decode.port)]
    command = [sys.executable, str(program), *engines]
    return Server("router", folder, command, health="/healthcheck")


def router(folder: Path, prefill: Server, decode: Server) -> Server:
    """Start the router of the examples."""
    program = [sys.executable, str(ROOT / "examples" / "router.py")]
    engines = ["--prefill", prefill.url, "--decode", decode.url]
    return Server("router", folder, [*program, *engines], {"PYTHONPATH": str(ROOT)})


class Network:
    """Two network namespaces on one bridge, whose link to each other can be cut.

    This process reaches both at all times. It needs the rights of root.
    """

    HOSTS = ("10.213.7.2", "10.213.7.3")

    def __init__(self) -> None:
        self._bridge, self.names = "kvserve", ("kvserve-p", "kvserve-d")

    def __enter__(self) -> Self:
        self._remove()
        self._ip(f"link add {self._bridge} type bridge")
        self._ip(f"addr add 10.213.7.1/24 dev {self._bridge}")
        self._ip(f"link set {self._bridge} up")
        for name, host in zip(self.names, self.HOSTS, strict=True):
            self._ip(f"netns add {name}")
            self._ip(f"link add {name} type veth peer name {DEVICE} netns {name}")
            self._ip(f"link set {name} master {self._bridge} up")
            self._ip(f"-n {name} addr add {host}/24 dev {DEVICE}")
            self._ip(f"-n {name} link set {DEVICE} up")
            self._ip(f"-n {name} link set lo up")
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def cut(self, seconds: float) -> None:
        """Drop all packets between the two: isolated ports of a bridge do not reach each other."""
        for state in ("on", "off"):
            for name in self.names:
                self._ip(f"link set dev {name} type bridge_slave isolated {state}")
            if state == "on":
                time.sleep(seconds)

    @staticmethod
    def possible() -> bool:
        """Return whether this process may make namespaces."""
        try:
            with Network():
                return True
        except (OSError, subprocess.CalledProcessError):
            return False

    def _remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)

    @staticmethod
    def _ip(command: str) -> None:
        subprocess.run(["ip", *command.split()], capture_output=True, check=True)


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
