"""One engine of SGLang, which answers the calls of `lines`. It computes, produces or consumes.

SGLang has no parameters that travel with a request, but rooms: the producer stores a ticket under
a room at its server, and the consumer finds it there. So `prefill` reads the ticket from the server
of the producer, and `decode` stores it at a server of this program.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import threading
import time
from concurrent.futures import Future
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lines
import sglang_engine

from kvspec.adapters.sglang import tickets

# Seconds until a ticket must be there.
PREFILLING = 120.0


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Engines:
    """The calls. See `lines`. There is one engine."""

    def __init__(self) -> None:
        # The driver has set the path, because Python reads it when it starts.
        path = os.environ["PYTHONPATH"]
        os.environ.update({**sglang_engine.ENVIRONMENT, "PYTHONPATH": path})
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, daemon=True).start()
        self._rooms = itertools.count(1)
        self._prefilling: list[Future[Any]] = []
        self._address = ""
        self._engine: Any = None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(
        self,
        engine: str,
        *,
        path: str,
        model: str,
        revision: str,
        block: int,
        tp: int,
        role: str,
        filling: str,
        dtype: str = "float32",
    ) -> None:
        """Start the engine. *role* is "null" for an engine that computes prompts alone."""
        os.environ["CROSS_FILLING"] = self._filling = filling
        Path(filling).write_text("0", encoding="utf-8")
        settings: dict[str, Any] = {"engine_id": engine, "model": model, "revision": revision}
        settings |= {"timeout": 20.0, "hold": 20.0, "lease": 15.0, "waiting": 30.0}
        os.environ["KVSPEC_SGLANG"] = json.dumps(settings)
        more: dict[str, Any] = {}
        if role != "null":
            port = free_port()
            more = {
                "disaggregation_mode": role,
                "disaggregation_transfer_backend": "kvspec",
                "disaggregation_bootstrap_port": port,
            }
            self._address = f"127.0.0.1:{port}"
        if role == "decode":
            more |= sglang_engine.DECODE
            self._tickets = tickets.TicketServer("127.0.0.1", 0)
            self._address = self._tickets.address
        if tp > 1:
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
        disabled = sglang_engine._other_models()  # noqa: SLF001 - beside this file
        os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = disabled
        import sglang  # noqa: PLC0415 - after the environment is set

        settings = {**sglang_engine.SETTINGS, "dtype": dtype, "port": free_port(), **more}
        self._engine = sglang.Engine(model_path=path, page_size=block, tp_size=tp, **settings)

    def version(self) -> str:
        """Return the version of SGLang."""
        return f"SGLang {version('sglang')}"

    def stop(self, engine: str) -> None:
        """Do nothing. The program ends the engine."""

    def ready(self, engine: str) -> None:
        """Do nothing: `start` has waited."""

    def _generate(self, prompt: list[int], count: int, room: int | None) -> Future[Any]:
        request: dict[str, Any] = {"prompt": prompt, "count": count}
        if room is not None:
            host, _, port = self._address.partition(":")
            request |= {"room": room, "host": host, "port": int(port)}
        work = sglang_engine._generate(self._engine, request)  # noqa: SLF001 - beside this file
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def alone(self, engine: str, prompt: list[int], count: int) -> dict[str, Any]:  # noqa: ARG002
        """Return the answer of an engine that computes the prompt itself."""
        return self._answer(self._generate(prompt, count, None), len(prompt) + count - 1)

    def prefill(self, engine: str, prompt: list[int]) -> dict[str, Any]:  # noqa: ARG002
        """Compute and hold a prompt. The request ends when a consumer has read it."""
        room = next(self._rooms)
        running = self._generate(prompt, 1, room)
        self._prefilling.append(running)
        deadline = time.monotonic() + PREFILLING
        while not (found := tickets.get(self._address, [room])):
            if running.done() or time.monotonic() > deadline:
                return {"ticket": None, "why": str(running.done() and running.result())}
            time.sleep(0.01)
        if "remote_failure" in found[room]:
            return {"ticket": None, "why": found[room]["remote_failure"]}
        return {"ticket": found[room], "why": None}

    def decode(
        self,
        engine: str,  # noqa: ARG002
        prompt: list[int],
        count: int,
        ticket: dict[str, Any],
    ) -> dict[str, Any]:
        """Return the answer of an engine that loads the prompt."""
        room = next(self._rooms)
        try:
            tickets.put(self._address, room, ticket)
        except Exception as error:  # noqa: BLE001 - the outcome of the request
            return {"finish": "error", "why": lines.reason(error)}
        # The first token comes with the ticket.
        return self._answer(self._generate(prompt, count, room), count)

    def _answer(self, running: Future[Any], computed: int) -> dict[str, Any]:
        answer = running.result()
        finish = answer.get("finish") or {}
        return {
            "tokens": answer.get("tokens", []),
            "logprobs": answer.get("logprobs", []),
            "finish": finish.get("type", "error"),
            "computed": computed,
            # SGLang puts its own words before those of kvspec.
            "why": str(answer.get("error") or finish.get("message")).split(" with exception ")[-1],
        }

    def held(self, engine: str) -> int:  # noqa: ARG002
        """Return the number of prompts that are held or computed."""
        self._prefilling = [each for each in self._prefilling if not each.done()]
        return len(self._prefilling)

    def clear(self, engine: str, value: float) -> bool:
        """Forget cached prompts, and write *value* into all memory of the cache."""
        if self.held(engine):
            return False
        Path(self._filling).write_text(str(value), encoding="utf-8")
        work = self._engine.tokenizer_manager.flush_cache()
        return bool(asyncio.run_coroutine_threadsafe(work, self._loop).result().success)

    def kill(self, engine: str) -> None:  # noqa: ARG002
        """End the engine without warning."""
        from sglang.srt.utils import kill_process_tree  # noqa: PLC0415

        kill_process_tree(os.getpid())

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.shutdown()
        os._exit(0)


if __name__ == "__main__":
    made: list[Engines] = []
    lines.serve(lambda: made.append(Engines()) or made[0])
    made[0].close()
