"""One vLLM engine in a separate process, which answers requests to generate over a pipe.

The engine core runs in this process. It also takes steps while no request is waiting, because a
producer learns only in a step which of its prompts were read. Workers are forked from this process,
and this process is forked from a parent that has imported vLLM, so vLLM is imported once. All
output goes to a log.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Environment of an engine. It must be set before vLLM is imported.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # Engines that compile at the same time disturb each other.
}

FORK = multiprocessing.get_context("fork")
# Settings of all engines.
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "disable_hybrid_kv_cache_manager": False,
    "max_model_len": 512,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
    "disable_log_stats": True,
}
# Log probabilities that are compared for each token.
LOGPROBS = 5
# Seconds between two steps while no command is waiting.
REST = 0.05
# Seconds for which a waiting worker sleeps. vLLM's own workers yield and try again. If there are
# more workers than cores, they kept all other processes from running for minutes (Linux 6.18).
REST_OF_WORKERS = 1e-3


class Engine:
    """A vLLM engine with the *settings* that `vllm.LLM` takes, and an optional connector."""

    def __init__(self, settings: dict[str, Any], connector: dict[str, Any] | None) -> None:
        import torch  # noqa: PLC0415 - after the environment is set
        from vllm import LLM  # noqa: PLC0415
        from vllm.config import KVTransferConfig  # noqa: PLC0415
        from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415
        from vllm.model_executor.layers.mamba import mamba_mixer2  # noqa: PLC0415
        from vllm.model_executor.layers.rotary_embedding.base import (  # noqa: PLC0415
            RotaryEmbedding,
        )
        from vllm.v1.executor import multiproc_executor  # noqa: PLC0415

        # vLLM 0.32 on CPUs applies no rotary embedding to the keys of MLA: its kernel leaves the
        # strided view of three dimensions unchanged. Its own code in torch is right.
        RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
        # With prefix caching, Mamba2 exports states from inside a forward pass. Its kernels for
        # CPUs cannot. Without this method, the scheduler ends a pass at each state that it caches.
        del mamba_mixer2.MambaMixer2.get_kv_cache_spec
        # If the processor has AMX, vLLM prefers an MLA backend that refuses float32.
        torch.cpu._is_amx_tile_supported = lambda: False  # noqa: SLF001
        multiproc_executor.get_mp_context = lambda: FORK
        shm_broadcast.sched_yield = lambda: time.sleep(REST_OF_WORKERS)
        if connector is not None:
            settings = {**settings, "kv_transfer_config": KVTransferConfig(**connector)}
        self.llm = LLM(**{**SETTINGS, **settings})
        # Pipeline stages need the buffers that a first batch creates.
        self.llm.collective_rpc("execute_dummy_batch")
        self.computed = 0
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler
        schedule = self.scheduler.schedule

        def counted(*arguments: Any) -> Any:  # noqa: ANN401
            step = schedule(*arguments)
            self.computed += step.total_num_scheduled_tokens
            return step

        self.scheduler.schedule = counted
        self.hit = self.loaded = 0
        if self.scheduler.connector is not None:
            matched = self.scheduler.connector.get_num_new_matched_tokens

            def noted(request: Any, cached: int) -> Any:  # noqa: ANN401
                found = matched(request, cached)
                self.hit, self.loaded = cached, found[0]
                return found

            self.scheduler.connector.get_num_new_matched_tokens = noted

    def generate(
        self,
        prompt: list[int],
        count: int,
        transfer: dict[str, Any] | None,
        salt: str | None = None,
        adapter: tuple[str, int, str] | None = None,
        replaced_by: str | None = None,
    ) -> dict[str, Any]:
        """Return the answer to one greedy request, its finish reason, and its cost.

        *computed* in the answer is the number of tokens that went through the model. *hit* is the
        number of tokens in the prefix cache of an engine with a connector. *adapter* is the name,
        the number and the folder of a LoRA adapter. The files of the folder *replaced_by* replace
        its own when the scheduler has stated it, and before a worker needs it.
        """
        from vllm.lora.request import LoRARequest  # noqa: PLC0415

        asked = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
        lora = LoRARequest(*adapter) if adapter else None
        if adapter and replaced_by:
            self._replace_once(adapter[2], replaced_by)
        (answer,) = self.generate_all([asked], count, transfer, lora)
        return answer

    def generate_all(
        self,
        prompts: list[dict[str, Any]],
        count: int,
        transfer: dict[str, Any] | None = None,
        lora: Any = None,  # noqa: ANN401 - vLLM's `LoRARequest`
    ) -> list[dict[str, Any]]:
        """Return the answers to several requests that run together.

        *prompts* are vLLM's own, such as one with images. *computed* in an answer belongs to all
        requests, *hit* and *loaded* to the last one. *loaded* is the number of tokens that the
        connector has found. *length* is the number of tokens of the prompt, with those that stand
        for images.
        """
        from vllm import SamplingParams  # noqa: PLC0415

        sampling = SamplingParams(
            max_tokens=count,
            temperature=0,
            logprobs=LOGPROBS,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        self.computed = self.hit = self.loaded = 0
        answers = self.llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
        return [self._plain(answer) for answer in answers]

    def _plain(self, answer: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's `RequestOutput`
        """Return an answer as values that a pipe can carry."""
        (text,) = answer.outputs
        return {
            "tokens": list(text.token_ids),
            "logprobs": [
                {token: entry.logprob for token, entry in step.items()}
                for step in text.logprobs or ()
            ],
            "finish": text.finish_reason,
            "length": len(answer.prompt_token_ids or ()),
            "computed": self.computed,
            "hit": self.hit,
            "loaded": self.loaded,
            "transfer": answer.kv_transfer_params,
        }

    def _replace_once(self, folder: str, source: str) -> None:
        """Replace the files in *folder* when the next request gets its blocks."""
        connector = self.scheduler.connector
        allocated = connector.update_state_after_alloc

        def replaced(*arguments: Any) -> None:  # noqa: ANN401
            allocated(*arguments)
            connector.update_state_after_alloc = allocated
            for path in Path(source).iterdir():
                shutil.copy(path, Path(folder) / path.name)

        connector.update_state_after_alloc = replaced

    def clear(self, value: float) -> bool:
        """Forget all cached prompts, and write *value* into all memory of the cache.

        Return False and write nothing if a request still holds blocks.
        """
        if self.held() or not self.llm.reset_prefix_cache():
            return False
        self.llm.collective_rpc(_fill, args=(value,))
        return True

    def held(self) -> int:
        """Take one step if there is work, and return the number of requests that hold blocks.

        Return 1 if pages are still being stored.
        """
        if self.scheduler.has_requests():
            self.llm.llm_engine.engine_core.get_output()
        return len(self.scheduler.requests) or int(self.scheduler.has_requests())

    def serve(self, pipe: Connection) -> None:
        """Answer commands until the other end of the pipe is closed."""
        pipe.send("ready")
        # Later engines have copies of the other end, so it stays open if the parent is killed.
        parent = os.getppid()
        while True:
            while not pipe.poll(REST):
                self.held()
                if os.getppid() != parent:
                    return
            try:
                name, *arguments = pipe.recv()
            except EOFError:
                return
            pipe.send(getattr(self, name)(*arguments))


def _fill(worker: Any, value: float) -> None:  # noqa: ANN401 - a worker of vLLM
    """Write *value* into the caches of one worker. No request may hold blocks."""
    for cache in worker.model_runner.kv_caches:
        # A layer with a recurrent state has several tensors.
        for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
            tensor.fill_(value)


def run(pipe: Connection, log: Path, environment: dict[str, str], *engine: Any) -> None:  # noqa: ANN401
    """Run an `Engine` until *pipe* ends."""
    os.setsid()
    errors = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
    for stream in (1, 2):
        os.dup2(errors, stream)
    logging.basicConfig(format="%(asctime)s %(process)d %(message)s")
    os.environ.update(environment)
    Engine(*engine).serve(pipe)
    # Workers end with the process. vLLM's exit handlers would only wait for them.
    os._exit(0)
