"""Start `sglang.launch_server` with the arguments of this program.

SGLang starts each of its processes anew, and each imports SGLang for a minute on a busy machine.
Without a GPU they can be forks of this process, which has imported it.
"""

import importlib
import multiprocessing
import runpy

if __name__ == "__main__":
    for module in ("managers.scheduler", "models.registry", "managers.detokenizer_manager"):
        importlib.import_module(f"sglang.srt.{module}")
    begin = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: begin("fork", force=True)  # type: ignore[assignment]
    runpy.run_module("sglang.launch_server", run_name="__main__")
