"""docs/wire.md describes the wire format of the code, and its example is exact.

A failure here means that the page or `kvspec.wire.codec.VERSION` must follow the code.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
from hypothesis import given
from shakes import handshakes, opened

import kvspec
from kvspec.completion.producer import MAX_INCARNATIONS
from kvspec.engines.stages import MOST_DIGITS
from kvspec.inputs import MOST_MEMBERS
from kvspec.memory.rank_cache import Memory, Region
from kvspec.ownership.dtypes import ITEMSIZE, dtype_name
from kvspec.ownership.parallel import MAX_RANKS
from kvspec.session.checksums import advance, computation_of
from kvspec.session.mailbox import open_introduction
from kvspec.specs.uniform import _MAY_DIFFER
from kvspec.tickets import ContentIdentity, PrefillTicket
from kvspec.wire import codec
from kvspec.wire.codec import decode_message, encode_handshake, encode_message, sender_of
from kvspec.wire.handshake import Handshake
from kvspec.wire.messages import MESSAGES, ChecksumContents, Message
from kvspec.wire.seal import MAC, Secret
from kvspec.wire.values import KNOWN, MAX_DEPTH, VALUE, Decoder, encode
from kvspec.wire.versions import NO_START, OLDEST, VERSION

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```\w+ (\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))


def bytes_of(block: str) -> bytes:
    """Return the bytes of a block of hexadecimal digits with comments."""
    return bytes.fromhex("".join(line.partition("#")[0] for line in block.splitlines()))


FRAMES = {
    name: bytes_of(block)
    for name, block in re.findall(r"^```hex (\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
}
SECRET = Secret(b"16 bytes or more")
EXAMPLE_MESSAGES = sorted(name for name in FRAMES if name in MESSAGES)
SIZE = 4
LIMITS = re.findall(r"^\| `([\w.]+)` \| `(MAX_\w+)` \| (\d+) \| .+ \|$", PAGE, re.MULTILINE)
ARRAYS = dict(re.findall(r"^# (\w+): .*\n((?:[^#\n].*\n)+)", BLOCKS["arrays"], re.MULTILINE))


def section(title: str) -> str:
    """Return the text of the page below *title*, up to the next title."""
    return re.split(r"^#+ ", PAGE.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def first_cells(title: str, table: int = 0) -> list[str]:
    """Return the first column of a table below *title*, without its heading."""
    tables = re.findall(r"(?:^\|.*\n)+", section(title), re.MULTILINE)
    return [line.split("|")[1].strip().strip("`") for line in tables[table].splitlines()[2:]]


def sealed(name: str) -> bytes:
    """Return the sealed message in a frame of the example."""
    return FRAMES[name][SIZE:]


def purpose(name: str) -> bytes:
    """Return the purpose of a sealed message of the example: all up to the first line feed."""
    return sealed(name)[: sealed(name).index(b"\n") + 1]


def body(name: str) -> bytes:
    """Return what is sealed in a frame of the example."""
    return SECRET.unseal("page", purpose(name), sealed(name), name)


def purposes() -> set[str]:
    """Return every purpose in the package: bytes that begin with `kvspec-` and end a line."""
    found: set[str] = set()
    for path in sorted((ROOT / "kvspec").rglob("*.py")):
        found |= set(re.findall(r'b"(kvspec-[a-z-]+-\d+\\n)"', path.read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("name", sorted(FRAMES))
def test_frame_of_page_has_length_and_mac(name: str) -> None:
    """The standard library alone finds the parts that the page describes."""
    head, rest = purpose(name), sealed(name)[len(purpose(name)) :]
    assert len(sealed(name)) == int.from_bytes(FRAMES[name][:SIZE], "big")
    assert f"`{head.decode()[:-1]}\\n`" in section("Seals")
    mac = hmac.digest(SECRET.key, head + rest[MAC:], "sha256")
    assert mac == rest[:MAC]
    assert SECRET.seal(head, rest[MAC:]) == sealed(name)


def test_question_of_page_has_versions_and_answer_repeats_challenge() -> None:
    """The bodies of the first three frames are as described."""
    assert [OLDEST, VERSION] == msgspec.msgpack.decode(body("question"))
    assert body("challenge") == body("answer") == bytes(range(16))


def test_introduction_of_page_decodes_and_encodes_to_same_bytes() -> None:
    """The library reads the introduction and writes exactly these bytes."""
    shown = open_introduction(sealed("introduction"), SECRET)
    again = SECRET.unseal("page", purpose("introduction"), shown.seal(SECRET), "the same")
    start = again.index(b"kvspec-handshake\n") + len(b"kvspec-handshake\n") + 2
    assert body("introduction")[:start] == again[:start]
    for data in (body("introduction"), again):
        # Another zlib may compress in another way. The bytes inside are equal.
        assert bytes_of(BLOCKS["handshake"]) == zlib.decompress(data[start:])
    assert "10.0.0.1:7000" == shown.address
    assert ("prefill-0", 7, "llama") == (
        shown.handshake.engine_id,
        shown.handshake.epoch,
        shown.handshake.model,
    )
    assert kvspec.RankId() == shown.rank


@given(handshakes())
def test_memory_and_regions_of_page_are_plain_attributes_of_any_cache(shake: Handshake) -> None:
    """Plain MessagePack gives each attribute. The segments are not sent."""
    fields = opened(encode_handshake(shake))
    for name in ("memory", "regions"):
        values = [attrs.asdict(each) for each in getattr(shake.cache, name)]
        assert fields[name] == [
            each | ({"segments": []} if name == "regions" else {}) for each in values
        ]


@pytest.mark.parametrize(("kind", "word"), [(Memory, "memory"), (Region, "regions")])
def test_page_lists_every_attribute_of_memory_and_regions(kind: Any, word: str) -> None:
    """The table names the attributes of both classes."""
    rows = [line.split("|") for line in section("Memory and regions").splitlines()]
    shown = [row[1] for row in rows if len(row) == 6 and word in row[2]]
    names = [field.name for field in attrs.fields(kind)]
    assert sorted(names) == sorted(re.findall(r"`(\w+)`", "".join(shown)))


@pytest.mark.parametrize("name", EXAMPLE_MESSAGES)
def test_message_of_page_decodes_and_encodes_to_same_bytes(name: str) -> None:
    """The library reads each message and writes exactly these bytes."""
    message = decode_message(body(name))
    assert name == message.kind
    assert encode_message(message, *sender_of(body(name))) == body(name)


@pytest.mark.parametrize("name", sorted(ARRAYS))
def test_array_of_page_decodes_and_encodes_to_same_bytes(name: str) -> None:
    """The arrays without a frame are messages under the head of the others."""
    head = b"kvspec-message\n" + VERSION.to_bytes(2, "big") + NO_START
    data = head + bytes.fromhex(ARRAYS[name])
    message = decode_message(data)
    assert name == message.kind
    assert data == encode_message(message)


def test_page_has_an_example_of_every_kind_of_message() -> None:
    """Each kind has a frame or an array."""
    assert sorted(MESSAGES) == sorted([*EXAMPLE_MESSAGES, *ARRAYS])


def test_explanations_of_messages_name_every_field_in_order() -> None:
    """Each line of the example names the field that it encodes."""
    for name in EXAMPLE_MESSAGES:
        shown = re.findall(r"# (\w+): ", BLOCKS[name])
        assert ["length", "kind", *MESSAGES[name].__struct_fields__] == shown


def test_explanations_of_handshake_name_every_field() -> None:
    """The lines of the introduction name the fields in the order of the code."""
    shown = re.findall(r"# (\w+): ", BLOCKS["handshake"])
    fields = codec.HandshakeFields.__struct_fields__
    assert list(fields) == [name for name in dict.fromkeys(shown) if name in fields]


def test_ticket_of_page_is_read_and_written_equal() -> None:
    """The library accepts the seal of the ticket and writes an equal ticket."""
    params = json.loads(BLOCKS["ticket"])
    ticket = PrefillTicket.from_params(params, SECRET.key)
    assert params == ticket.to_params(SECRET.key)
    assert ContentIdentity.of_text(range(40)) == ticket.content
    assert ticket.content is not None
    tokens = np.arange(40, dtype="<i8").tobytes()
    assert hashlib.sha256(tokens).hexdigest()[:32] == ticket.content.tokens
    assert list(params) == first_cells("Prefill tickets")


def test_page_lists_every_field_of_handshake_and_message() -> None:
    """The tables of fields have the names and the order of the code."""
    assert list(codec.HandshakeFields.__struct_fields__) == first_cells("Handshakes", 1)
    assert ["kind", *Message.__struct_fields__] == first_cells("Messages", 1)


def test_page_lists_every_kind_of_message_with_its_own_fields() -> None:
    """The tables have every kind, and name the kinds that use a field."""
    assert list(MESSAGES) == first_cells("Messages", 3)
    table = section("Messages").partition("| kind | own field |")[2]
    rows = re.findall(
        r"^\| (`[\w`, ]+`) \| `(\w+)` \|", table.partition("| from |")[0], re.MULTILINE
    )
    shown = [(kind.strip("`"), field) for kinds, field in rows for kind in kinds.split(", ")]
    common = set(Message.__struct_fields__)
    owned = [
        (k, f) for k, each in MESSAGES.items() for f in each.__struct_fields__ if f not in common
    ]
    assert sorted(owned) == sorted(shown)


def test_page_lists_every_element_of_an_extent() -> None:
    """The table of the inner array has the names and the order of the code."""
    assert list(ChecksumContents.__struct_fields__) == first_cells("Checksum contents")


def mix(word: int) -> int:
    """Return *word* scattered, as the page describes."""
    for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        word = (word ^ (word >> 33)) * multiplier % 2**64
    return word ^ (word >> 33)


def total_of(content: bytes, layer: str, part: str, unit: int, number: int) -> int:
    """Return the sum of one content, computed as the page describes."""
    word = 0
    content += bytes(-len(content) % 8)
    for at in range(0, len(content), 8):
        weight = mix(at // 8 + 1) | 1
        product = int.from_bytes(content[at : at + 8], "little") * weight % 2**64
        word = (word + (product ^ (product >> 47)) * weight) % 2**64
    name = f"{layer}\0{part}\0{unit}".encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    return mix(word ^ mix(number ^ key))


def test_checksum_of_page_is_checksum_of_code() -> None:
    """The formula of the page gives its example, and the sum of a block of two units."""
    shown = re.findall(r"^total `([0-9a-f]{16})`", PAGE, re.MULTILINE)
    total = total_of(bytes(range(10)), "a", "k", 0, 2)
    assert [total.to_bytes(8, "little").hex()] == shown
    spec = kvspec.FullAttentionSpec(
        block_size=4, total_num_kv_heads=2, head_size=5, dtype="bfloat16"
    )
    group = kvspec.KVCacheGroup(name="full", layers=["a"], spec=spec)
    engine = kvspec.EngineSpec(groups=[group])
    memory = np.arange(2048, dtype=np.uint8)
    cache = kvspec.plan_memory(engine, kvspec.RankId(), 8, address=memory.ctypes.data)
    region = cache.region("a", "k")
    table = kvspec.BlockTable([3, 1])
    extent = ChecksumContents(layer="a", parts=("k",), units=range(2), tokens=range(2, 7))
    wanted = 0
    for unit in range(2):
        for position in range(2, 7):
            address = region.address([3, 1][position // 4], unit, position % 4)
            at = address - memory.ctypes.data
            content = memory[at : at + region.content_bytes].tobytes()
            wanted += total_of(content, "a", "k", unit, position)
    own = advance(computation_of(cache, {"full": table}, extent), math.inf)
    assert wanted % 2**64 == own


def default_of(field: attrs.Attribute[Any]) -> str:
    """Return how the page writes the default of a field: nothing if it has none."""
    value: Any = field.default
    if value is attrs.NOTHING:
        return ""
    if hasattr(value, "factory"):
        return " = " + ("{}" if value.factory is dict else f"{value.factory.__name__}()")
    if isinstance(value, str):
        return f' = "{value}"'
    if value is None:
        return " = nil"
    return f" = {str(value).lower()}"


def test_page_lists_every_kind_of_object_with_its_fields() -> None:
    """Each kind has a row with every field and its default."""
    for name, kind in KNOWN.items():
        fields = [f"`{each.alias}{default_of(each)}`" for each in attrs.fields(kind) if each.init]
        assert f"| `{name}` | {', '.join(fields)} |" in PAGE.splitlines()


def test_page_lists_every_purpose() -> None:
    """The table of purposes is that of the package."""
    shown = {name for name in first_cells("Seals", 1) if name.startswith("kvspec-")}
    assert purposes() == shown


@pytest.mark.parametrize(("module", "name", "value"), LIMITS)
def test_limit_of_page_is_limit_of_code(module: str, name: str, value: str) -> None:
    """Each row of the limits has the value of the code."""
    assert int(value) == getattr(importlib.import_module(f"kvspec.{module}"), name)


def test_page_lists_every_limit_of_its_modules() -> None:
    """No limit of a module in the table is missing."""
    for module in {module for module, _, _ in LIMITS}:
        path = ROOT / "kvspec" / f"{module.replace('.', '/')}.py"
        own = set(re.findall(r"^(MAX_\w+) =", path.read_text(encoding="utf-8"), re.MULTILINE))
        assert own == {name for each, name, _ in LIMITS if each == module}


def test_history_of_page_ends_with_version_of_code() -> None:
    """The history has each version once, and the example has the last one."""
    assert [str(number + 1) for number in range(VERSION)] == first_cells("Versions")
    for head in (b"kvspec-handshake\n", b"kvspec-message\n"):
        frame = FRAMES["introduction" if b"handshake" in head else "heartbeat"]
        assert head + VERSION.to_bytes(2, "big") in frame


def test_page_lists_every_dtype_with_its_bytes() -> None:
    """The table of dtypes, and the other names that a receiver accepts."""
    rows = re.findall(r"^\| (\d) \| ((?:`\w+`(?:, )?)+) \|$", section("Plain values"), re.MULTILINE)
    shown = {name: int(size) for size, names in rows for name in re.findall(r"\w+", names)}
    assert ITEMSIZE == shown
    aliases = re.findall(r"`(\w+)`\s+for\s+`(\w+)`", section("Plain values"))
    assert ["half", "float", "fp8"] == [alias for alias, _ in aliases]
    assert all(dtype_name(alias) == dtype_name(f"torch.{alias}") == name for alias, name in aliases)


def test_page_states_the_limits_of_descriptions() -> None:
    """Numbers that the text contains, but no table."""
    rules = section("Valid descriptions")
    assert f"at most {MAX_RANKS:,}" in rules
    assert f"at most 2^{MOST_MEMBERS.bit_length() - 1} members" in rules
    assert f"at most {MOST_DIGITS} digits" in rules
    assert f"and {MAX_INCARNATIONS} have come" in section("Readers of a request")
    (row,) = (line for line in re.split(r"^- ", rules, flags=re.MULTILINE) if "Uniform" in line)
    assert _MAY_DIFFER == set(re.findall(r"`(\w+)`", row.partition("except")[2]))


def steps(plain: Any) -> int:
    """Return the steps of a plain value by the page's formula, without groups and engines."""
    if isinstance(plain, list):
        return VALUE + sum(map(steps, plain))
    if not isinstance(plain, dict):
        return VALUE
    ((word, content),) = plain.items()
    if word in KNOWN:
        return VALUE + sum(map(steps, content.values()))
    span = abs(content[1] - content[0]) if word == "range" else 0
    return VALUE + steps(content) + span


@given(handshakes())
def test_work_of_page_is_work_of_code(shake: Handshake) -> None:
    """The formulas of the page give the steps that a decoder counts."""
    engine, decoder = shake.engine, Decoder()
    for each in (engine, shake.replica_policy):
        decoder.value("value", encode(each))
    work = steps(encode(engine)) + steps(encode(shake.replica_policy))
    layers, parts = sum(len(group.layers) for group in engine.groups), 0
    for group in engine.groups:
        kinds = {group.spec.of_layer(layer).parts for layer in group.layers}
        own = 1 if isinstance(group.spec, kvspec.UniformTypeKVCacheSpecs) else len(*kinds)
        work += len(group.layers) * (own + len(group.excluded))
        parts += sum(map(len, kinds))
    sizes = engine.parallel
    ranks = sizes.tp_size * sizes.pcp_size if sizes.context_size > 1 else 1
    stages = sum(map(len, sizes.stages or ()))
    work += layers * (parts + sizes.pp_size + stages) + parts * sizes.tp_size * ranks
    assert decoder._work == work


def test_depth_of_page_is_depth_of_code() -> None:
    """An object is one level, and a map is three."""
    assert "`{kind: {field: 1}}` is one" in section("Plain values")
    for value, levels in (({"Part": {}}, 1), ([1], 1), ({"map": [["k", 1]]}, 3)):
        for around in (MAX_DEPTH - levels, MAX_DEPTH - levels + 1):
            plain: Any = value
            for _ in range(around):
                plain = [plain]
            try:
                Decoder().value("value", plain)
                deep = False
            except kvspec.WireError as error:
                deep = "deep" in error.expected
            assert deep == (around + levels > MAX_DEPTH)
