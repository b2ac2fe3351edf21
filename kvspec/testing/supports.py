"""What a system supports, as data: the strategies draw only cases inside of it.

How it works:
    Each field of `Supports` allows or limits one way in which two engines or a request can differ.
    The default allows all that kvspec can draw. `Supports.only` begins at the other end: two equal
    engines with TP 1, one kind of layer ("full"), one layout (LBHNC) and one policy (spread). So an
    author can begin with one kind of layer, and add one field after the other.

    >>> Supports().equal_tp, Supports.only(kinds=["full"]).equal_tp
    (False, True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import attrs

from kvspec.engines.letters import layout_letters
from kvspec.errors import SpecError
from kvspec.inputs import flag, positive_int, texts
from kvspec.ownership.replicas import known_policies

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec

Prefixes = Literal["none", "blocks", "any"]


def _names(value: Any) -> Any:  # noqa: ANN401 - `_is_names` checks it
    # A string is iterable too, so `texts` must refuse it.
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def _is_names(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not texts(attribute.name, value, "names"):
        raise SpecError(attribute.name, value, "one or more names, or None for all")


def _is_flag(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    flag(attribute.name, value)


def _is_size(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    positive_int(attribute.name, value)


def _is_prefixes(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value not in get_args(Prefixes):
        raise SpecError(attribute.name, value, f"one of {', '.join(get_args(Prefixes))}")


def _allowed(*, only: bool = False) -> bool:
    """Return a field that is True by default, and *only* in `Supports.only`."""
    allowed: bool = attrs.field(default=True, validator=_is_flag, metadata={"only": only})
    return allowed


def _required() -> bool:
    """Return a field that is False by default, and True in `Supports.only`."""
    required: bool = attrs.field(default=False, validator=_is_flag, metadata={"only": True})
    return required


def _some(only: str, *validators: Callable[[Any, Any, Any], None]) -> tuple[str, ...] | None:
    """Return a field of names that is None by default: all names. `Supports.only` has *only*."""
    some: tuple[str, ...] | None = attrs.field(
        default=None,
        converter=_names,
        validator=[_is_names, *validators],
        metadata={"only": (only,)},
    )
    return some


def _are_layouts(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:  # noqa: ANN401
    for name in value or ():
        layout_letters(name, attribute.name)


def _are_policies(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:  # noqa: ANN401
    # "nearest" needs the nodes of the ranks, which only cases of all policies have.
    policies = known_policies(None)
    for name in value or ():
        if name not in policies:
            raise SpecError(attribute.name, name, f"one of {quoted(policies)}")


def quoted(names: Iterable[str]) -> str:
    """Return *names* for a message. Some kinds have a comma in their name.

    >>> print(quoted(["full", "full, opaque"]))
    'full', 'full, opaque'
    """
    return ", ".join(map(repr, names))


def _most(default: int) -> int:
    """Return a field of a largest size, which is 1 in `Supports.only`."""
    most: int = attrs.field(default=default, validator=_is_size, metadata={"only": 1})
    return most


@attrs.frozen(kw_only=True)
class Supports:
    """The cases that a system supports. Each default allows all that the strategies can draw.

    Attributes:
        kinds: Kinds of layers, as keys of `strategies.KINDS`. None allows all kinds.
        hybrid: Whether a model may have groups of several kinds.
        windows: Whether kinds with a sliding window or a chunk are allowed. `Supports.only` allows
            those that *kinds* names.
        compressed: Whether one row of a block may stand for several tokens.
        key_content: Whether engines state what their keys mean, perhaps in two orders.
        max_tp: The largest TP size.
        equal_tp: Whether both engines must have the same TP size.
        tp_multiples: Whether one TP size must be a multiple of the other.
        even_heads: Whether the TP size must divide the number of units, or be a multiple of it.
        shardings: Whether an engine may state the units of each rank, uneven and in any order.
        max_pp: The largest number of pipeline stages.
        equal_pp: Whether both engines must have the same stages.
        dcp: Whether decode context ranks may divide the tokens.
        pcp: Whether there may be prefill context ranks.
        equal_blocks: Whether both engines must have the same block sizes.
        kernel_blocks: Whether blocks in memory may be smaller than blocks of the tables.
        layouts: Layouts of the engines, such as "LBHNC". None allows all that are legal for a kind.
        equal_layouts: Whether both engines must have the same layouts.
        padding: Whether there may be unused bytes after a page.
        transposed: Whether pages may store the keys of a head transposed or packed.
        prefixes: The tokens that the consumer has already: "none", whole "blocks", or "any".
        null_blocks: Whether tables may name a null block where a window has passed.
        late_tables: Whether tables may begin after token 0, or have more blocks than needed.
        retention: Whether one engine may keep other tokens of a layer than the other one.
        drafts: Whether an engine may exclude layers, such as those of a draft model.
        regrouped: Whether the engines may divide the layers into groups differently.
        shared: Whether the groups of an engine may share one memory, as in vLLM. Then all pages are
            padded to equal bytes. Such cases need *hybrid*, and a layout that begins with "LB".
        policies: Replica policies: "spread", "first" or "stripe". None allows all, also "nearest".
        placements: Whether a store cuts its pages into objects as a `StoredSpec` describes. If not,
            only the number of tokens of a page varies.
        lost: Whether notifications may be lost. Then only time frees a request.
        repeated: Whether notifications may arrive twice, or late.
        reused_ids: Whether a request id may be used again.

    >>> Supports(max_tp=8, prefixes="blocks").max_tp
    8
    """

    kinds: tuple[str, ...] | None = _some("full")
    hybrid: bool = _allowed()
    windows: bool = _allowed(only=True)
    compressed: bool = _allowed()
    key_content: bool = _allowed()
    max_tp: int = _most(12)
    equal_tp: bool = _required()
    tp_multiples: bool = _required()
    even_heads: bool = _required()
    shardings: bool = _allowed()
    max_pp: int = _most(3)
    equal_pp: bool = _required()
    dcp: bool = _allowed()
    pcp: bool = _allowed()
    equal_blocks: bool = _required()
    kernel_blocks: bool = _allowed()
    layouts: tuple[str, ...] | None = _some("LBHNC", _are_layouts)
    equal_layouts: bool = _required()
    padding: bool = _allowed()
    transposed: bool = _allowed()
    prefixes: Prefixes = attrs.field(
        default="any", validator=_is_prefixes, metadata={"only": "none"}
    )
    null_blocks: bool = _allowed()
    late_tables: bool = _allowed()
    retention: bool = _allowed()
    drafts: bool = _allowed()
    regrouped: bool = _allowed()
    shared: bool = _allowed()
    policies: tuple[str, ...] | None = _some("spread", _are_policies)
    placements: bool = _allowed()
    lost: bool = _allowed()
    repeated: bool = _allowed()
    reused_ids: bool = _allowed()

    @classmethod
    def only(cls, **fields: Any) -> Self:  # noqa: ANN401 - any field
        """Return the narrowest description, with *fields* set.

        Without *fields*, it is one "full" layer kind with layout "LBHNC" and policy "spread".

        >>> narrow = Supports.only(kinds=["full"], max_tp=8, equal_tp=False)
        >>> narrow.max_tp, narrow.equal_tp, narrow.equal_blocks, narrow.prefixes
        (8, False, True, 'none')
        """
        narrowest = {field.name: field.metadata["only"] for field in attrs.fields(cls)}
        return cls(**narrowest | fields)

    def fit(self, producer: EngineSpec, consumer: EngineSpec) -> bool:
        """Return whether two engines have the TP sizes, PP sizes and layouts of one legal case.

        Only the fields that compare both engines count: `equal_tp`, `tp_multiples`, `equal_pp` and
        `equal_layouts`.
        """
        first, second = producer.parallel, consumer.parallel
        sizes = sorted((first.tp_size, second.tp_size))
        layouts = [
            {layer: engine.layout_of(group) for group in engine.groups for layer in group.layers}
            for engine in (producer, consumer)
        ]
        both = layouts[0].keys() & layouts[1].keys()
        return not (
            (self.equal_tp and sizes[0] != sizes[1])
            or (self.tp_multiples and sizes[1] % sizes[0])
            or (self.equal_pp and first.pp_size != second.pp_size)
            or (
                self.equal_layouts and any(layouts[0][layer] != layouts[1][layer] for layer in both)
            )
        )


EVERYTHING = Supports()
"""All that the strategies can draw."""
