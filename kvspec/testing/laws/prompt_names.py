"""The law of names: pages whose values may differ never share a name.

Law 15.

How it works:
    A system names the pages of two prompts. The law compares the facts behind a page, position by
    position: the model, the placement and the rest of the prompt count for all pages, a token or
    an item of media only from its position on.

        page tokens 4           page 0    page 1    page 2
        tokens of one           1 2 3 4   5 6 7 8   9 9 9 9
        tokens of the other     1 2 3 4   5 6 0 8   9 9 9 9
        names                   equal     differ    differ

    One pair is named in another process, too: Python's `hash` of a text is another one there.

    A short name is shared by chance. With 48 bits, two of 2**24 pages have equal names in every
    second store. So the names of a long prompt must differ in enough bits. A place in the name
    with 16 different digits counts 4 bits, a place with one digit none.
"""

from __future__ import annotations

import ast
import inspect
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product, zip_longest
from typing import TYPE_CHECKING, Any

import attrs

from kvspec.testing.laws.system import NothingToJudgeError
from kvspec.testing.world import WrongFormError

if TYPE_CHECKING:
    from kvspec.stored.names import ModelIdentity, PromptIdentity
    from kvspec.stored.placement import StoredSpec
    from kvspec.testing.laws.system import System, Trial


def _ids(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(token_ids)


@attrs.frozen(kw_only=True)
class PagedPrompt:
    """All that the name of a page may depend on.

    Attributes:
        model: The weights.
        prompt: Everything else of the prompt but its tokens.
        placement: The pages.
        token_ids: The tokens.
    """

    model: ModelIdentity
    prompt: PromptIdentity
    placement: StoredSpec
    token_ids: tuple[int, ...] = attrs.field(converter=_ids)


Keys = tuple[object, ...]
"""The keys of one page, which may have several objects."""
MANY = 1024
"""The pages of a prompt that show how many bits a name has."""
_LEAST_BITS = 64
_MOST_BITS = 512  # Of a name that is a number.
OTHER_PROCESS = "another process"
"""The fact of two equal prompts of which another process names the second one."""
_SECONDS = 60.0
_NAME_IT = """
import pickle, sys
from {module} import {name} as system
each = pickle.loads(sys.stdin.buffer.read())
names = system.names(each.model, each.prompt, each.placement, each.token_ids)
print()
print(list(names))
"""


@attrs.frozen(kw_only=True)
class PromptPair:
    """Two prompts, whose names are compared.

    Attributes:
        fact: The fact in which they differ, such as "salt".
        one: A prompt.
        other: Another one, or an equal one.
    """

    fact: str
    one: PagedPrompt
    other: PagedPrompt


def first_difference(one: PagedPrompt, other: PagedPrompt) -> int | None:
    """Return the first position from which two prompts may have other values.

    None if no position of both differs: the prompts are equal, or one continues the other.
    """
    whole = [
        (each.model, each.placement, attrs.evolve(each.prompt, media=())) for each in (one, other)
    ]
    if whole[0] != whole[1]:
        return 0
    ends = [item.start + item.length for each in (one, other) for item in each.prompt.media or ()]
    count = min(len(one.token_ids), len(other.token_ids))
    for position in range(max([count, *ends])):
        seen = [
            (
                each.token_ids[position : position + 1] if position < count else (),
                _media(each, position),
            )
            for each in (one, other)
        ]
        if seen[0] != seen[1]:
            return position
    return None


def _media(prompt: PagedPrompt, position: int) -> set[tuple[str, int]]:
    """Return the items at *position*, each with the place of the position in it."""
    return {
        (item.identifier, position - item.start)
        for item in prompt.prompt.media or ()
        if item.start <= position < item.start + item.length
    }


def names(trial: Trial) -> Iterator[str]:
    """Yield each pair of pages that share a name, or should share one and do not."""
    pair: Any = trial.case
    ask = _named_elsewhere if pair.fact == OTHER_PROCESS else _named
    one, other = _named(trial.system, pair.one), ask(trial.system, pair.other)
    for own in (one, other):
        yield from _repeated(own)
    position = first_difference(pair.one, pair.other)
    size = pair.one.placement.page_tokens
    differs = len(one) + len(other) if position is None else position // size
    yield from (
        f"{words}, but the prompts differ in {pair.fact}" for words in _shared(one, other, differs)
    )
    # Once is enough: all long prompts have as many bits.
    if len(one) >= MANY and pair.one == pair.other and (bits := _bits(one)) < _LEAST_BITS:
        yield (
            f"the names of {len(one)} pages differ in at most {bits:.0f} bits, but {_LEAST_BITS}"
            " are needed, so that the pages of a store have different names"
        )
    # Items of media may be in all names, which costs hits but no wrong bytes.
    if attrs.evolve(pair.one, token_ids=()) == attrs.evolve(pair.other, token_ids=()):
        yield from _missed(one, other, differs)
    elif position is None:
        raise NothingToJudgeError("no page must differ, and none must be equal")


def _repeated(named: Sequence[Keys]) -> Iterator[str]:
    """Yield each key that two pages of one prompt have."""
    for key, pages in _places(named).items():
        if len(pages) > 1:
            yield f"pages {pages[0]} and {pages[1]} of one prompt have {key!r}"


def _shared(one: Sequence[Keys], other: Sequence[Keys], differs: int) -> Iterator[str]:
    """Yield each key that pages of two prompts share, which differ from page *differs* on."""
    elsewhere = _places(other)
    for key, pages in _places(one).items():
        for page, place in product(pages, elsewhere.get(key, ())):
            if page != place or page >= differs:
                yield f"page {page} of one prompt and page {place} of the other have {key!r}"


def _missed(one: Sequence[Keys], other: Sequence[Keys], differs: int) -> Iterator[str]:
    """Yield each page before page *differs* that has not the same keys in both prompts."""
    for page, (name, its) in enumerate(zip(one[:differs], other, strict=False)):
        if set(name) != set(its):
            yield (
                f"page {page}: expected one name, since both prompts are equal up to its end,"
                f" got {_shown(name)} and {_shown(its)}"
            )


def _places(named: Iterable[Keys]) -> dict[object, list[int]]:
    """Return the pages of each key, without those that a page has twice."""
    places: dict[object, list[int]] = {}
    for page, keys in enumerate(named):
        for key in dict.fromkeys(keys):
            places.setdefault(key, []).append(page)
    return places


def _bits(named: Sequence[Keys]) -> float:
    """Return the bits in which the names of pages differ: the least of all keys of a page.

    >>> _bits([(f"m-{number:02x}",) for number in range(256)])
    8.0
    """
    return min((_bits_of(keys) for keys in zip(*named, strict=False)), default=0.0)


def _bits_of(keys: Iterable[object]) -> float:
    texts = [_digits(key) for key in keys]
    places = zip_longest(*texts)
    return sum(math.log2(len(set(digits))) for digits in places)


def _digits(key: object) -> str:
    """Return *key* as a text. Few names show all 256 values of a byte, but both of a bit."""
    if isinstance(key, int):
        return f"{key % (1 << _MOST_BITS):0{_MOST_BITS}b}"
    return "".join(f"{byte:08b}" for byte in key) if isinstance(key, bytes) else str(key)


def _shown(keys: Keys) -> str:
    return ", ".join(sorted(map(repr, keys)))


def _named(system: System, prompt: PagedPrompt) -> list[Keys]:
    """Return the keys of each whole page that *system* names.

    Raises:
        WrongFormError: If the answer has another form.
    """
    ask: Any = system.names
    return _keys(ask(prompt.model, prompt.prompt, prompt.placement, prompt.token_ids), prompt)


def _named_elsewhere(system: System, prompt: PagedPrompt) -> list[Keys]:
    """Return the names that another process computes, which imports the system.

    Raises:
        NothingToJudgeError: If it cannot, or the functions of the imported system are others.
    """
    module, _, name = system.where.partition(":")
    found = getattr(sys.modules.get(module), name, None)
    asked: Any = system.names
    if found is None or found.names is not inspect.unwrap(asked):
        raise NothingToJudgeError("no other process can import this system")
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    paths = os.pathsep.join(filter(None, sys.path))
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter
            [sys.executable, "-c", _NAME_IT.format(module=module, name=name)],
            input=pickle.dumps(prompt),
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
            capture_output=True,
            check=True,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NothingToJudgeError(f"another process did not name the pages: {error}") from error
    return _keys(ast.literal_eval(done.stdout.decode().splitlines()[-1]), prompt)


def _keys(answer: object, prompt: PagedPrompt) -> list[Keys]:
    """Return the keys of each page in the *answer* of a system. Raise if it has another form."""
    pages = len(prompt.token_ids) // prompt.placement.page_tokens
    named = list(answer) if isinstance(answer, Iterable) else None
    if named is None or isinstance(answer, (str, bytes)) or len(named) != pages:
        raise WrongFormError(f"names: expected a list of {pages} names, got {answer!r}")
    return [tuple(map(_key, name if isinstance(name, tuple) else (name,))) for name in named]


def _key(key: object) -> object:
    if not isinstance(key, (str, bytes, int)):
        raise WrongFormError(f"names: expected a str, bytes or int for each key, got {key!r}")
    return key
