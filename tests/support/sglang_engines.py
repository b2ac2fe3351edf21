"""Real engines of SGLang on a CPU, in processes of their own. The tests talk to them by calls.

Importing this module prepares the environment of SGLang, which must not be imported before.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "cross"))

from sglang_engine import DECODE, FORK, SETTINGS, free_port, load

from kvspec.adapters.sglang import plugin

# The layers of a model that is small enough for any machine.
LLAMA = {
    "vocab_size": 997,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}


def model(folder: Path, seed: int = 0, **changes: Any) -> str:
    """Write a Llama with random weights into *folder*, and return its path."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    torch.manual_seed(seed)
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | changes))
    made.to(torch.float32).save_pretrained(folder)
    return str(folder)


class _Served:
    """The engine inside of its process."""

    def __init__(self, role: str, port: int, backend: dict[str, Any], **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()
        os.environ["KVSPEC_SGLANG"] = json.dumps(backend)
        own: dict[str, Any] = SETTINGS | {"dtype": "float32", "port": free_port()}
        if role != "null":
            own |= {
                "disaggregation_mode": role,
                "disaggregation_transfer_backend": "kvspec",
                "disaggregation_bootstrap_port": port,
            }
        own |= (DECODE if role == "decode" else {}) | settings
        if own.get("tp_size", 1) > 1:
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(own["tp_size"])))
        sglang = importlib.import_module("sglang")
        self._engine = sglang.Engine(**own)
        self._io = importlib.import_module("sglang.srt.managers.io_struct")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def begin(self, call: str, arguments: dict[str, Any]) -> Any:
        """Begin a call, and return its future."""
        return asyncio.run_coroutine_threadsafe(getattr(self, call)(**arguments), self._loop)

    async def generate(self, **arguments: Any) -> dict[str, Any]:
        """Return the answer to a request, with the seconds until the first token."""
        begun = time.monotonic()
        try:
            first, answer = None, None
            async for latest in await self._engine.async_generate(stream=True, **arguments):
                first, answer = first or time.monotonic() - begun, latest
        except Exception as error:  # noqa: BLE001 - the outcome of the request
            return {"error": f"{error}", "seconds": time.monotonic() - begun}
        assert answer is not None
        reason = answer["meta_info"]["finish_reason"] or {}
        if reason.get("type") == "abort":
            return {"error": reason.get("message"), "seconds": time.monotonic() - begun}
        return {"tokens": answer["output_ids"], "first": first, "meta": answer["meta_info"]}

    async def manage(self, method: str, kind: str | None, **fields: Any) -> Any:
        """Call a method of the engine's front end, with a request of SGLang's class *kind*."""
        requests = [] if kind is None else [getattr(self._io, kind)(**fields)]
        return await getattr(self._engine.tokenizer_manager, method)(*requests)

    async def abort(self, rid: str) -> None:
        """Abort a request, as a server does when the client has left."""
        self._engine.tokenizer_manager.abort_request(rid=rid)

    async def load(self) -> dict[str, Any]:
        """Return SGLang's own numbers of its pool."""
        state = await self._engine.tokenizer_manager.get_internal_state()
        return dict(state[0])

    async def scrape(self) -> str:
        """Return SGLang's metrics, as its server does."""
        client = importlib.import_module("prometheus_client")
        registry = client.CollectorRegistry()
        processes = importlib.import_module("prometheus_client.multiprocess")
        processes.MultiProcessCollector(registry)
        return str(client.generate_latest(registry).decode())


def _serve(pipe: Connection, settings: dict[str, Any], output: str) -> None:
    """Run an engine until the parent ends it, or has ended."""
    parent = os.getppid()
    os.setsid()
    warnings.simplefilter("default")
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    # SGLang would start its schedulers anew, and they would import it again.
    begin = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: begin("fork", force=True)  # type: ignore[assignment]
    try:
        served = _Served(**settings)
    except BaseException as error:
        pipe.send((-1, None, repr(error)))
        raise
    pipe.send((-1, None, None))
    lock = threading.Lock()

    def done(number: int, future: Any) -> None:
        error = future.exception()
        with lock, contextlib.suppress(OSError):
            pipe.send((number, None if error else future.result(), error and repr(error)))

    while True:
        while not pipe.poll(1.0):
            if os.getppid() != parent:
                os.killpg(0, signal.SIGKILL)
        number, call, arguments = pipe.recv()
        future = served.begin(call, arguments)
        future.add_done_callback(lambda ended, number=number: done(number, ended))


class Engine:
    """A real engine. Each call returns a future."""

    def __init__(
        self, role: str, path: str, folder: Path, *, port: int = 0, backend: Any = None, **more: Any
    ) -> None:
        self.output = folder / f"{role}-{time.monotonic_ns()}.log"
        self.port = port or free_port()
        self._pipe, other = FORK.Pipe()
        self._number, self._calls = 0, dict[int, Future[Any]]()
        self._ready: Future[Any] = Future()
        self._calls[-1] = self._ready
        settings = {"role": role, "port": self.port, "backend": backend or {}, "model_path": path}
        process = FORK.Process(
            target=_serve, args=(other, settings | more, str(self.output)), daemon=False
        )
        process.start()
        self.process = process
        other.close()
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, value, why = self._pipe.recv()
                future = self._calls.pop(number)
                if why is None:
                    future.set_result(value)
                else:
                    future.set_exception(RuntimeError(why))
        for future in self._calls.values():
            future.cancel()

    def ready(self) -> None:
        """Wait until the engine serves."""
        try:
            self._ready.result(300)
        except RuntimeError as error:
            raise RuntimeError(self.log[-5000:]) from error

    def call(self, name: str, **arguments: Any) -> Future[Any]:
        """Begin a call of `_Served`."""
        self._number += 1
        future = self._calls[self._number] = Future()
        self._pipe.send((self._number, name, arguments))
        return future

    def generate(
        self, prompt: list[int], count: int, room: Any = "", address: str = "", **more: Any
    ) -> Future[Any]:
        """Begin a request. The most probable tokens are taken, unless *more* has other settings."""
        own = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        sampling = own | more.pop("sampling", {})
        if room != "":
            host, _, port = address.partition(":")
            more |= {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": room}
        return self.call("generate", input_ids=prompt, sampling_params=sampling, **more)

    @property
    def log(self) -> str:
        """All that the engine has logged."""
        return self.output.read_text()

    @property
    def address(self) -> str:
        """The address of its ticket server."""
        return f"127.0.0.1:{self.port}"

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the engine."""
        os.killpg(self.process.pid or 0, number)

    def signal_schedulers(self, number: int) -> None:
        """Send a signal to the processes with the engine's memory, not to its servers."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                title = (folder / "cmdline").read_bytes()
                if b"scheduler" in title and os.getpgid(int(folder.name)) == self.process.pid:
                    os.kill(int(folder.name), number)

    def close(self) -> None:
        """End the engine."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.join()
        self._pipe.close()


def prepare() -> None:
    """Import SGLang once, before engines are forked from this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang warns of each kernel that a CPU does not have.
        load()
    # SGLang finds the plug-in by its entry point, which only an installed package has.
    plugin.register()
    importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
