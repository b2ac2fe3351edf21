"""Plan a transfer between two engines, explain it, count it and draw it.

```sh
python examples/plan_and_explain.py
python examples/plan_and_explain.py --model DeepSeek-V3 --producer 8 --consumer 4 --svg plan.svg
```

It needs no GPU and no transport: the plan follows from the two descriptions alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import kvspec
from kvspec.draw import plan_svg
from kvspec.models import catalogue


def main() -> None:
    """Describe both engines, and print what the plan contains."""
    parser = argparse.ArgumentParser(description="Plan a transfer between two engines.")
    parser.add_argument("--model", default="Llama-3.1-8B", choices=catalogue.names())
    parser.add_argument("--producer", type=int, default=16, help="TP size of the producer")
    parser.add_argument("--consumer", type=int, default=3, help="TP size of the consumer")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--svg", type=Path, help="also draw the plan")
    options = parser.parse_args()

    # 1. An engine has the groups of layers of its model, parallel sizes, and a memory layout.
    groups = kvspec.models.from_config(catalogue.config(options.model), block_size=16)
    producer, consumer = (
        kvspec.EngineSpec(groups=groups, parallel=kvspec.ParallelConfig(tp_size=tp_size))
        for tp_size in (options.producer, options.consumer)
    )

    # 2. The plan: which rank reads which heads of the model from which rank.
    plan = kvspec.plan_transfer(producer, consumer)
    print(kvspec.explain(plan))

    # 3. Ranks that no consumer reads still hold the request, and wait for a notification.
    unread = [str(rank) for rank in producer.parallel.ranks if not plan.targets(rank)]
    print("\nheld, but read by nobody:", *unread or ["none"])

    # 4. The bytes and descriptors of one prompt, on each link.
    print(f"\n{kvspec.traffic(plan, options.tokens)}")

    # 5. The time of the slowest link, if three such consumers read at once.
    simulation = kvspec.analysis.simulate(
        (producer, consumer),
        num_tokens=options.tokens,
        consumers=3,
        out_speed=50e9,  # bytes per second of each producer rank
        in_speed=50e9,  # bytes per second of each consumer rank
    )
    print()
    for load in simulation.policies:
        print(f"policy {load.replica_policy}: at least {load.seconds * 1e3:.2f} ms")

    if options.svg:
        options.svg.write_text(plan_svg(plan), encoding="utf-8")
        print("wrote", options.svg)

    # 6. What cannot fit is refused with the field, both values and the reason.
    spec = kvspec.MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16")
    latent = kvspec.KVCacheGroup(name="latent", layers=groups[0].layers, spec=spec)
    try:
        kvspec.plan_transfer(producer, kvspec.EngineSpec(groups=[latent]))
    except kvspec.MismatchError as error:
        print("\nrefused:", error.mismatches[0])


if __name__ == "__main__":
    main()
