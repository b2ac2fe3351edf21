"""Print a case as Python code that builds it again. Only fields that differ from defaults appear.

How it works:
    Each value of kvspec is an attrs class whose public name is in `kvspec`. So its code is the name
    and the fields that differ from their defaults. Values that would appear twice, such as the
    groups of both engines, get a name of their own.

    >>> import kvspec
    >>> print(expression(kvspec.RankId(tp=1)))
    kvspec.RankId(tp=1)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvspec.descriptors.request import BlockTable
from kvspec.stored import ModelIdentity, PromptIdentity, StoredSpec
from kvspec.testing.case import Case
from kvspec.testing.laws.prompt_names import PagedPrompt, PromptPair
from kvspec.testing.laws.release import Script
from kvspec.testing.laws.stored_pages import StoredCase, StoredStep
from kvspec.tickets import MediaItem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvspec.testing.laws import Judged, Law, System

WIDTH = 96
# Where the code finds a class that is not in `kvspec` itself. Those without a module are imported.
_PLACES: dict[type, str] = {}
_PLACES |= dict.fromkeys((ModelIdentity, PromptIdentity, StoredSpec), "kvspec.stored.")
_PLACES |= dict.fromkeys((Case, PagedPrompt, PromptPair, StoredCase, StoredStep), "")
_PLACES[MediaItem] = "kvspec.tickets."
_IMPORTS: dict[type, str] = {
    Case: "from kvspec.testing import Case",
    PromptPair: "from kvspec.testing.laws.prompt_names import PagedPrompt, PromptPair",
    StoredCase: "from kvspec.testing.laws.stored_pages import StoredCase, StoredStep",
}


def as_code(case: Judged, other: Case | None = None) -> str:
    """Return Python code that builds *case*, and *other* if it is given.

    Args:
        case: The case, or another thing that a law judges. The code names it ``case``.
        other: A second case, which the code names ``other``.

    Returns:
        Lines of code. They run without other names, and the result equals the case.

    >>> import kvspec
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    >>> engine = kvspec.EngineSpec(groups=[kvspec.KVCacheGroup(name="g", layers=["l"], spec=spec)])
    >>> request = kvspec.TransferRequest(
    ...     request_id="r", num_tokens=2, producer_blocks={"g": [0]}, consumer_blocks={"g": [1]}
    ... )
    >>> case = Case(
    ...     producer=engine, consumer=engine, producer_pool={"g": 2}, consumer_pool={"g": 2},
    ...     request=request,
    ... )
    >>> scope = {}
    >>> exec(as_code(case), scope)
    >>> scope["case"] == case
    True
    """
    cases: dict[str, Any] = {"case": case} | ({} if other is None else {"other": other})
    lines = ["import kvspec", *filter(None, [_IMPORTS.get(type(case))]), ""]
    names: dict[Any, str] = {}
    for value in _repeated(cases.values()):
        name = _name_of(value, names.values())
        lines.append(f"{name} = {expression(value, names, len(name) + 3)}")
        names[_key(value)] = name
    for name, each in cases.items():
        lines.append(f"{name} = {expression(each, names, len(name) + 3)}")
    return "\n".join(lines) + "\n"


def _key(value: object) -> tuple[type, str]:
    """Return a key that equal values of one class share. Values with arrays have no hash."""
    return type(value), repr(value)


def _repeated(cases: Iterable[Any]) -> Iterator[Any]:
    """Yield the engines' groups and specs that occur more than once, the inner ones first."""
    sides = ("producer", "consumer")
    engines = [getattr(case, side) for case in cases for side in sides if hasattr(case, side)]
    for values in (
        [group.spec for engine in engines for group in engine.groups],
        [group for engine in engines for group in engine.groups],
        engines,
    ):
        count: dict[Any, int] = {}
        for value in values:
            count[_key(value)] = count.get(_key(value), 0) + 1
        first = {_key(value): value for value in values}
        yield from (value for key, value in first.items() if count[key] > 1)


def _name_of(value: object, taken: Iterable[str]) -> str:
    base = {"KVCacheGroup": "group", "EngineSpec": "engine"}.get(type(value).__name__, "spec")
    number = sum(name.startswith(base) for name in taken)
    return f"{base}_{number + 1}" if number else base


def expression(
    value: object, names: Mapping[Any, str] | None = None, indent: int = 0, depth: int = 0
) -> str:
    """Return code whose value equals *value*, in lines of at most `WIDTH` characters if possible.

    Args:
        value: A value of kvspec, or of Python's own kinds.
        names: Names of values that the code before has assigned, by `_key`.
        indent: Characters before the first line.
        depth: Number of levels of brackets around the value.
    """
    names = names or {}
    if attrs.has(type(value)) and _key(value) in names:
        return names[_key(value)]
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, BlockTable) and not value.first_token:
        value = value.block_ids.tolist()
    head, members, tail = _parts(value)
    if members is None:
        text = repr(value)
        return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text else text
    inner = [(key, expression(member, names, 0, depth + 1)) for key, member in members]
    line = head + ", ".join(key + text for key, text in inner) + tail
    if indent + 4 * depth + len(line) <= WIDTH and "\n" not in line:
        return line
    pad = "    " * (depth + 1)
    return f"{head}\n" + "".join(f"{pad}{key}{text},\n" for key, text in inner) + pad[4:] + tail


_Members = list[tuple[str, Any]]


def _parts(value: object) -> tuple[str, _Members | None, str]:
    """Return the opening of the code of *value*, its members with their keys, and the closing."""
    if isinstance(value, Mapping):
        return "{", [(f"{expression(key)}: ", member) for key, member in value.items()], "}"
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        # A tuple of one member needs a comma. A list is equal after kvspec's conversion.
        return "[", [("", member) for member in value], "]"
    if attrs.has(type(value)):
        place = _PLACES.get(type(value), "kvspec.")
        return f"{place}{type(value).__name__}(", list(_fields(value)), ")"
    return "", None, ""


def _fields(value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - an attrs value
    """Yield the fields of an attrs value that differ from their defaults."""
    for field in attrs.fields(type(value)):
        member = getattr(value, field.name)
        if not field.init or field.name.startswith("_"):
            continue
        default: Any = field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory(value) if default.takes_self else default.factory()
        if default is attrs.NOTHING or not _equals(member, default):
            yield f"{field.name}=", member


def _equals(member: object, default: object) -> bool:
    """Return whether a field has its default. An empty mapping of any class counts as empty."""
    if isinstance(member, Mapping) and not member:
        return not default
    return type(member) is type(default) and repr(member) == repr(default)


def reproduction(
    system: System,
    law: Law,
    case: Judged,
    other: Case | None = None,
    *,
    seconds: float | None = None,
) -> str:
    """Return Python code that judges *system* by *law* in *case* and raises `BrokenLawError`.

    The code imports the system if it has a name in a module, see `System.where`. If it has none,
    the first line says which name to define.

    Args:
        system: The system.
        law: The law.
        case: The case, or the script if the law is about releases.
        other: The second case, if the law compares two.
        seconds: The time limit of each question, if only a `Guard` finds the fault.
    """
    module, _, name = system.where.partition(":")
    given = f"from {module} import {name} as system" if module else "system = ...  # your system"
    guard = "" if seconds is None else f"Guard(system, {seconds:g})"
    if guard:
        given = f"from kvspec.testing.kit.guard import Guard\n\n{given}"
    if isinstance(case, Script):
        steps = ", ".join(map(str, case.steps))
        lines = ("from kvspec.testing.laws import release", "", given, "")
        play = f'{guard}.ask("release", release.play, ' if guard else "release.play("
        played = f"fault = {play}system.release, release.Script([{steps}]))"
        return "\n".join([*lines, played, "assert fault is None, fault", ""])
    check = f"laws.LAWS[{law.number - 1}].check"
    arguments = "system, case" if other is None else "system, case, other"
    if guard and isinstance(case, StoredCase):
        check = f'{guard}.ask("pages", {check}, {arguments})  # {law}'
    else:
        given += f"\n\nsystem = {guard}.guarded()" if guard else ""
        check = f"{check}({arguments})  # {law}"
    before = "from kvspec.testing import laws"
    own = _IMPORTS[type(case)]
    imports = f"{own}, laws" if isinstance(case, Case) else f"{before}\n{own}"
    code = as_code(case, other).replace(f"{own}\n", f"{imports}\n\n{given}\n", 1)
    return f"{code}{check}\n"
