"""Ownership: which rank holds which tokens and units, and where two shardings overlap.

Invariant: the sharding of each engine is an input. kvspec intersects two shardings, and never
derives the place of a byte from a ratio of two TP sizes. No module here knows a kind of layer, a
layout or memory.

How it works:
    A layer is reduced to *parts* (`part`). A part has *units*, such as the KV heads of the model,
    and tensor parallelism divides the units among ranks (`sharding`). Two ranks exchange the units
    that both own (`slices`). With 8 heads, a producer of TP 2 and a consumer of TP 3:

        head             0  1  2  3  4  5  6  7
        producer rank    0  0  0  0  1  1  1  1
        consumer rank    0  0  1  1  1  2  2  2

    Consumer rank 1 owns heads 2, 3 and 4. It reads heads 2 and 3 from producer rank 0, and head 4
    from producer rank 1. Neither size divides the other, so no ratio gives this result.

    If several producer ranks own the same units, they are *replicas*, and a policy chooses which
    one is read (`replicas`). The policy `stripe` reads all of them in turns (`stripes`). Under
    context parallelism, ranks own tokens as well as units (`tokens`).
"""
