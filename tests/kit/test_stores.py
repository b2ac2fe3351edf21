"""Level e of the kit: planted mistakes of a store, each of which the profile `ci` finds."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import count, product
from pathlib import Path
from textwrap import dedent
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from kvspec_system import SYSTEM

import kvspec
from kvspec.stored import ModelIdentity, PromptIdentity, StoredSpec
from kvspec.testing.differing import BASE, changed, prompt_pairs
from kvspec.testing.kit import Supports, System, Verdict, as_code, judge
from kvspec.testing.kit.axes import AXES
from kvspec.testing.kit.code import reproduction
from kvspec.testing.kit.guard import Guard
from kvspec.testing.kit.judging import (
    PROFILES,
    _drawn,
    _examples,
    _pairs,
    look,
    stored_of_each_kind,
)
from kvspec.testing.kit.words import described
from kvspec.testing.laws import LAWS, BrokenLawError
from kvspec.testing.laws.prompt_names import OTHER_PROCESS, first_difference
from kvspec.testing.laws.stored_pages import StoredCase
from kvspec.testing.stored import OwnStore, stored_cases
from kvspec.testing.world import World

NAMES, PAGES = LAWS[14], LAWS[15]
NARROW = Supports.only(kinds=["full"], max_tp=4, equal_tp=False)
CUT = attrs.evolve(NARROW, placements=True)
# The draws of the profile, with little time or none to shrink what is wrong.
CI = attrs.evolve(PROFILES["ci"], shrinking=1.0)
UNSHRUNK = attrs.evolve(CI, shrinking=0.0)


def storing(**answers: Callable[..., Any]) -> System:
    """Return a store of one kind of layers, with these answers."""
    return System(name="store", supports=NARROW, **answers)


def facts(report: Any) -> set[str]:
    """Return the values of the axis at which the system is wrong."""
    return {judgement.value for judgement in report.wrong}


# Names with a planted mistake. `hashed` is a chain of digests of all facts.


def hashed(
    model: ModelIdentity,
    prompt: PromptIdentity,
    placement: StoredSpec,
    token_ids: Sequence[int],
    *,
    without: str = "",
    seeds_first_only: bool = False,
) -> list[bytes]:
    """Return names of pages. Without a mistake, they depend on all that they should."""
    said = {**attrs.asdict(model), **attrs.asdict(prompt), "placement": placement.digest}
    said.pop(without, None)
    seed, size = repr(sorted(said.items())).encode(), placement.page_tokens
    names: list[bytes] = []
    for page in range(len(token_ids) // size):
        before = names[-1] if names else seed
        if seeds_first_only:
            before = b"" if names else seed
        tokens = repr((page, token_ids[page * size :][:size])).encode()
        names.append(hashlib.sha256(before + tokens).digest())
    return names


def prefixes(seed: str, token_ids: Sequence[int], size: int) -> list[str]:
    """Return a name of each prefix that ends with a page of *size* tokens."""
    digest, names = hashlib.sha256(seed.encode()), []
    for number, token in enumerate(token_ids, 1):
        digest.update(f",{token}".encode())
        if number % size == 0:
            names.append(digest.hexdigest())
    return names


def test_right_names_keep_law_15() -> None:
    report = judge(storing(names=hashed), axes=["names"], profile=UNSHRUNK)
    assert not report.wrong
    assert {"revision", "salt", "media", "token_ids", "page_tokens", "dtype"} <= {
        judgement.value for judgement in report.judgements if judgement.exact
    }


@pytest.mark.parametrize("field", ["model", "revision", "weights", "quantization", "overrides",
                                   "adapter", "media", "embeddings", "salt"])  # fmt: skip
def test_ci_finds_each_field_that_is_missing_in_the_names(field: str) -> None:
    def names(*arguments: Any) -> list[bytes]:
        return hashed(*arguments, without=field)

    report = judge(storing(names=names), axes=["names"], profile=UNSHRUNK)
    assert field in facts(report)
    assert all(field in fact for fact in facts(report))


def test_ci_finds_a_placement_that_is_missing_in_the_names() -> None:
    def names(*arguments: Any) -> list[bytes]:
        return hashed(*arguments, without="placement")

    assert {"dtype", "scales_digest"} == facts(
        judge(storing(names=names), axes=["names"], profile=UNSHRUNK)
    )
    whole = attrs.evolve(storing(names=names), supports=Supports())
    cuts = {"layout", "head_groups", "layer_ranges", "context_size"}
    assert {"dtype", "scales_digest"} | cuts == facts(
        judge(whole, axes=["names"], profile=UNSHRUNK)
    )


def test_ci_finds_names_of_prefixes_that_miss_the_page_size() -> None:
    """Page 0 of 4 tokens and page 1 of 2 tokens end at one token."""

    def names(*arguments: Any) -> list[str]:
        said = [attrs.asdict(each) for each in arguments[:2]]
        spec = arguments[2].groups[0].spec
        seed = f"{said}{spec.dtype}{spec.scales_digest}"
        return prefixes(seed, arguments[3], arguments[2].page_tokens)

    assert {"page_tokens"} == facts(judge(storing(names=names), axes=["names"], profile=UNSHRUNK))


def test_ci_finds_a_salt_that_only_the_first_name_depends_on() -> None:
    """The names of later pages depend on their own tokens alone."""

    def names(*arguments: Any) -> list[bytes]:
        return hashed(*arguments, seeds_first_only=True)

    report = judge(storing(names=names), axes=["names"], profile=UNSHRUNK)
    assert {"salt", "adapter", "revision", "token_ids"} <= facts(report)


def test_ci_finds_fields_that_are_joined_without_a_border() -> None:
    def names(model: Any, prompt: Any, placement: Any, token_ids: Any) -> list[str]:
        texts = (*attrs.astuple(model), prompt.adapter, prompt.embeddings, prompt.salt)
        joined = "".join(texts) + repr((prompt.media, placement.digest))
        return prefixes(joined, token_ids, placement.page_tokens)

    found = facts(judge(storing(names=names), axes=["names"], profile=UNSHRUNK))
    assert "weights and quantization" in found
    assert "salt" not in found


def test_ci_finds_names_that_depend_on_later_tokens_or_change() -> None:
    def names(model: Any, prompt: Any, placement: Any, token_ids: Any) -> list[bytes]:
        salted = attrs.evolve(prompt, salt=repr(token_ids))
        return hashed(model, salted, placement, token_ids)

    assert {"length", "token_ids"} <= facts(
        judge(storing(names=names), axes=["names"], profile=UNSHRUNK)
    )
    numbers = iter(range(10**9))
    report = judge(
        storing(names=lambda *_: [f"{next(numbers)}", "x"]), axes=["names"], profile=UNSHRUNK
    )
    assert "nothing" in facts(report)


def test_keys_of_one_page_are_all_compared() -> None:
    """A page has a key for each group, and one of them misses the salt."""

    def names(model: Any, prompt: Any, placement: Any, token_ids: Any) -> list[tuple[bytes, ...]]:
        plain = hashed(model, prompt, placement, token_ids, without="salt")
        whole = hashed(model, prompt, placement, token_ids)
        return [(b"a" + one, b"b" + other) for one, other in zip(plain, whole, strict=True)]

    found = facts(judge(storing(names=names), axes=["names"], profile=UNSHRUNK))
    assert {"salt"} == {fact for fact in found if " and " not in fact}


@pytest.mark.parametrize("answer", [None, 5, [b"a"], [1.0, 2.0], [(None,), ("a",)], [[1], [2]]])
def test_names_of_wrong_form_are_wrong(answer: Any) -> None:
    report = judge(storing(names=lambda *_: answer), axes=["names"], profile=UNSHRUNK)
    assert any(
        "names: expected" in each.wrong_case.fault for each in report.wrong if each.wrong_case
    )


def test_store_may_refuse_a_fact() -> None:
    def names(model: Any, prompt: Any, *rest: Any) -> list[bytes]:
        if prompt.media:
            raise NotImplementedError("images are not stored")
        return hashed(model, prompt, *rest)

    system = attrs.evolve(storing(names=names), refuses=(NotImplementedError,))
    report = judge(system, axes=["names"], profile=UNSHRUNK)
    assert not report.wrong
    # Other facts are judged in prompts with images, too, and in prompts without.
    never = {j.value for j in report.judgements if j.refused and not j.exact}
    assert {"media", "embeddings and media", OTHER_PROCESS} == never


def test_cut_of_the_pages_is_a_fact_only_if_the_store_follows_it() -> None:
    cuts = {"layout", "head_groups", "layer_ranges", "context_size"}
    assert cuts <= {pair.fact for pair in prompt_pairs()}
    assert not cuts & {pair.fact for pair in prompt_pairs(placements=False)}


def test_each_field_of_both_identities_differs_in_some_pair() -> None:
    fields = {
        field.name for kind in (ModelIdentity, PromptIdentity) for field in attrs.fields(kind)
    }
    assert fields <= {pair.fact for pair in prompt_pairs()}


@pytest.mark.parametrize(
    ("values", "position"),
    [({}, None), ({"salt": "x"}, 0), ({"token_ids": (10, 11, 9)}, 2), ({"token_ids": (10,)}, None),
     ({"media": [("a", 5, 2)]}, 5), ({"page_tokens": 2}, 0)],
)  # fmt: skip
def test_first_difference_is_the_first_position_with_other_values(
    values: dict[str, Any], position: int | None
) -> None:
    assert position == first_difference(BASE, changed(BASE, values))


def test_first_difference_of_items_is_where_they_end_or_begin() -> None:
    one = changed(BASE, {"media": [("a", 1, 2)]})
    assert 3 == first_difference(one, changed(BASE, {"media": [("a", 1, 3)]}))
    assert 1 == first_difference(one, changed(BASE, {"media": [("a", 2, 2)]}))


# Stores with a planted mistake. Each is kvspec's own store but for one method.


class PartialPages(OwnStore):
    """Saves the last page of a step although it is not full."""

    def save(self, here: World, tokens: range) -> None:
        """Round the end of the step up."""
        stop = min(-(-tokens.stop // self.page_tokens), len(self.names)) * self.page_tokens
        own: Any = here.case.request
        request = attrs.evolve(own, num_tokens=max(stop, own.num_tokens))
        case = attrs.evolve(here.case, request=request)
        super().save(attrs.evolve(here, case=case), range(tokens.start, request.num_tokens))


class SwappedHeads(OwnStore):
    """Pairs the ranks of two engines in the reverse order if their TP sizes differ."""

    def load(self, here: World) -> None:
        """Load the heads of another rank."""
        sizes = here.case.producer.parallel.tp_size, here.case.consumer.parallel.tp_size
        super().load(here)
        if sizes[0] != sizes[1]:
            arrays = [storage for _, storage in here.consumers.values()]
            for one, other in zip(arrays[: len(arrays) // 2], arrays[::-1], strict=False):
                for name in one:
                    one[name][:], other[name][:] = other[name].copy(), one[name].copy()


class Optimistic(OwnStore):
    """Finds each page of the prompt, stored or not."""

    def lookup(self, consumer: kvspec.EngineSpec) -> int:
        """Count the names."""
        super().lookup(consumer)
        return len(self.names) * self.page_tokens


class AnyRank(OwnStore):
    """Counts a page as stored if one object of it is there."""

    def lookup(self, consumer: kvspec.EngineSpec) -> int:
        """Look for one object of each page."""
        super().lookup(consumer)
        there = [
            any(self.store.has([name], [each])[0] for each in self.store.placement.objects)
            for name in self.names
        ]
        return (*there, False).index(False) * self.page_tokens

    def load(self, here: World) -> None:
        """Load what `PageStore` finds."""
        if self.hit:
            super().load(here)


class Nothing(OwnStore):
    """Saves nothing."""

    def save(self, here: World, tokens: range) -> None:
        """Do nothing."""


class Changing(OwnStore):
    """Writes to the blocks that it saves."""

    def save(self, here: World, tokens: range) -> None:
        """Save and then clear them."""
        super().save(here, tokens)
        for _, storage in here.producers.values():
            for array in storage.values():
                array[:] = 0


class Late(OwnStore):
    """Refuses a load that it has promised, after it has written."""

    def load(self, here: World) -> None:
        """Load and refuse."""
        super().load(here)
        raise kvspec.MismatchError([])


class Crashing(OwnStore):
    """Fails as a wrong key does."""

    def load(self, here: World) -> None:
        """Raise an error."""
        raise KeyError(len(here.consumers))


@lru_cache
def ci_cases() -> list[StoredCase]:
    """Return the cases that the profile `ci` draws for such a store."""
    (axis,) = [axis for axis in AXES if axis.name == "pages"]
    (narrow,) = axis.narrowed(CUT, ["full"])
    system = attrs.evolve(storing(pages=OwnStore), supports=CUT)
    number = _examples(axis, PROFILES["ci"])
    drawn = _drawn(_pairs(system, [PAGES], narrow), number, 0)
    return [case for case, _ in (*stored_of_each_kind(narrow, PROFILES["ci"], 0), *drawn)]


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (PartialPages, "load: consumer"), (SwappedHeads, "load: consumer"),
        (Optimistic, "lo"), (AnyRank, "load: "), (Nothing, "lookup: "),
        (Changing, "save: producer"), (Late, "load: bytes have moved"),
        (Crashing, "raised KeyError"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_ci_finds_each_mistake_of_a_store(store: Any, words: str) -> None:
    system = attrs.evolve(storing(pages=store), supports=CUT)
    guard = Guard(system, PROFILES["ci"].seconds)
    verdicts = ((case, look(guard, [PAGES], case)[16]) for case in ci_cases())
    case, fault = next((case, fault) for case, (verdict, fault) in verdicts if verdict == "wrong")
    assert words in fault
    code = reproduction(system, PAGES, case).replace("system = ...  # your system", "")
    with pytest.raises((BrokenLawError, KeyError)):
        exec(code, {"system": system})  # noqa: S102 - the code that a report prints
    assert any("steps" in line for line in described(case, PAGES))


def test_report_shows_the_smallest_case_of_a_store() -> None:
    report = judge(storing(pages=Nothing), axes=["pages"], profile=CI)
    found = report.wrong[0].wrong_case
    assert found is not None
    assert "lookup: " in found.fault
    assert "steps     end at" in report.to_html()


def test_store_of_whole_blocks_with_a_cut_of_its_own_gets_such_pages() -> None:
    supports = Supports.only(kinds=["full"], max_tp=2, equal_tp=False)

    @settings(max_examples=30)
    @given(stored_cases(supports=supports))
    def whole(case: StoredCase) -> None:
        sizes = [g.spec.block_size for e in (case.producer, case.consumer) for g in e.groups]
        assert not any(case.placement.page_tokens % size for size in sizes)
        assert 1 == case.placement.head_groups
        assert not case.loaded.request.cached_tokens

    whole()


class ToyStore:
    """A store of another author: it keeps each head of each token by itself, under its position."""

    def __init__(self, model: Any, prompt: Any, placement: StoredSpec, token_ids: Any) -> None:
        del model, prompt
        self.page_tokens, self.length = placement.page_tokens, len(token_ids)
        self.heads: dict[tuple[Any, ...], bytes] = {}

    def places(self, here: World, role: Any) -> Iterator[tuple[tuple[Any, ...], int, int]]:
        """Yield the key, the address and the bytes of each head of each token of a side."""
        case, ranks = here.case, here.producers if role == "producer" else here.consumers
        (group,) = case.producer.groups if role == "producer" else case.consumer.groups
        size = case.producer.parallel.tp_size
        size = size if role == "producer" else case.consumer.parallel.tp_size
        spec: Any = group.spec
        heads, table = spec.total_num_kv_heads, case.request.table(role, group.name)
        for rank, (cache, _) in ranks.items():
            own = range(rank.tp * heads // size, max(1, heads // size) + rank.tp * heads // size)
            for layer, part, (place, head) in product(group.layers, "kv", enumerate(own)):
                region = cache.region(layer, part)
                for token in range(table.first_token, case.request.num_tokens):
                    at, row = divmod(token - table.first_token, spec.block_size)
                    address = region.address(int(table.block_ids[at]), place, row)
                    yield (token, layer, part, head), address, region.content_bytes

    def save(self, here: World, tokens: range) -> None:
        """Save the heads of each token that is computed."""
        del tokens
        for key, address, size in self.places(here, "producer"):
            self.heads[key] = ctypes.string_at(address, size)

    def lookup(self, consumer: kvspec.EngineSpec) -> int:
        """Return the tokens of the pages of which each head is there."""
        (group,) = consumer.groups
        spec: Any = group.spec
        every = [*product(group.layers, "kv", range(spec.total_num_kv_heads))]
        whole = (all((token, *each) in self.heads for each in every) for token in count())
        return (
            next(n for n, there in enumerate(whole) if not there)
            // self.page_tokens
            * (self.page_tokens)
        )

    def load(self, here: World) -> None:
        """Write all heads that the consumers hold."""
        for key, address, size in self.places(here, "consumer"):
            ctypes.memmove(address, self.heads[key], size)


def test_store_of_another_author_with_a_cut_of_its_own_keeps_law_16() -> None:
    supports = attrs.evolve(NARROW, tp_multiples=True, even_heads=True)
    system = attrs.evolve(storing(pages=ToyStore), supports=supports)
    report = judge(system, axes=["pages"], profile=CI)
    assert not report.wrong
    values = {judgement.value for judgement in report.judgements if judgement.exact}
    assert {"equal TP", "multiple, producer larger TP", "a rank saves nothing"} <= values


def test_store_that_hangs_is_wrong() -> None:
    def hang(*_: object) -> Any:
        while True:
            pass

    profile = attrs.evolve(PROFILES["ci"], seconds=0.3)
    report = judge(storing(pages=hang), axes=["pages"], profile=profile)
    found = report.wrong[0].wrong_case
    assert found is not None
    assert "no answer within" in found.fault
    assert 'ask("pages"' in found.code


@settings(max_examples=20)
@given(stored_cases())
def test_code_builds_an_equal_stored_case(case: StoredCase) -> None:
    names: dict[str, Any] = {}
    exec(as_code(case), names)  # noqa: S102 - the code that is tested
    assert repr(case) == repr(names["case"])


def test_code_builds_equal_prompts() -> None:
    for pair in prompt_pairs():
        names: dict[str, Any] = {}
        exec(as_code(pair), names)  # noqa: S102 - the code that is tested
        assert pair == names["case"]
        assert list(described(pair, NAMES))


def test_reproduction_of_names_breaks_the_law() -> None:
    def names(*arguments: Any) -> list[bytes]:
        return hashed(*arguments, without="salt")

    (wrong, *_) = judge(storing(names=names), axes=["names"], profile=UNSHRUNK).wrong
    assert wrong.wrong_case is not None
    code = wrong.wrong_case.code.replace("system = ...  # your system", "")
    with pytest.raises(BrokenLawError):
        exec(code, {"system": storing(names=names)})  # noqa: S102 - the code of a report


def test_names_that_differ_in_another_process_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's `hash` of a text changes with the process."""
    code = """
        from kvspec.testing.kit import Supports, System

        def names(model, prompt, placement, token_ids):
            size, before, named = placement.page_tokens, repr((model, prompt, placement)), []
            for start in range(0, len(token_ids) - size + 1, size):
                before = hash(f"{before}{token_ids[start : start + size]}")
                named.append(before)
            return named

        SYSTEM = System(
            name="hash", names=names, where="hashing_store:SYSTEM", supports=Supports.only()
        )
    """
    (tmp_path / "hashing_store.py").write_text(dedent(code), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    system = import_module("hashing_store").SYSTEM
    assert {OTHER_PROCESS} == facts(judge(system, axes=["names"], profile=UNSHRUNK))
    other = attrs.evolve(system, names=hashed)
    pair = next(pair for pair in prompt_pairs() if pair.fact == OTHER_PROCESS)
    assert Verdict.NOT_JUDGED is look(Guard(other, 5.0), [NAMES], pair)[15][0]


def test_two_axes_need_a_store() -> None:
    report = judge(attrs.evolve(SYSTEM, names=None, pages=None), axes=["names", "pages"])
    assert not any(judgement.axis for judgement in report.judgements)
    assert {"names", "pages"} < {axis.name for axis in AXES}


def test_kvspec_keeps_law_15_in_each_pair() -> None:
    for pair in prompt_pairs():
        (verdict, _) = look(Guard(SYSTEM, 90.0), [NAMES], pair)[15]
        assert Verdict.EXACT is verdict
