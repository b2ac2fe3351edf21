"""Exchange prompts between a transformers model and other engines.

The adapter describes the cache of transformers 5.19, and recognises its classes by name. It was run
with that version. Nothing of transformers is imported: the caller passes a model and a cache.

How it works:
    A `Prompts` object describes one model and owns a buffer that a `Session` registers:

        prompts = Prompts(network, num_blocks=256)
        own = {"engine_id": "notebook", "model": "meta-llama/Llama-3.1-8B", "revision": "0e9e39f"}
        with NixlRank() as nixl, Session(nixl, prompts.cache, **own) as session:
            ticket = prompts.hold(session, "cmpl-1", input_ids)      # a producer
            prompts.load(session, ticket, input_ids, cache)          # a consumer
            network.generate(input_ids, past_key_values=cache)

    The description comes from running the model, not from its name (`probe`). A contiguous cache
    has no blocks and moves at each step, so `hold` copies a prompt into the buffer and `load`
    copies it out (`prompts`). Each kind of cache layer keeps other positions (`rows`).
"""

from kvspec.adapters.transformers.prompts import Prompts

__all__ = ["Prompts"]
