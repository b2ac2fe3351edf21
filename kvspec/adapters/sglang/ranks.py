"""SGLang's ranks.

Law: one engine is one group of attention ranks. With attention data parallelism the TP ranks are
cut into that many engines, each a run of consecutive ranks.
"""

from __future__ import annotations

from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.parallel import ParallelConfig, RankId


def parallel_config(
    tp_size: int, pp_size: int = 1, *, attn_dp_size: int = 1, dcp_size: int = 1
) -> ParallelConfig:
    """Return the parallel sizes of one engine of an SGLang server.

    *tp_size*: the server's; *attn_dp_size*: engines that share its ranks (`dp_size`, if
    `enable_dp_attention`). Tokens lie on decode-context ranks one by one.
    """
    return ParallelConfig(
        tp_size=_attention_tp(tp_size, attn_dp_size), pp_size=pp_size, dcp_size=dcp_size
    )


def worker_rank(
    tp_rank: int, pp_rank: int = 0, *, tp_size: int, attn_dp_size: int = 1
) -> tuple[int, RankId]:
    """Return which engine a server's rank is of, counted from 0, and which rank of that.

    >>> worker_rank(5, tp_size=8, attn_dp_size=4)
    (2, RankId(pp=0, pcp=0, tp=1))
    """
    size = _attention_tp(tp_size, attn_dp_size)
    if positive_int("tp_rank", tp_rank, least=0) >= tp_size:
        raise SpecError("tp_rank", tp_rank, f"less than tp_size={tp_size}")
    engine, own = divmod(tp_rank, size)
    return engine, RankId(pp=positive_int("pp_rank", pp_rank, least=0), tp=own)


def _attention_tp(tp_size: int, attn_dp_size: int) -> int:
    size, rest = divmod(
        positive_int("tp_size", tp_size), positive_int("attn_dp_size", attn_dp_size)
    )
    if rest:
        raise SpecError("attn_dp_size", attn_dp_size, f"a divisor of tp_size={tp_size}")
    return size
