"""Follow docs/spec.md rule by rule, from the JSON alone, and compare with all committed vectors.

Nothing of the library is imported. Unlike the planners in C++ and Rust, this one knows recurrent
states, page formats, notifications and steps, so every rule of the page is checked.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import product
from math import gcd, lcm
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "vectors"
FILES = sorted(FOLDER.glob("*.json.gz"))
Json = Any
Context = tuple[int, int, int]
# Producer, consumer, layer, part, units, producer units, consumer units, stripe.
Slice = tuple[Any, ...]
# Rank, memory, offset.
Place = tuple[int, int, int]
EVERY_POSITION: Context = (0, 1, 1)


def owns(context: Context, position: int) -> bool:
    """Rule 2."""
    rank, size, run = context
    return position // run % size == rank


def local(context: Context, position: int) -> int:
    """Rule 2."""
    rank, size, run = context
    turn = run * size
    return position // turn * run + min(max(position % turn - rank * run, 0), run)


class Engine:
    """One engine of a vector."""

    def __init__(self, engine: Json) -> None:
        self.json = engine
        self.ranks = engine["ranks"]
        self.groups = {layer: g for g in engine["groups"] for layer in layers_of(g)}
        self.kinds = {
            layer: kind
            for group in engine["groups"]
            for kind in group["kinds"]
            for layer in kind["layers"]
        }
        self.excluded = {layer for g in engine["groups"] for layer in g.get("excluded", ())}

    @cached_property
    def stage(self) -> dict[str, int]:
        """Rule 1: the stage of each layer."""
        if "stages" in self.json:
            return {name: at for at, names in enumerate(self.json["stages"]) for name in names}
        if self.json["pp_size"] == 1:
            return dict.fromkeys(self.groups, 0)
        number = {layer: int(re.findall(r"\d+", layer)[0]) for layer in self.groups}
        order, size = sorted(set(number.values())), self.json["pp_size"]
        return {
            layer: next(
                s
                for s in range(size)
                if s * len(order) // size <= order.index(n) < (s + 1) * len(order) // size
            )
            for layer, n in number.items()
        }

    def is_ring(self, layer: str) -> bool:
        """Whether a request has one block in this layer."""
        return self.kinds[layer]["live"]["rule"].startswith("ring")

    def part(self, layer: str, name: str) -> Json:
        """Return the part *name* of a layer."""
        return next(part for part in self.kinds[layer]["parts"] if part["name"] == name)

    def units(self, part: Json, rank: int) -> tuple[int, int]:
        """Rule 1: the units of a rank."""
        tp, size = self.ranks[rank]["tp"], self.json["tp_size"]
        if "ranges" in part:
            start, stop = part["ranges"][tp]
            return start, stop
        grain = part["granularity"]
        packs = part["units"] // grain
        start = tp * packs // size
        return start * grain, ((tp + 1) * packs // size if packs >= size else start + 1) * grain

    def context(self, layer: str, rank: int) -> Context:
        """Rule 2: the positions of a rank."""
        pcp, tp, dcp = self.ranks[rank]["pcp"], self.ranks[rank]["tp"], self.json["dcp_size"]
        own, size = pcp * dcp + tp % dcp, self.json["pcp_size"] * dcp
        if rows := self.json.get("context_ranks"):
            own, size = rows[pcp][tp], 1 + max(number for row in rows for number in row)
        sharded = size > 1 and self.groups[layer].get("context_sharded", True)
        return (own, size, self.json["interleave_size"]) if sharded else EVERY_POSITION

    def bytes(
        self, rank: int, tables: Json, layer: str, part: Json, row: int, unit: int, last: int
    ) -> list[Place]:
        """Rule 3: where the bytes of a row of one unit are, in the common order.

        *row* is a position, or the number of a row of a state. *unit* counts the rank's units.
        """
        regions = self.ranks[rank]["regions"]
        region = next(r for r in regions if (r["layer"], r["part"]) == (layer, part["name"]))
        group = self.groups[layer]
        table, size = tables[group["name"]], group["block_size"]
        ids, first = table["ids"], table["first_token"]
        if part["tokens_per_state"]:
            context, kernel = self.context(layer, rank), group["memory_block_size"]
            n = local(context, row) - first // context[1]
            place = 0 if self.is_ring(layer) else n // size
            block = ids[place] * (size // kernel) + n % size // kernel
            state = n % kernel // part["tokens_per_state"]
        else:
            slot = 0 if len(ids) == 1 and not first else (last - first) // size
            block, state = ids[slot], row
        start = region["base"] + block * region["block_stride"]
        start += unit * region["unit_stride"] + state * region["state_stride"]
        content = part["content_bytes"]
        pieces = region.get("segments", [(0, content, 1, 0)])
        order = [
            at + piece * stride + byte
            for at, length, count, stride in pieces
            for piece in range(count)
            for byte in range(length)
        ]
        chunk, stride = content // region.get("chunks", 1), region.get("chunk_stride", 0)
        return [
            (rank, region["memory"], start + byte // chunk * stride + byte % chunk)
            for byte in order
        ]


def layers_of(group: Json) -> list[str]:
    """Return the layers of a group."""
    return [layer for kind in group["kinds"] for layer in kind["layers"]]


class Planner:
    """The rules, applied to one vector."""

    def __init__(self, vector: Json) -> None:
        self.vector, self.request = vector, vector["request"]
        self.policy = vector["policy"]
        self.producer, self.consumer = Engine(vector["producer"]), Engine(vector["consumer"])
        # Rule 6: the reader that notifies a producer rank if the rank has no slice.
        self.first_reader: dict[int, int] = {}
        self.slices = set(self._slices())

    def _sets(self) -> Iterator[list[str]]:
        """Rule 5: the moving layers of a pair of groups, one kind and one producer stage.

        The consumer's groups come first, then the producer's groups by their first layer in the
        consumer's group, then kinds and stages.
        """
        source, target = self.producer, self.consumer
        for group in target.json["groups"]:
            moving = [n for n in layers_of(group) if n not in source.excluded | target.excluded]
            homes = list(dict.fromkeys(source.groups[layer]["name"] for layer in moving))
            for home, kind, stage in product(homes, group["kinds"], range(source.json["pp_size"])):
                found = [
                    layer
                    for layer in moving
                    if layer in kind["layers"]
                    and (source.groups[layer]["name"], source.stage[layer]) == (home, stage)
                ]
                if found:
                    yield found

    def _slices(self) -> Iterator[Slice]:
        """Rules 5 and 6."""
        for layers in self._sets():
            for part in self.consumer.kinds[layers[0]]["parts"]:
                classes: dict[Any, list[int]] = {}
                held = self.producer.part(layers[0], part["name"])
                for p, rank in enumerate(self.producer.ranks):
                    units = self.producer.units(held, p)
                    context = self.producer.context(layers[0], p)
                    context = context if part["tokens_per_state"] else EVERY_POSITION
                    if rank["pp"] == self.producer.stage[layers[0]] and units[0] < units[1]:
                        classes.setdefault((context, units), []).append(p)
                for (context, units), replicas in sorted(classes.items()):
                    yield from self._of_class(layers, part, context, units, replicas)

    def _of_class(
        self,
        layers: list[str],
        part: Json,
        context: Context,
        units: tuple[int, int],
        replicas: list[int],
    ) -> Iterator[Slice]:
        target = self.consumer
        stages = {target.stage[layer] for layer in layers}
        shared = {}
        for c, rank in enumerate(target.ranks):
            own = target.units(part, c)
            both = max(own[0], units[0]), min(own[1], units[1])
            reads = not part["tokens_per_state"] or meet(context, target.context(layers[0], c))
            if rank["pp"] in stages and both[0] < both[1] and reads:
                shared[c] = both
        readers = list(shared)
        for at, p in enumerate(replicas):
            if readers:
                self.first_reader.setdefault(p, readers[at * len(readers) // len(replicas)])
        for c, both in shared.items():
            for p, stripe in self._chosen(c, readers, replicas):
                starts = units[0], target.units(part, c)[0]
                inside = [(both[0] - start, both[1] - start) for start in starts]
                for layer in layers:
                    if target.stage[layer] == target.ranks[c]["pp"]:
                        yield p, c, layer, part["name"], both, *inside, stripe

    def _candidates(self, reader: int, replicas: list[int]) -> list[int]:
        """Rule 5."""
        if self.policy["name"] == "first":
            return replicas[:1]
        if self.policy["name"] == "nearest":
            nodes, node = self.policy["producer_nodes"], self.policy["consumer_nodes"][reader]
            return [p for p in replicas if nodes[p] == node] or replicas
        return replicas

    def _chosen(
        self, reader: int, readers: list[int], replicas: list[int]
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Rule 5: the replicas that a reader reads, with their stripes."""
        among = self._candidates(reader, replicas)
        equal = [other for other in readers if self._candidates(other, replicas) == among]
        m, k, i, salt = len(among), len(equal), equal.index(reader), self.policy["salt"]
        if self.policy["name"] != "stripe" or m == 1:
            yield among[(i * m // k + salt) % m], (0, 1)
            return
        step = m // gcd(k, m)
        for block in range(step):
            yield among[(block * k + i + salt) % m], (block, step)

    def notifies(self) -> set[tuple[int, int]]:
        """Rule 6: pairs of a producer rank and a consumer rank that notifies it."""
        pairs = {found[:2] for found in self.slices}
        for p in set(range(len(self.producer.ranks))) - {p for p, _ in pairs}:
            every = range(len(self.consumer.ranks))
            notifiers = [self.first_reader[p]] if p in self.first_reader else every
            pairs |= {(p, c) for c in notifiers}
        return pairs

    def rows(self, layer: str, part: Json) -> range:
        """Rule 4: the first positions of the rows that must move, or the rows of a state."""
        wanted = positions(self.consumer, self.request, layer)
        if not part["tokens_per_state"]:
            held = self.producer.part(layer, part["name"])["states"]
            return range(min(part["states"], held) if wanted else 0)
        grain = part["tokens_per_state"]
        return range(wanted.start // grain * grain, wanted.stop if wanted else 0, grain)

    def copies(
        self, slices: set[Slice], written: dict[str, int] | None = None
    ) -> Counter[tuple[Place, Place]]:
        """Rule 6: the bytes that *slices* move.

        *written* has the tokens of each layer that the producer has written, or None for all.
        """
        moved: Counter[tuple[Place, Place]] = Counter()
        last = self.request["num_tokens"] - 1
        for p, c, layer, name, units, from_units, to_units, (first, step) in slices:
            part, group = self.consumer.part(layer, name), self.consumer.groups[layer]
            left, right = self.producer.context(layer, p), self.consumer.context(layer, c)
            done = last + 1 if written is None else written.get(layer, 0)
            for row in self.rows(layer, part):
                position = row if part["tokens_per_state"] else last
                if min(position + max(part["tokens_per_state"], 1), last + 1) > done:
                    continue
                block = position // (group["block_size"] * right[1])
                if (0 if self.consumer.is_ring(layer) else block) % step != first:
                    continue
                if part["tokens_per_state"] and not (owns(left, row) and owns(right, row)):
                    continue
                for unit in range(units[1] - units[0]):
                    at = from_units[0] + unit, to_units[0] + unit
                    tables = self.request["producer_blocks"], self.request["consumer_blocks"]
                    own = self.producer.part(layer, name)
                    sources = self.producer.bytes(p, tables[0], layer, own, row, at[0], last)
                    targets = self.consumer.bytes(c, tables[1], layer, part, row, at[1], last)
                    moved.update(zip(sources, targets, strict=True))
        return moved

    def wanted(self) -> set[Place]:
        """Rule 6, cover: each byte that must arrive, counted from the consumer alone."""
        places: set[Place] = set()
        last, target = self.request["num_tokens"] - 1, self.consumer
        for c, rank in enumerate(target.ranks):
            for region in rank["regions"]:
                layer = region["layer"]
                if layer in self.producer.excluded | target.excluded:
                    continue
                part = target.part(layer, region["part"])
                for row in self.rows(layer, part):
                    if part["tokens_per_state"] and not owns(target.context(layer, c), row):
                        continue
                    for unit in range(region["units"]):
                        tables = self.request["consumer_blocks"]
                        places |= {*target.bytes(c, tables, layer, part, row, unit, last)}
        return places


def positions(consumer: Engine, request: Json, layer: str) -> range:
    """Rule 4: the wanted positions."""
    live = consumer.kinds[layer]["live"]
    n = request["encoder_tokens" if live.get("counts") == "encoder" else "num_tokens"]
    size = live.get("size", 1)
    start = {
        "all": 0, "window": n - size + 1, "chunk": n // size * size, "state": n - 1,
        "ring": n // size * size, "ring and group": (n // size - 1) * size,
    }[live["rule"]]  # fmt: skip
    cached = request["cached"][consumer.groups[layer]["name"]]
    return range(max(start, 0, 0 if consumer.is_ring(layer) else cached), n)


# Rule 8: the kinds that fit to another kind.
GENERAL = {
    "SlidingWindowSpec": "FullAttentionSpec",
    "ChunkedLocalAttentionSpec": "FullAttentionSpec",
    "SlidingWindowMLASpec": "MLAAttentionSpec",
}


def refuses(vector: Json) -> bool:
    """Rule 8: whether a planner must refuse the vector."""
    producer, consumer = Engine(vector["producer"]), Engine(vector["consumer"])
    moving = {*producer.groups, *consumer.groups} - producer.excluded - consumer.excluded
    if not all(layer in producer.groups and layer in consumer.groups for layer in moving):
        return True
    if not all(fits(producer, consumer, layer) for layer in moving):
        return True
    return not all(served(producer, consumer, vector["request"], layer) for layer in moving)


def fits(producer: Engine, consumer: Engine, layer: str) -> bool:
    """Rule 8, layers."""
    fields = "name", "units", "content_bytes", "tokens_per_state", "granularity"
    kinds = producer.kinds[layer], consumer.kinds[layer]
    parts = [[[part[field] for field in fields] for part in kind["parts"]] for kind in kinds]
    meanings = [meaning(kind) for kind in kinds]
    names = [kind["meaning"]["kind"] for kind in kinds]
    if names[0] != names[1] and {GENERAL.get(name, name) for name in names} & {*names}:
        for fields_of_kind, name in zip(meanings, names, strict=True):
            fields_of_kind["kind"] = GENERAL.get(name, name)
            for field in ("sliding_window", "attention_chunk_size"):
                fields_of_kind.pop(field, None)
    if parts[0] != parts[1] or meanings[0] != meanings[1]:
        return False
    whole = {part["name"] for kind in kinds for part in kind["parts"] if part.get("whole")}
    return all(ranges(producer, layer, name) == ranges(consumer, layer, name) for name in whole)


def ranges(engine: Engine, layer: str, name: str) -> set[tuple[int, int]]:
    """Return the ranges of a part that are not empty."""
    found = {engine.units(engine.part(layer, name), rank) for rank in range(len(engine.ranks))}
    return {units for units in found if units[0] < units[1]}


def meaning(kind: Json) -> dict[str, Any]:
    """Rule 8: the fields that must be equal, with equal values for all that may differ."""
    fields = dict(kind["meaning"])
    for field in ("page_size_padded", "extra_retained_tokens"):
        fields.pop(field, None)
    if not fields.get("page_format", "").startswith("opaque:"):
        fields.pop("page_format", None)
    for field, other in (
        ("head_size_v", "head_size"), ("elements_per_scale", "head_size"), ("ssm_dtype", "dtype")
    ):  # fmt: skip
        fields.setdefault(field, fields.get(other))
    keys = next((part for part in kind["parts"] if part["name"] in ("k", "latent")), None)
    reorders = keys and keys["tokens_per_state"] == 1 and not fields.get("spans_heads")
    has_scales = fields.get("scale_dtype") or fields.get("scales_digest")
    packed = fields.get("dtype") == "uint8" and has_scales
    content = fields.get("key_content")
    if content and reorders and not packed and fields["elements_per_scale"] == fields["head_size"]:
        content = dict(content)
        if content["rotary"] == "pairs":
            content["rotary"] = "halves"
        if keys["name"] == "latent" and content["rotary"] != "none" and not content["rotary_start"]:
            content["rotary_start"] = fields["head_size"] - content["rotary_size"]
        fields["key_content"] = content
    return fields


def served(producer: Engine, consumer: Engine, request: Json, layer: str) -> bool:
    """Rule 8, requests: for the groups of *layer*."""
    kind = consumer.kinds[layer]
    names = producer.groups[layer]["name"], consumer.groups[layer]["name"]
    tables = request["producer_blocks"].get(names[0]), request["consumer_blocks"].get(names[1])
    if None in tables:
        return False
    if kind["live"].get("counts") == "encoder" and "encoder_tokens" not in request:
        return False
    wanted = positions(consumer, request, layer)
    if not wanted:
        return True
    grains = [part["tokens_per_state"] or 1 for part in kind["parts"]]
    if consumer.is_ring(layer):
        sole = all(len(t["ids"]) == 1 and not t["first_token"] for t in tables)
        if not sole or request["cached"][names[1]] % kind["live"]["size"]:
            return False
    elif any(wanted.start // grain * grain < request["cached"][names[1]] for grain in grains):
        return False
    state = not kind["parts"][0]["tokens_per_state"]
    blocks = [
        held(engine, layer, table, wanted, state=state)
        for engine, table in zip((producer, consumer), tables, strict=True)
    ]
    return all(blocks) and all(tables[1]["ids"].count(block) == 1 for block in blocks[1])


def held(engine: Engine, layer: str, table: Json, wanted: range, *, state: bool) -> list[int]:
    """Rule 8: the blocks of all *wanted* positions. Empty if the table does not hold them."""
    size, first = engine.groups[layer]["block_size"], table["first_token"]
    size *= 1 if state else engine.context(layer, 0)[1]
    slot = engine.is_ring(layer) or (state and len(table["ids"]) == 1 and not first)
    places = [0] if slot else sorted({(p - first) // size for p in wanted})
    if first % size or not 0 <= places[0] <= places[-1] < len(table["ids"]):
        return []
    ids = [table["ids"][place] for place in places]
    null = engine.json.get("null_block")
    return ids if min(ids) >= 0 and null not in ids and len({*ids}) == len(ids) else []


def meet(a: Context, b: Context) -> bool:
    """Whether two ranks own a common position of an endless prompt."""
    return any(owns(a, p) and owns(b, p) for p in range(lcm(a[1] * a[2], b[1] * b[2])))


def expected_slices(vector: Json) -> set[Slice]:
    """Return the expected slices of a vector, one for each layer and part."""
    names = "units", "producer_units", "consumer_units", "stripe"
    return {
        (s["producer"], s["consumer"], layer, part, *(tuple(s[name]) for name in names))
        for s in vector["expected"]["slices"]
        for layer in s["layers"]
        for part in s["parts"]
    }


def expected_bytes(pairs: Json) -> Counter[tuple[Place, Place]]:
    """Return the bytes of expected copies."""
    return Counter(
        ((pair["producer"], m, a + byte), (pair["consumer"], n, b + byte))
        for pair in pairs
        for m, a, n, b, length in pair["copies"]
        for byte in range(length)
    )


def vectors(path: Path) -> list[Json]:
    """Return the vectors of a file that are not refused."""
    found = json.loads(gzip.decompress(path.read_bytes()))["vectors"]
    return [vector for vector in found if "refused" not in vector["expected"]]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
def test_rules_of_the_page_give_the_expected_result(path: Path) -> None:
    """A sample of each file. The marker `slow` would be needed for all of them."""
    for vector in vectors(path)[::3]:
        planner, expected = Planner(vector), vector["expected"]
        name = vector["id"]
        assert planner.slices == expected_slices(vector), name
        assert sorted(planner.notifies()) == list(map(tuple, expected["notifies"])), name
        moved = expected_bytes(expected["copies"])
        assert planner.copies(planner.slices) == moved, name
        assert {target for _, target in moved} == planner.wanted(), name
        assert set(moved.values()) <= {1}, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.partition(".")[0])
def test_refusals_of_the_page_are_those_of_the_vectors(path: Path) -> None:
    """Rule 8. All vectors, because a planner must not refuse what others serve."""
    for vector in json.loads(gzip.decompress(path.read_bytes()))["vectors"]:
        assert refuses(vector) == ("refused" in vector["expected"]), vector["id"]


def test_steps_move_each_byte_once_and_not_before_it_is_written() -> None:
    """Rule 7. A row that is written in several steps moves with the last of them."""
    for vector in vectors(FOLDER / "steps.json.gz"):
        planner, expected = Planner(vector), vector["expected"]
        steps = [expected_bytes(step["copies"]) for step in expected["steps"]]
        assert sum(steps, Counter()) == expected_bytes(expected["copies"]), vector["id"]
        written: dict[str, int] = {}
        for step, moved in zip(expected["steps"], steps, strict=True):
            written |= dict.fromkeys(step["layers"], step["tokens"][1])
            allowed = set(planner.copies(planner.slices, written))
            assert set(moved) <= allowed, vector["id"]


def mixed(word: int) -> int:
    """Rule 9."""
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        word = (word ^ (word >> 33)) * multiplier % 2**64
    return word ^ (word >> 33)


def digest_of(vector: Json) -> int:
    """Rule 9, word by word."""
    name = f"{vector['layer']}\0{vector['part']}\0{vector['unit']}".encode()
    named = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    total = 0
    for number, content in zip(vector["rows"], map(bytes.fromhex, vector["contents"]), strict=True):
        row = 0
        for at in range(0, len(content), 8):
            weight = mixed(at // 8 + 1) | 1
            product = int.from_bytes(content[at : at + 8], "little") * weight % 2**64
            row += (product ^ (product >> 47)) * weight
        total += mixed(row % 2**64 ^ mixed(number ^ named))
    return total % 2**64


def test_digests_of_all_vectors_follow_from_the_rules() -> None:
    vectors = json.loads((FOLDER / "digests.json").read_bytes())["vectors"]
    assert len(vectors) >= 200
    assert [] == [v for v in vectors if f"{digest_of(v):016x}" != v["digest"]]
    # Only equal contents at equal places have equal digests. Zeros at the end count for nothing.
    facts = set()
    for vector in vectors:
        cut = [bytes.fromhex(content).rstrip(b"\0") for content in vector["contents"]]
        place = vector["layer"], vector["part"], vector["unit"], *vector["rows"]
        facts.add((*place, *cut))
    assert len({vector["digest"] for vector in vectors}) == len(facts)


def as_json(value: Any) -> bytes:
    """Rule 10."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def names_of(vector: Json) -> tuple[str, list[str]]:
    """Rule 10, page by page: the space, and the names."""
    sha256, prompt, size = hashlib.sha256, vector["prompt"], vector["page_tokens"]
    model = sha256(as_json(vector["model"])).hexdigest()
    space = sha256(as_json({"version": 1, "model": model, "placement": vector["placement"]}))
    seed = {"version": 1, "space": space.hexdigest(), "page_tokens": size}
    seed |= {field: prompt[field] for field in ("adapter", "embeddings", "salt")}
    name, names = sha256(as_json(seed)).digest(), []
    for first in range(0, len(vector["token_ids"]) // size * size, size):
        content = name
        for token in vector["token_ids"][first : first + size]:
            content += token.to_bytes(8, "little", signed=True)
        items = [item for item in prompt["media"] if first <= item[1] < first + size]
        if items:
            content += as_json(sorted(items, key=lambda item: (item[1], item[2], item[0])))
        name = sha256(content).digest()
        names.append(name.hex())
    return space.hexdigest(), names


def test_names_of_all_vectors_follow_from_the_rules() -> None:
    vectors = json.loads((FOLDER / "names.json").read_bytes())["vectors"]
    assert len(vectors) >= 20
    assert [] == [v for v in vectors if names_of(v) != (v["space"], v["names"])]
    # Vectors share a name only if they differ in media behind the page.
    last = Counter(v["names"][-1] for v in vectors if v["names"])
    assert [2] == [count for count in last.values() if count > 1]
