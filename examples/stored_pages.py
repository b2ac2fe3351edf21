"""Store 64 tokens at TP 8, stop, and continue at TP 3 with other blocks and another layout."""

import numpy as np

import kvspec
from kvspec.stored import MemoryObjects, ModelIdentity, PageStore, PromptIdentity, StoredSpec

MODEL = {"model": "org/m", "revision": "1", "weights": "", "quantization": "", "overrides": ""}
KEYS = {"total_num_kv_heads": 4, "head_size": 64, "dtype": "float16"}


def engine(tp_size, block_size, layout):
    """Return an engine that serves a model with two layers of four KV heads."""
    spec = kvspec.FullAttentionSpec(block_size=block_size, **KEYS)
    group = kvspec.KVCacheGroup(name="full", layers=["layers.0", "layers.1"], spec=spec)
    parallel = kvspec.ParallelConfig(tp_size=tp_size)
    return kvspec.EngineSpec(groups=[group], parallel=parallel, layout=layout)


writer, reader = engine(8, 16, "NHD"), engine(3, 24, "HND")
placement = StoredSpec.of(writer, page_tokens=32, head_groups=4)
store = PageStore(placement, ModelIdentity(**MODEL), MemoryObjects())
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

other = PageStore(placement, ModelIdentity(**MODEL | {"revision": "2"}), store.objects)
print(other.explain(other.names(range(70), PromptIdentity.of_text()), reader))
print(*other.other_spaces())
