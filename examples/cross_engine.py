"""Load the cache of a transformers model into the memory of an engine with another key order.

```sh
pip install transformers
python examples/cross_engine.py
```

The other engine has two ranks, blocks of 32 tokens, heads outermost, and rotated keys in pairs as
llama.cpp has. transformers has one rank and rotated keys in halves. kvspec puts each element in
its place. docs/cross-engine.md lists pairs of real engines.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import secrets
import sys
from typing import Any

import attrs

import kvspec
from kvspec.nixl import NixlRank
from kvspec.session import Session

TOKENS = 40


def other_maker(one: kvspec.EngineSpec) -> kvspec.EngineSpec:
    """Return the engine of another maker for the model of *one*."""
    groups = []
    for group in one.groups:
        spec: Any = group.spec
        keys = attrs.evolve(spec.key_content, rotary="pairs")
        groups.append(attrs.evolve(group, spec=attrs.evolve(spec, block_size=32, key_content=keys)))
    parallel = kvspec.ParallelConfig(tp_size=2)
    return kvspec.EngineSpec(groups=groups, parallel=parallel, layout="LBHNC")


def main() -> int:
    """Compute a prompt with transformers, load it as the other maker, and compare the keys."""
    for needed in ("transformers", "torch", "nixl"):
        if importlib.util.find_spec(needed) is None:
            print(f"skipped: needs {needed}: pip install {needed}")
            return 0
    import torch  # noqa: PLC0415 - see above
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    from kvspec.adapters.transformers import Prompts  # noqa: PLC0415

    os.environ.setdefault("KVSPEC_SECRET", secrets.token_hex())
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    network = LlamaForCausalLM(config).eval()
    prompt = torch.randint(0, 64, (1, TOKENS))
    prompts = Prompts(network, num_blocks=16)
    settings: Any = {"model": "tiny-llama", "revision": "1", "background": True}
    producer = Session(NixlRank(), prompts.cache, engine_id="transformers", **settings)
    with torch.no_grad():
        network(prompt, past_key_values=(truth := DynamicCache(config=config)))
    ticket = prompts.hold(producer, "prompt", prompt)
    print("keys of transformers:", prompts.cache.engine.groups[0].spec.key_content)

    engine = other_maker(prompts.cache.engine)
    for rank in engine.parallel.ranks:
        cache, memory = kvspec.allocate(engine, rank, num_blocks=8)
        given: Any = {"engine_id": "other", "epoch": 1, "owner": memory, **settings}
        with NixlRank() as nixl, Session(nixl, cache, **given) as session:
            blocks = {group.name: [3, 6] for group in engine.groups}
            # All tokens are loaded, to compare keys. An engine would leave out the last one: it
            # computes that token itself, to sample the next.
            request = ticket.request("prompt", TOKENS, blocks)
            session.load(request, ticket=ticket, timeout=20).wait()
        # Block 6 begins with token 32. Rank tp holds head tp, whose keys are now in pairs.
        region = next(each for each in cache.regions if each.part == "k")
        stored = ctypes.string_at(region.address(6, 0, 5), region.content_bytes)
        halves = truth.layers[0].keys[0, rank.tp, 37].numpy()
        pairs = halves.reshape(2, -1).T.ravel()
        print(f"key of token 37 on rank {rank}:", stored == pairs.tobytes())
    producer.close()
    producer.nixl.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
