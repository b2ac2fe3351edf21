"""Store the pages of a prompt, stop, and continue in an engine of other sizes.

```sh
python examples/stored_pages.py
```
"""

from __future__ import annotations

import numpy as np

import kvspec
from kvspec.stored import MemoryObjects, ModelIdentity, PageStore, PromptIdentity, StoredSpec


def engine(tp_size: int, block_size: int, layout: str) -> kvspec.EngineSpec:
    """Return an engine that serves a model with two layers of four KV heads."""
    spec = kvspec.FullAttentionSpec(
        block_size=block_size, total_num_kv_heads=4, head_size=64, dtype="float16"
    )
    group = kvspec.KVCacheGroup(name="full", layers=["layers.0", "layers.1"], spec=spec)
    parallel = kvspec.ParallelConfig(tp_size=tp_size)
    return kvspec.EngineSpec(groups=[group], parallel=parallel, layout=layout)


def main() -> None:
    """Store 64 tokens at TP 8, and load them at TP 3 with other blocks."""
    writer, reader = engine(8, 16, "NHD"), engine(3, 24, "HND")
    placement = StoredSpec.of(writer, page_tokens=32, head_groups=4)
    model = {"model": "org/m", "revision": "1", "weights": "", "quantization": "", "overrides": ""}
    store = PageStore(placement, ModelIdentity(**model), MemoryObjects())
    print(store.store_plan(writer))
    names = store.names(range(70), PromptIdentity.of_text())
    for rank in writer.parallel.ranks:
        cache, arrays = kvspec.allocate(writer, rank, num_blocks=8)
        arrays["full"][:] = 1 + rank.tp // 2  # The number of its head, from 1 on.
        store.rank_pages(cache).save(names, 0, 2, {"full": [5, 2, 7, 0]})
    with store.lookup(names, reader) as hit:
        for rank in reader.parallel.ranks:
            cache, arrays = kvspec.allocate(reader, rank, num_blocks=8)
            store.rank_pages(cache).load(hit, hit.num_pages, {"full": [1, 6, 3]})
            print(f"{rank}: {hit.num_tokens} tokens of heads", np.unique(arrays["full"])[1:])
    other = PageStore(placement, ModelIdentity(**model | {"revision": "2"}), store.objects)
    print(other.explain(other.names(range(70), PromptIdentity.of_text()), reader))


if __name__ == "__main__":
    main()
