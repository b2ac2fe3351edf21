"""One SGLang engine on a CPU, which answers requests to generate.

Run it with the Python of an environment that has SGLang, kvspec and NIXL. It reads one JSON object
a line from its input, and answers each with one line. The first line has the settings of
`sglang.Engine`; the answer to it is `"ready"`. Each other line is one request, or a list of
requests that run at the same time:

    {"prompt": [5, 6, 7], "count": 16, "room": 1, "host": "127.0.0.1", "port": 8998}

*room*, *host* and *port* are missing for an engine that computes prompts and answers alone. An
answer has the tokens, and for each token the log probabilities of the most probable ones.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

# Environment of an engine. It must be set before SGLang is imported.
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).parent / "stub"),
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
    "skip_server_warmup": True,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "log_level": "info",
}
# The same, for one side of a pair.
DECODE = {"disaggregation_decode_retraction_backup": "cpu_tensor"}
# Log probabilities that are compared for each token.
LOGPROBS = 5


def _other_models() -> str:
    """Return the names of the files of all other models."""
    (package,) = importlib.util.find_spec("sglang").submodule_search_locations  # type: ignore[union-attr,misc]
    files = Path(package, "srt", "models").glob("*.py")
    return ",".join(sorted(file.stem for file in files if file.stem not in MODELS))


async def _generate(engine: Any, request: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """Return the answer to one greedy request."""
    sampling = {"temperature": 0, "max_new_tokens": request["count"], "ignore_eos": True}
    transfer = {"bootstrap_" + name: request[name] for name in ("host", "port", "room")
                if name in request}  # fmt: skip
    try:
        answer = await engine.async_generate(
            input_ids=request["prompt"],
            sampling_params=sampling,
            return_logprob=True,
            top_logprobs_num=LOGPROBS,
            rid=request.get("rid"),
            **transfer,
        )
    except Exception as error:  # noqa: BLE001 - the outcome of the request
        return {"error": f"{type(error).__name__}: {error}"}
    information = answer["meta_info"]
    return {
        "tokens": answer["output_ids"],
        "logprobs": [
            {str(token): logprob for logprob, token, _ in step or ()}
            for step in information.get("output_top_logprobs", ())
        ],
        "own": [logprob for logprob, *_ in information.get("output_token_logprobs", ())],
        "finish": information.get("finish_reason"),
        "cached": information.get("cached_tokens"),
    }


async def _answer(engine: Any, command: Any) -> Any:  # noqa: ANN401
    if isinstance(command, list):
        return await asyncio.gather(*(_generate(engine, request) for request in command))
    if "abort" in command:
        # The answer of the aborted request shows that it has ended.
        task = asyncio.ensure_future(_generate(engine, command["abort"]))
        await asyncio.sleep(command["after"])
        engine.tokenizer_manager.abort_request(rid=command["abort"]["rid"])
        return await task
    return await _generate(engine, command)


def main() -> None:
    """Serve one engine until the input ends."""
    # All output of SGLang goes to the log, and answers to the first output.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = _other_models()
    import sglang  # noqa: PLC0415 - after the environment is set

    mode = settings.get("disaggregation_mode")
    engine = sglang.Engine(**SETTINGS | (DECODE if mode == "decode" else {}) | settings)
    loop = asyncio.get_event_loop()

    def answer(value: Any) -> None:  # noqa: ANN401
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer("ready")
    for line in sys.stdin:
        answer(loop.run_until_complete(_answer(engine, json.loads(line))))
    engine.shutdown()


if __name__ == "__main__":
    main()
