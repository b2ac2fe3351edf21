"""Test the committed vectors: they are the library's, and damaged or foreign files are refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest

from kvspec.errors import KVSpecError, SpecError
from kvspec.specs import UniformTypeKVCacheSpecs
from kvspec.testing.case import Case
from kvspec.vectors import digests, files, page_names, recording
from kvspec.vectors.families import FAMILIES, FamilyTransfer, transfers
from kvspec.vectors.recording import canonical, record
from kvspec.vectors.structure import VECTORS_VERSION, Vector

FOLDER = Path(__file__).parents[2] / "vectors"

# One of so many vectors of each file is recorded again. `kvspec vectors --check` compares all.
EVERY = 7


def committed(family: str) -> Path:
    """Return the committed file of *family*."""
    return FOLDER / f"{family}{files.SUFFIX}"


@pytest.mark.parametrize("family", FAMILIES)
def test_committed_vectors_equal_those_of_the_library(family: str) -> None:
    """All names are those of the family, and a sample is recorded again."""
    file = files.read(committed(family))
    assert [transfer.name for transfer in transfers(family)] == [v.id for v in file.vectors]
    assert () == files.compare(file, EVERY).wrong


def test_large_set_contains_each_committed_name() -> None:
    for family in FAMILIES:
        names = [transfer.name for transfer in transfers(family, large=True)]
        assert len(names) == len(set(names))
        assert {transfer.name for transfer in transfers(family)} <= set(names)


def test_committed_schema_describes_the_structures() -> None:
    assert files.schema_bytes() == (FOLDER / files.SCHEMA).read_bytes()


def test_committed_digests_are_those_of_the_library() -> None:
    assert digests.encoded() == (FOLDER / files.DIGESTS).read_bytes()


def test_committed_names_of_pages_are_those_of_the_library() -> None:
    assert page_names.encoded() == (FOLDER / files.PAGE_NAMES).read_bytes()


def test_committed_files_are_smaller_than_five_megabytes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob(f"*{files.SUFFIX}")) < 5e6


def test_committed_files_are_known_families() -> None:
    assert sorted(FAMILIES) == sorted(
        path.name.removesuffix(files.SUFFIX) for path in FOLDER.glob(f"*{files.SUFFIX}")
    )


def test_encoding_a_file_again_gives_equal_bytes() -> None:
    path = committed("groups")
    assert gzip.decompress(path.read_bytes()) == files.encoded("groups", files.read(path).vectors)


def test_write_makes_the_committed_file(tmp_path: Path) -> None:
    """The compressed bytes may depend on zlib, so only the JSON is compared."""
    ((path, count),) = files.write(tmp_path / "new", ["refusals"])
    assert count == len(files.read(path).vectors)
    data = [gzip.decompress(file.read_bytes()) for file in (path, committed("refusals"))]
    assert data[0] == data[1]
    assert [files.Checked("refusals", count, ())] == list(files.check(path.parent))


def test_write_refuses_an_unknown_family(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        list(files.write(tmp_path, ["tp", "unknown"]))
    assert ("family", "unknown") == (raised.value.field, raised.value.value)
    assert [] == list(tmp_path.iterdir())


def test_write_refuses_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError) as raised:
        list(files.write(tmp_path / "file", ["tp"]))
    assert "folder" == raised.value.field


def test_check_refuses_a_folder_without_vectors(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        list(files.check(tmp_path))
    assert "folder" == raised.value.field


Change = Callable[[dict[str, Any]], object]

REFUSED: dict[str, tuple[Change, str, object]] = {
    "version": (
        lambda file: file.update(version=VECTORS_VERSION + 1),
        ".version",
        VECTORS_VERSION + 1,
    ),
    "format": (lambda file: file.update(format="other"), ".format", "other"),
    "checksum": (lambda file: file.update(sha256="0"), ".sha256", "0"),
    "vector": (lambda file: file["vectors"][0].update(id="tp/other"), ".sha256", None),
    "missing vector": (lambda file: file["vectors"].pop(), ".sha256", None),
    "family": (lambda file: file.update(family="other"), ".family", "other"),
    "missing field": (lambda file: file.pop("sha256"), "", None),
    "unknown field": (lambda file: file.update(other=1), "", None),
    "wrong type": (lambda file: file["vectors"][0].update(request=3), "", None),
    "negative": (lambda file: file["vectors"][0]["policy"].update(salt=-1), "", None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_read_refuses_a_changed_file(case: str, tmp_path: Path) -> None:
    """The error names the file and the field."""
    change, field, value = REFUSED[case]
    file = json.loads(gzip.decompress(committed("groups").read_bytes()))
    change(file)
    path = tmp_path / "groups.json.gz"
    path.write_bytes(gzip.compress(json.dumps(file).encode()))
    with pytest.raises(SpecError) as raised:
        files.read(path)
    assert f"groups.json.gz{field}" == raised.value.field
    assert value in (None, raised.value.value)


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda data: data[:-100],
        lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:],
        lambda _: b"no gzip",
        lambda _: gzip.compress(b"[1, 2]"),
        lambda _: gzip.compress(b"\xff"),
        lambda data: gzip.compress(gzip.decompress(data)[:-10]),
    ],
    ids=["empty", "short", "flipped", "text", "list", "no-utf8", "short-json"],
)
def test_read_refuses_a_damaged_file(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "groups.json.gz"
    path.write_bytes(damage(committed("groups").read_bytes()))
    with pytest.raises(SpecError) as raised:
        files.read(path)
    assert "groups.json.gz" == raised.value.field


def test_read_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        files.read(tmp_path / "tp.json.gz")
    assert "tp.json.gz" == raised.value.field


@pytest.mark.parametrize("kind", ["slice", "copy", "name"])
def test_compare_finds_a_changed_vector_with_a_right_checksum(kind: str, tmp_path: Path) -> None:
    file = files.read(committed("groups"))
    changed = file.vectors[0]
    slices, copies = changed.expected.slices, changed.expected.copies
    if kind == "slice":
        wrong = msgspec.structs.replace(slices[0], producer_units=(7, 8))
        expected = msgspec.structs.replace(changed.expected, slices=(wrong, *slices[1:]))
        changed = msgspec.structs.replace(changed, expected=expected)
    elif kind == "copy":
        memory, offset, *rest = copies[0].copies[0]
        shifted = msgspec.structs.replace(
            copies[0], copies=((memory, offset + 1, *rest), *copies[0].copies[1:])
        )
        expected = msgspec.structs.replace(changed.expected, copies=(shifted, *copies[1:]))
        changed = msgspec.structs.replace(changed, expected=expected)
    else:
        changed = msgspec.structs.replace(changed, id="groups/unknown")
    path = tmp_path / "groups.json.gz"
    edited = [changed, *file.vectors[1:]]
    path.write_bytes(gzip.compress(files.encoded("groups", edited)))
    missing = [] if kind != "name" else [file.vectors[0].id]
    expected = files.Checked("groups", len(edited), (*missing, changed.id))
    assert [expected] == list(files.check(tmp_path))


@pytest.mark.parametrize("kind", ["missing", "repeated", "none"])
def test_compare_requires_each_vector_of_the_set_once(kind: str) -> None:
    file = files.read(committed("pp"))
    first = file.vectors[0]
    changes = {"missing": file.vectors[1:], "repeated": (first, *file.vectors), "none": ()}
    found = files.compare(msgspec.structs.replace(file, vectors=changes[kind]), EVERY)
    expected = tuple(vector.id for vector in file.vectors) if kind == "none" else (first.id,)
    assert expected == found.wrong
    assert () == files.compare(file, EVERY).wrong
    missing = files.compare(file, len(file.vectors), large=True).wrong
    assert len(missing) == len(list(transfers("pp", large=True))) - len(file.vectors)


def test_compare_finds_a_number_of_another_type() -> None:
    """Python compares 4.0 and 4 as equal, but they differ as JSON."""
    file = files.read(committed("formats"))
    text = msgspec.json.encode(file.vectors[0]).replace(b'"head_size":4', b'"head_size":4.0', 1)
    edited = msgspec.json.decode(text, type=Vector)
    assert (edited == file.vectors[0], text) == (True, msgspec.json.encode(edited))
    changed = msgspec.structs.replace(file, vectors=(edited, *file.vectors[1:]))
    assert (edited.id,) == files.compare(changed, len(file.vectors)).wrong


def test_check_refuses_a_file_that_is_named_for_another_family(tmp_path: Path) -> None:
    (tmp_path / "tp.json.gz").write_bytes(committed("pp").read_bytes())
    with pytest.raises(SpecError) as raised:
        list(files.check(tmp_path))
    assert ("tp.json.gz.family", "pp") == (raised.value.field, raised.value.value)


def first_case(family: str) -> Case:
    """Return the first case of *family*."""
    return next(transfers(family)).case


def test_record_refuses_copies_that_the_oracle_finds_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector is never written if the library is wrong."""

    def shifted(*args: Any, **_: Any) -> list[tuple[int, int, int]]:
        (source, target, length), *rest = described(*args)
        return [(source, target + 1, length - 1), *rest]

    described = recording.described
    monkeypatch.setattr(recording, "described", shifted)
    monkeypatch.setattr(recording, "selected", shifted)
    with pytest.raises(KVSpecError, match="byte"):
        record(FamilyTransfer("tp/wrong", first_case("tp")))


def test_record_refuses_copies_that_write_a_byte_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    described = recording.described
    twice = lambda *args, **_: described(*args) * 2  # noqa: E731
    monkeypatch.setattr(recording, "described", twice)
    monkeypatch.setattr(recording, "selected", twice)
    with pytest.raises(KVSpecError, match="twice"):
        record(FamilyTransfer("tp/wrong", first_case("tp")))


def test_record_refuses_ids_that_move_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "selected", lambda *_: [])
    with pytest.raises(KVSpecError, match="ids"):
        record(FamilyTransfer("tp/wrong", first_case("tp")))


def test_record_raises_if_a_refusal_is_missing() -> None:
    with pytest.raises(KVSpecError, match="refus"):
        record(FamilyTransfer("refusals/none", first_case("tp"), refused=True))


def test_record_raises_if_a_transfer_is_refused() -> None:
    """Only the family of refusals may contain refused transfers."""
    with pytest.raises(KVSpecError):
        record(attrs.evolve(next(transfers("refusals")), refused=False))


def test_record_raises_if_layers_with_equal_parts_have_two_meanings() -> None:
    """A vector has one meaning for all layers with equal parts, so it cannot describe them."""
    case = first_case("tp")
    group = case.producer.groups[0]

    def recorded(**fields: Any) -> Vector:
        specs = {"l.0": group.spec, "l.1": attrs.evolve(group.spec, **fields)}
        uniform = UniformTypeKVCacheSpecs(specs=specs)
        two = attrs.evolve(
            case.producer, groups=[attrs.evolve(group, layers=list(specs), spec=uniform)]
        )
        return record(FamilyTransfer("tp/two", attrs.evolve(case, producer=two, consumer=two)))

    # Padding is not a meaning: it only changes strides.
    assert recorded(page_size_padded=64).expected.copies
    with pytest.raises(KVSpecError, match="mean"):
        recorded(scales_digest="0")


def test_transfers_refuses_an_unknown_family() -> None:
    with pytest.raises(SpecError) as raised:
        next(transfers("unknown"))
    assert ("family", "unknown") == (raised.value.field, raised.value.value)


def test_canonical_copies_join_only_in_one_memory() -> None:
    assert ((0, 0, 0, 0, 4),) == canonical([(0, 2, 0, 2, 2), (0, 0, 0, 0, 2)])
    apart = ((0, 0, 0, 0, 2), (0, 2, 1, 2, 2))
    assert apart == canonical(apart)
    assert (*apart[:1], (1, 2, 0, 2, 2)) == canonical([apart[0], (1, 2, 0, 2, 2)])


def test_every_refusal_names_a_field() -> None:
    for vector in files.read(committed("refusals")).vectors:
        assert vector.expected.refused
        assert () == vector.expected.slices + vector.expected.copies
