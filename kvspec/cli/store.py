"""Implement `kvspec store`: list the contents of a directory or a bucket of pages, explain a hit.

Invariant: `ls` and `explain` write nothing. `check` only renames objects that are damaged, and
`prune` deletes only what kvspec wrote.
"""

from __future__ import annotations

import json
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import typer

from kvspec.cli import printing
from kvspec.cli.store_demo import Demonstration
from kvspec.errors import KVSpecError, SpecError, StoreError, counted, nbytes
from kvspec.stored.bucket_objects import BucketObjects
from kvspec.stored.file_objects import MODES, ROOT, FileObjects
from kvspec.stored.names import ModelIdentity, PromptIdentity, space_of
from kvspec.stored.objects import StoredObject
from kvspec.stored.placement import StoredSpec
from kvspec.stored.store import PageStore
from kvspec.tickets.identity import tokens_of
from kvspec.tickets.stated import explain_difference

store = typer.Typer(help="Look at a directory or a bucket of stored pages.", no_args_is_help=True)
DIRECTORY = typer.Argument(
    help="The directory that was passed to `FileObjects`, or the address of a bucket."
)
OWNERS = typer.Option(
    [], "--owner", help="Number of another user whose files are accepted. It may be repeated."
)
_MOST_SHOWN = 200  # Characters of a malformed text in an error.
_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


@contextmanager
def _opened(
    place: str, owners: Sequence[int], *, read_only: bool = False
) -> Iterator[FileObjects | BucketObjects]:
    with printing.reported_errors():
        if "://" in place:
            if owners:
                raise SpecError("--owner", owners, "none for a bucket, which has no files")
            yield BucketObjects.of_url(place, read_only=read_only)
            return
        root = Path(place) / ROOT
        if not root.is_dir():
            raise SpecError("DIRECTORY", place, f"a directory that contains {ROOT}")
        # Engines may share the directory with their group. Other permissions are refused.
        mode = stat.S_IMODE(root.lstat().st_mode)
        mode = mode if mode in MODES else MODES[0]
        objects = FileObjects(place, mode=mode, owners=owners, read_only=read_only)
        try:
            yield objects
        finally:
            objects.close()


def _parsed(field: str, text: str) -> Any:  # noqa: ANN401 - any value of JSON
    """Return the JSON value of *text*. If it is not valid JSON, raise `SpecError` for *field*."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(field, text[:_MOST_SHOWN], f"a text in JSON ({error})") from None


def _model(description: Mapping[str, str]) -> ModelIdentity:
    return ModelIdentity.from_params(_parsed("model", description.get("model", "null")))


def _placement(description: Mapping[str, str]) -> StoredSpec:
    return StoredSpec.from_params(_parsed("placement", description.get("placement", "null")))


def _echo(text: object) -> None:
    """Print one line. A file name may have line breaks, and bytes that are not text."""
    shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))
    typer.echo("".join(shown))


def _words(description: Mapping[str, str]) -> str:
    try:
        fields = attrs.asdict(_model(description))
    except SpecError:
        return "not described"
    return ", ".join(f"{name} {value}" for name, value in fields.items() if value)


def _cut(description: Mapping[str, str]) -> str:
    """Return in words how the pages of a space are cut. Engines with other values miss them."""
    try:
        placement = _placement(description)
    except KVSpecError:
        return "not described"
    groups = counted(placement.head_groups, "head group")
    return f"pages of {counted(placement.page_tokens, 'token')}, {groups}"


@store.command()
def ls(directory: str = DIRECTORY, owners: list[int] = OWNERS) -> None:
    """List the spaces of a directory. A space has the pages of one model and one placement."""
    with _opened(directory, owners, read_only=True) as objects:
        rows = []
        for space, description in objects.spaces().items():
            found = [*objects.stored_objects(space)]
            pages = len({one.key.page for one in found})
            size = nbytes(sum(one.num_bytes for one in found))
            counts = f"{pages:,}", f"{len(found):,}"
            words = f"{_words(description)}; {_cut(description)}"
            rows.append((space[:16], words, *counts, size))
        console = printing.output()
        console.print(
            printing.table(
                ("space", "model; placement", "pages", "objects", "size"),
                rows,
                ("pages", "objects", "size"),
            )
        )


@store.command()
def explain(
    directory: str = DIRECTORY,
    tokens: Path = typer.Option(help="File with the token ids of the prompt as a list in JSON."),
    model: str = typer.Option("", help="Name of the model. That of each space by default."),
    revision: str = typer.Option("", help="Its revision. That of each space by default."),
    weights: str = typer.Option("", help="Version of its weights. That of each space by default."),
    adapter: str = typer.Option("", help="The adapter of the prompt, such as sql@1f3a."),
    salt: str = typer.Option("", help="The salt of the prompt."),
    owners: list[int] = OWNERS,
) -> None:
    """Say how many tokens of a prompt can be loaded from each space, and why not more.

    Exit status 0: at least one page can be loaded. 1: none.
    """
    with _opened(directory, owners, read_only=True) as objects:
        try:
            text = tokens.read_text()
        except (OSError, ValueError) as error:
            raise SpecError("--tokens", str(tokens), f"a file with JSON ({error})") from None
        try:
            token_ids = tokens_of(json.loads(text)).tolist()
        except (ValueError, RecursionError, SpecError):  # The file may contain anything.
            expected = "a file with a list of token ids in JSON"
            raise SpecError("--tokens", str(tokens), expected) from None
        given = {"model": model, "revision": revision, "weights": weights}
        wanted = {name: value for name, value in given.items() if value}
        prompt = PromptIdentity.of_text(adapter=adapter, salt=salt)
        hit = False
        for space, description in objects.spaces().items():
            try:
                words = _explained(objects, space, description, wanted, token_ids, prompt)
            except KVSpecError as error:  # Another version wrote it, or somebody has changed it.
                words = f"its description cannot be used: {error}"
            hit = hit or re.match("[1-9]", words) is not None
            typer.echo(f"space {space[:16]}: {words}")
    if not hit:
        raise typer.Exit(printing.WRONG)


def _explained(
    objects: FileObjects | BucketObjects,
    space: str,
    description: Mapping[str, str],
    wanted: Mapping[str, str],
    token_ids: Sequence[int],
    prompt: PromptIdentity,
) -> str:
    """Return in words what *space* has of a prompt. They begin with the number of tokens."""
    if not {"model", "placement"} <= description.keys():
        return "it has no description"
    stored = _model(description)
    if why := explain_difference(attrs.evolve(stored, **wanted), stored):
        return why
    placement = _placement(description)
    if space_of(stored, placement.digest) != space:
        return "its description is that of another space"
    pages = PageStore(placement, stored, objects)
    return pages.explain(pages.names(token_ids, prompt), placement.engine)


@store.command()
def demo(
    directory: Path | None = typer.Option(None, help="A new directory for the pages, which stays."),
) -> None:
    """Store a prompt at TP 8, load it in other engines, damage the store, and judge every byte.

    Exit status 0: all steps were right. 1: see the output.
    """
    with printing.reported_errors(), tempfile.TemporaryDirectory() as folder:
        right = True
        for was_right, line in Demonstration(directory or Path(folder)).lines():
            typer.echo(f"{'right' if was_right else 'WRONG'}  {line}")
            right = right and was_right
    if not right:
        raise typer.Exit(printing.WRONG)


@store.command()
def check(directory: str = DIRECTORY, owners: list[int] = OWNERS) -> None:
    """Read all objects and compare their checksums. A damaged one is renamed.

    Exit status 0: all objects are right, and there are no other files. 1: see the output.
    """
    with _opened(directory, owners) as objects:
        right, wrong, size = 0, 0, 0
        for one in objects.stored_objects():
            try:
                size += _verify(objects, one)
                right += 1
            except StoreError as error:
                wrong += error.problem != "absent"  # It may leave while the command runs.
                _echo(error)
        strays = [f"{path}: {kind}" for path, kind in objects.strays() if kind != "temporary"]
        for stray in strays:
            _echo(stray)
        typer.echo(f"{counted(right, 'object')} with {nbytes(size)} right, {wrong} wrong")
    if wrong or strays:
        raise typer.Exit(printing.WRONG)


def _verify(objects: FileObjects | BucketObjects, one: StoredObject) -> int:
    target = bytearray(objects.inspect(one.key).num_bytes)
    objects.read(one.key, memoryview(target))
    return len(target)


@store.command()
def prune(
    directory: str = DIRECTORY,
    keep: str = typer.Option("", help="Bytes to keep, such as 200g. The oldest pages leave."),
    space: str = typer.Option("", help="Delete all pages of this space: its first digits."),
    owners: list[int] = OWNERS,
) -> None:
    """Delete damaged objects, and pages by the options. Pinned pages stay with --keep.

    A bucket has no --keep, because it has no times of use: give it rules of its own.

    Exit status 1: some files of others were in the way, and stay.
    """
    with _opened(directory, owners) as objects:
        most = _size(keep) if keep else None
        if isinstance(objects, BucketObjects) and most is not None:
            raise SpecError("--keep", keep, "none for a bucket, which has rules of its own")
        deleted, wrong = 0, 0
        if space:
            found = [name for name in objects.spaces() if name.startswith(space)]
            if len(found) != 1:
                raise SpecError("--space", space, f"the begin of one space, not of {len(found)}")
            for one in objects.stored_objects(found[0]):
                try:
                    deleted += objects.remove([one.key])
                except StoreError as error:
                    wrong += error.problem != "damaged"  # It is a stray now.
                    _echo(error)
        if isinstance(objects, FileObjects) and most is not None:
            deleted += objects.free_bytes(max(0, objects.num_bytes() - most), most)
        for name in objects.remove_strays():
            _echo(f"deleted {name}")
        left = objects.num_bytes()
        above = most is not None and left > most
        why = ": engines have pinned the rest, or it is not of kvspec" if above else ""
        typer.echo(f"deleted {counted(deleted, 'object')}, {nbytes(left)} left{why}")
    if wrong:
        raise typer.Exit(printing.WRONG)


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)([kmgt]?)(?:i?b)?", text.lower())
    if match is None:
        raise SpecError("--keep", text, "a number of bytes, such as 500m or 200g")
    return int(match[1]) << _UNITS[match[2]]
