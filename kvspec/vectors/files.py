"""Write, read and check files of vectors.

Invariant: equal vectors are equal bytes, whatever the machine. A file that is damaged, or of
another version, is refused with its name before any of its vectors is used.

How it works:
    A file is JSON, compressed with gzip: a head, the SHA-256 of the vectors, and one vector on each
    line. `check` records each vector again and compares, so it also finds a file that was changed
    together with its checksum.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import attrs
import msgspec

from kvspec.errors import SpecError
from kvspec.vectors import digests, page_names
from kvspec.vectors.families import FAMILIES, transfers
from kvspec.vectors.recording import record
from kvspec.vectors.structure import FORMAT, VECTORS_VERSION, File, Head, Vector, json_schema

SUFFIX = ".json.gz"
SCHEMA = "schema.json"
DIGESTS = "digests.json"
PAGE_NAMES = "names.json"

Progress = Callable[[str, int], None]


@attrs.frozen
class Checked:
    """The result of one file.

    Attributes:
        family: Name of the family.
        vectors: Number of vectors.
        wrong: Names of vectors that differ from those of the library, that it does not have, that
            occur twice, or that are missing.
    """

    family: str
    vectors: int
    wrong: tuple[str, ...]


def write(
    folder: Path, families: Iterable[str] = tuple(FAMILIES), *, large: bool = False
) -> Iterator[tuple[Path, int]]:
    """Record families and write a file for each, the schema, and the vectors of digests and names.

    Args:
        folder: The folder. It is made if it does not exist.
        families: Names of the families.
        large: Whether to write the large set.

    Yields:
        Each file that was written, and its number of vectors.

    Raises:
        SpecError: If a family is unknown, or the folder cannot be written.
    """
    names = tuple(families)
    for name in names:
        if name not in FAMILIES:
            raise SpecError("family", name, f"one of {', '.join(FAMILIES)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SCHEMA).write_bytes(schema_bytes())
        (folder / DIGESTS).write_bytes(digests.encoded())
        (folder / PAGE_NAMES).write_bytes(page_names.encoded())
        for name in names:
            vectors = tuple(record(transfer) for transfer in transfers(name, large=large))
            path = folder / f"{name}{SUFFIX}"
            # Without a time, equal vectors are equal bytes.
            path.write_bytes(gzip.compress(encoded(name, vectors), 9, mtime=0))
            yield path, len(vectors)
    except OSError as error:
        raise SpecError("folder", str(folder), f"a folder that can be written ({error})") from None


def schema_bytes() -> bytes:
    """Return the JSON Schema of a file, as it is written."""
    return json.dumps(json_schema(), indent=1).encode() + b"\n"


def encoded(family: str, vectors: Iterable[Vector]) -> bytes:
    """Return the JSON of a file, before it is compressed."""
    lines = _lines(vectors)
    head = {
        "format": FORMAT,
        "version": VECTORS_VERSION,
        "family": family,
        "sha256": _sha256(lines),
    }
    return json.dumps(head)[:-1].encode() + b', "vectors": [\n' + b",\n".join(lines) + b"\n]}\n"


def _lines(vectors: Iterable[Vector]) -> list[bytes]:
    return [msgspec.json.encode(vector) for vector in vectors]


def _sha256(lines: list[bytes]) -> str:
    return hashlib.sha256(b"\n".join(lines)).hexdigest()


def read(path: Path) -> File:
    """Return the vectors of a file.

    Args:
        path: The file, compressed or not.

    Raises:
        SpecError: If the file is damaged, or has another format or version. The field begins with
            the name of the file.
    """
    name = path.name
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if name.endswith(".gz") else data
    # A damaged file raises `zlib.error`, a short one `EOFError`, and a missing one `OSError`.
    except (OSError, EOFError, zlib.error) as error:
        raise SpecError(name, str(error), "a file of vectors, compressed with gzip") from None
    try:
        head = msgspec.json.decode(data, type=Head)
        # Read the version first: the structure of another version is not known.
        if head.format != FORMAT:
            raise SpecError(f"{name}.format", head.format, FORMAT)
        if head.version != VECTORS_VERSION:
            raise SpecError(
                f"{name}.version", head.version, f"{VECTORS_VERSION}, the only known version"
            )
        file = msgspec.json.decode(data, type=File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SpecError(name, str(error), f"JSON that follows {SCHEMA}") from None
    if (digest := _sha256(_lines(file.vectors))) != file.sha256:
        raise SpecError(f"{name}.sha256", file.sha256, f"{digest}, the checksum of the vectors")
    if file.family not in FAMILIES:
        raise SpecError(f"{name}.family", file.family, f"one of {', '.join(FAMILIES)}")
    return file


def check(folder: Path, *, large: bool = False) -> Iterator[Checked]:
    """Read all files of a folder and compare each vector with the library's.

    Args:
        folder: The folder.
        large: Whether the files must have the large set.

    Yields:
        The result of each file.

    Raises:
        SpecError: If the folder has no file, a file cannot be read, or it has another family than
            its name.
    """
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise SpecError("folder", str(folder), f"a folder with files *{SUFFIX}")
    for path in paths:
        file = read(path)
        if path.name != f"{file.family}{SUFFIX}":
            raise SpecError(
                f"{path.name}.family", file.family, "the family that the file is named for"
            )
        yield compare(file, large=large)


def compare(file: File, every: int = 1, *, large: bool = False) -> Checked:
    """Record the vectors of a file again, and return which of them differ.

    Args:
        file: The file.
        every: Compare one of so many vectors. The names of all are compared.
        large: Whether the file must have the large set.
    """
    known = {transfer.name: transfer for transfer in transfers(file.family, large=large)}
    times = Counter(vector.id for vector in file.vectors)
    wrong = [name for name in known if times[name] != 1]
    wrong += [
        vector.id
        for vector in file.vectors[::every]
        # In Python 4.0 equals 4, and 1 equals True. In JSON they differ.
        if vector.id not in known or _lines([record(known[vector.id])]) != _lines([vector])
    ]
    return Checked(file.family, len(file.vectors), tuple(dict.fromkeys(wrong)))
