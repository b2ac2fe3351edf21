"""Engines of SGLang, which answer the calls of `lines`. Each one computes, produces or consumes.

Each engine is a process that is forked from this one, which has imported SGLang once. Its
schedulers are forked from the engine. To import SGLang takes longer than all else.

SGLang has no parameters that travel with a request, but rooms: the producer stores a ticket under
a room at its server, and the consumer finds it there. So `prefill` reads the ticket from the server
of the producer, and `decode` stores it at a server of the consumer's process.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import lines

from kvspec.adapters.sglang import tickets

# Environment of all engines. It must be set before SGLang is imported.
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # Each engine would run a compiler of C++.
}
# The files of SGLang's models that are imported. All 300 take a minute on a slow machine.
MODELS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_causal", "deepseek_v2")
# Settings with which SGLang runs without CUDA and without AMX.
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_hybrid_swa_memory": True,
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "log_level": "info",
}
# The same, for one side of a pair.
DECODE = {"disaggregation_decode_retraction_backup": "cpu_tensor"}
# The same, for an engine that stores pages.
HICACHE = {
    "enable_hierarchical_cache": True,
    "hicache_storage_backend": "dynamic",
    "hicache_write_policy": "write_through",
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "layer_first",
    "hicache_ratio": 2.0,
    "hicache_storage_prefetch_policy": "wait_complete",
}
STORE = {
    "backend_name": "kvspec",
    "module_path": "kvspec.adapters.sglang.hicache",
    "class_name": "HiCachePages",
    "interface_v1": 1,
    "prefetch_threshold": 1,
}
# The settings of kvspec.
BACKEND = {"timeout": 20.0, "hold": 20.0, "lease": 15.0, "waiting": 30.0}
# Log probabilities that are compared for each token.
LOGPROBS = 5
# Seconds until an engine has started, and until a ticket is there.
STARTING, PREFILLING = 600.0, 120.0

FORK = multiprocessing.get_context("fork")


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Served:
    """One engine, in its own process.

    Args:
        name: The `engine_id` of its session.
        role: "prefill", "decode", or "null" for an engine that computes prompts alone.
        filling: The file with the number that fills unused memory.
        keys: The `key_content` of kvspec's settings, for models whose code does not show it.
    """

    def __init__(
        self,
        name: str,
        *,
        path: str,
        model: str,
        revision: str,
        block: int,
        tp: int,
        role: str,
        filling: str,
        keys: dict[str, Any] | None = None,
        dtype: str = "float32",
        store: dict[str, Any] | None = None,
        log: str = "",
    ) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()
        self._rooms = itertools.count(1)
        self._prefilling: list[Future[Any]] = []
        self._filling = Path(filling)
        self._filling.write_text("0", encoding="utf-8")
        own = {"engine_id": name, "model": model, "revision": revision, "key_content": keys}
        os.environ.update({"CROSS_FILLING": filling, "KVSPEC_SGLANG": json.dumps(BACKEND | own)})
        settings = SETTINGS | {"dtype": dtype, "port": free_port()}
        self._address = f"127.0.0.1:{free_port()}"
        if role != "null":
            settings |= {
                "disaggregation_mode": role,
                "disaggregation_transfer_backend": "kvspec",
                "disaggregation_bootstrap_port": int(self._address.partition(":")[2]),
            }
        if role == "decode":
            settings |= DECODE
            self._tickets = tickets.TicketServer("127.0.0.1", 0)
            self._address = self._tickets.address
        self._log = Path(log)
        if store is not None:
            self._directory = Path(store["directory"])
            settings |= HICACHE | {
                "hicache_storage_backend_extra_config": json.dumps(STORE | store)
            }
        if tp > 1:
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
        import sglang  # noqa: PLC0415 - after the environment is set

        self._engine = sglang.Engine(model_path=path, page_size=block, tp_size=tp, **settings)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _start(
        self, prompt: list[int], count: int, room: int | None, salt: str | None = None
    ) -> Future[Any]:
        work = self._generate(prompt, count, room, salt)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _generate(
        self, prompt: list[int], count: int, room: int | None, salt: str | None
    ) -> dict[str, Any]:
        """Return the answer to one greedy request."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        host, _, port = self._address.partition(":")
        transfer = {"host": host, "port": int(port), "room": room} if room is not None else {}
        try:
            answer = await self._engine.async_generate(
                input_ids=prompt,
                sampling_params=sampling,
                return_logprob=True,
                top_logprobs_num=LOGPROBS,
                cache_salt=salt,
                **{f"bootstrap_{name}": value for name, value in transfer.items()},
            )
        except Exception as error:  # noqa: BLE001 - the outcome of the request
            # SGLang puts its own words before those of kvspec.
            return {"finish": "error", "why": f"{error}".rpartition(" with exception ")[2]}
        found = answer["meta_info"]
        finish = found.get("finish_reason") or {}
        return {
            "tokens": answer["output_ids"],
            "logprobs": [
                {str(token): logprob for logprob, token, _ in step or ()}
                for step in found.get("output_top_logprobs", ())
            ],
            "finish": finish.get("type"),
            "cached": found.get("cached_tokens", 0),
            "why": f"{finish.get('message')}".rpartition(" with exception ")[2],
        }

    def alone(self, prompt: list[int], count: int) -> dict[str, Any]:
        """Return the answer of an engine that computes the prompt itself."""
        return self._start(prompt, count, None).result() | {"computed": len(prompt) + count - 1}

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Compute and hold a prompt. The request ends when a consumer has read it."""
        room = next(self._rooms)
        running = self._start(prompt, 1, room)
        self._prefilling.append(running)
        deadline = time.monotonic() + PREFILLING
        while not (found := tickets.get(self._address, [room])):
            if running.done() or time.monotonic() > deadline:
                return {"ticket": None, "why": str(running.done() and running.result()["why"])}
            time.sleep(0.01)
        if "remote_failure" in found[room]:
            return {"ticket": None, "why": found[room]["remote_failure"]}
        return {"ticket": found[room], "why": None}

    def decode(self, prompt: list[int], count: int, ticket: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of an engine that loads the prompt. It cannot compute any of it."""
        room = next(self._rooms)
        try:
            tickets.put(self._address, room, ticket)
        except Exception as error:  # noqa: BLE001 - the outcome of the request
            return {"finish": "error", "why": lines.reason(error)}
        # The first token comes with the ticket.
        return self._start(prompt, count, room).result() | {"computed": count}

    def save(self, prompt: list[int], salt: str | None = None) -> None:
        """Compute a prompt and store its pages. SGLang writes them after the answer."""
        self._start(prompt, 1, None, salt).result()
        before, deadline = -1, time.monotonic() + PREFILLING
        while (now := len([*self._directory.rglob("*.safetensors")])) != before or not now:
            if time.monotonic() > deadline:
                raise TimeoutError("no page was stored")
            before = now
            time.sleep(1.0)

    def resume(self, prompt: list[int], count: int, salt: str | None = None) -> dict[str, Any]:
        """Return the answer of an engine that loads what is stored of the prompt."""
        self.clear(0.0)
        answer = self._start(prompt, count, None, salt).result()
        computed = len(prompt) + count - 1 - answer.get("cached", 0)
        return answer | {"computed": computed, **lines.missed(self._log)}

    def held(self) -> int:
        """Return the number of prompts that are held or computed."""
        self._prefilling = [each for each in self._prefilling if not each.done()]
        return len(self._prefilling)

    def clear(self, value: float) -> bool:
        """Forget cached prompts, and write *value* into all memory of the cache."""
        if self.held():
            return False
        self._filling.write_text(str(value), encoding="utf-8")
        work = self._engine.tokenizer_manager.flush_cache()
        return bool(asyncio.run_coroutine_threadsafe(work, self._loop).result().success)


def serve(pipe: Connection, name: str, settings: dict[str, Any]) -> None:
    """Run a `Served` until the parent ends it, or has ended."""
    parent = os.getppid()
    os.setsid()
    # SGLang would start its schedulers anew, and they would import it again.
    begin = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: begin("fork", force=True)  # type: ignore[assignment]
    served: Any = None
    call, arguments = "start", settings
    while True:
        try:
            if call == "start":
                served = Served(name, **arguments)
                pipe.send((None, None))
            else:
                pipe.send((getattr(served, call)(**arguments), None))
        except Exception as error:  # noqa: BLE001 - the driver decides
            pipe.send((None, lines.reason(error)))
        # Later engines have copies of the other end, so it stays open if the parent is killed.
        while not pipe.poll(1.0):
            if os.getppid() != parent:
                os.killpg(0, signal.SIGKILL)
        call, arguments = pipe.recv()


class Engine:
    """The process of a `Served`. It answers the calls of `lines`."""

    def __init__(self, name: str, **settings: Any) -> None:  # noqa: ANN401
        self._pipe, other = FORK.Pipe()
        self._process = FORK.Process(target=serve, args=(other, name, settings))
        self._process.start()
        other.close()

    def ready(self) -> None:
        """Wait until the engine is ready."""
        self._answer()

    def _answer(self) -> Any:  # noqa: ANN401
        try:
            if not self._pipe.poll(STARTING):
                raise TimeoutError(f"no answer in {STARTING:.0f} s")
            value, why = self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError("the process has ended") from None
        if why is not None:
            raise RuntimeError(why)
        return value

    def __getattr__(self, call: str) -> Callable[..., Any]:
        def called(**arguments: Any) -> Any:  # noqa: ANN401
            self._pipe.send((call, arguments))
            return self._answer()

        return called

    def kill(self) -> None:
        """End the engine and its schedulers without warning."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()

    def close(self) -> None:
        """End the engine."""
        self._pipe.close()
        self.kill()


def load() -> tuple[type[Engine], str]:
    """Import SGLang, which all engines share. Return their class, and the version of SGLang."""
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations  # type: ignore[union-attr,misc]
    files = Path(package, "srt", "models").glob("*.py")
    others = ",".join(sorted(file.stem for file in files if file.stem not in MODELS))
    os.environ.update({**ENVIRONMENT, "SGLANG_DISABLED_MODEL_ARCHS": others})
    for part in ("managers.scheduler", "model_executor.model_runner", "models.registry"):
        importlib.import_module(f"sglang.srt.{part}")

    return Engine, f"SGLang {version('sglang')}"


if __name__ == "__main__":
    lines.serve(load)
