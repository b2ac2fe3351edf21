"""`kvspec store` with a directory that holds the pages of one engine."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("typer", reason="needs the cli extra")

from typer.testing import CliRunner, Result

import kvspec
from kvspec.cli import app as cli
from kvspec.stored import (
    FileObjects,
    Loaded,
    ModelIdentity,
    PageStore,
    PromptIdentity,
    RankPages,
    StoredSpec,
)
from kvspec.stored.file_objects import ROOT
from tests.support.s3_server import Answer, S3Server, running

TOKENS = list(range(35))


def run(*arguments: object) -> Result:
    texts = [str(argument) for argument in arguments]
    return CliRunner().invoke(cli.app, ["store", *texts], env={"COLUMNS": "160"})


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return a directory with 4 pages of 8 tokens."""
    spec = kvspec.FullAttentionSpec(
        block_size=4, total_num_kv_heads=2, head_size=8, dtype="float32"
    )
    group = kvspec.KVCacheGroup(name="full", layers=["l.0"], spec=spec)
    engine = kvspec.EngineSpec(groups=[group])
    cache, arrays = kvspec.allocate(engine, kvspec.RankId(), num_blocks=16)
    arrays["full"][:] = np.arange(arrays["full"].size, dtype=np.uint64).reshape(
        arrays["full"].shape
    )
    model = ModelIdentity(
        model="org/m", revision="0e9e39f", weights="", quantization="", overrides=""
    )
    objects = FileObjects(tmp_path / "pages")
    store = PageStore(StoredSpec.of(engine, page_tokens=8, head_groups=2), model, objects)
    names = store.names(TOKENS, PromptIdentity.of_text())
    store.rank_pages(cache).save(names, 0, len(names), {"full": range(8)})
    objects.close()
    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    return tmp_path / "pages"


def test_store_lists_explains_checks_and_prunes(directory: Path) -> None:
    tokens = directory.parent / "tokens.json"
    listed = run("ls", directory)
    assert listed.exit_code == 0
    assert "model org/m, revision 0e9e39f" in listed.output
    hit = run("explain", directory, "--tokens", tokens)
    assert hit.exit_code == 0, hit.output
    assert "32 of 32 tokens can be loaded" in hit.output
    miss = run("explain", directory, "--tokens", tokens, "--revision", "beef")
    assert miss.exit_code == 1
    assert "'beef' is wanted" in miss.output
    assert run("explain", directory, "--tokens", tokens, "--adapter", "sql@1").exit_code == 1
    assert "8 objects" in run("check", directory).output
    path = next(directory.rglob("*.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    foreign = path.with_name("notes.txt")
    foreign.write_text("stays")
    wrong = run("check", directory)
    assert wrong.exit_code == 1
    assert "1 wrong" in wrong.output
    assert "checksum" in wrong.output
    assert "foreign" in wrong.output
    pruned = run("prune", directory)
    assert "deleted 0 objects" in pruned.output
    assert not [*directory.rglob("*.damaged")]
    assert "deleted 7 objects, 0 B left" in run("prune", directory, "--keep", "0").output
    assert foreign.exists()


def test_store_prunes_one_space(directory: Path) -> None:
    space = next((directory / ROOT).glob("?" * 64)).name
    assert "deleted 8 objects, 0 B left" in run("prune", directory, "--space", space[:4]).output
    assert run("prune", directory, "--space", "x").exit_code == 2


def test_store_prune_shows_that_pinned_pages_stay(directory: Path) -> None:
    with closing(FileObjects(directory)) as objects:
        (space,) = objects.spaces()
        page = next(iter(objects.stored_objects())).key.page
        objects.pin(space, [page], "engine", 60)
        assert "pinned" in run("prune", directory, "--keep", "0").output
        objects.unpin("engine")
    pruned = run("prune", directory, "--keep", "0").output
    assert "0 B left" in pruned
    assert "pinned" not in pruned


def test_demo_ends_its_pins(tmp_path: Path) -> None:
    assert run("demo", "--directory", tmp_path / "new").exit_code == 0
    assert "0 B left" in run("prune", tmp_path / "new", "--keep", "0").output


def test_store_explain_shows_nothing_of_a_file_that_has_no_tokens(directory: Path) -> None:
    for text in ("a password", '["a password"]', "[" * 100_000):
        tokens = directory.parent / "other.json"
        tokens.write_text(text)
        done = run("explain", directory, "--tokens", tokens)
        assert done.exit_code == 2
        assert str(tokens) in done.output
        assert "password" not in done.output


@pytest.mark.parametrize(
    "arguments",
    [["ls", "/nowhere"], ["prune", "{}", "--keep", "much"], ["explain", "{}", "--tokens", "/x"]],
)
def test_store_reports_bad_input_in_one_line(arguments: list[str], directory: Path) -> None:
    done = run(*(argument.format(directory) for argument in arguments))
    assert done.exit_code == 2
    assert "expected" in done.output


def test_demo_judges_each_step(tmp_path: Path) -> None:
    shown = run("demo", "--directory", tmp_path / "new")
    assert shown.exit_code == 0, shown.output
    lines = shown.output.splitlines()
    assert len(lines) == 10
    assert all(line.startswith("right") for line in lines)
    assert "checksum" in lines[5]
    assert run("demo", "--directory", tmp_path / "new").exit_code == 2


def test_demo_finds_a_load_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RankPages.load

    def load(*arguments: Any, **options: Any) -> Loaded:
        done = right(*arguments, **options)
        ctypes.c_ubyte.from_address(arguments[0].cache.memory[0].address).value ^= 1
        return done

    monkeypatch.setattr(RankPages, "load", load)
    shown = run("demo", "--directory", tmp_path / "new")
    assert shown.exit_code == 1
    assert "WRONG  TP 3 loads" in shown.output


def files(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return mode, size and time of the last change of each file and folder."""
    found = {str(path): path.lstat() for path in [directory, *directory.rglob("*")]}
    return {path: (one.st_mode, one.st_size, one.st_mtime_ns) for path, one in found.items()}


@pytest.mark.parametrize(
    "description",
    [
        "[]",
        {"model": "{{"},
        {"placement": "{{"},
        {"placement": "[]"},
        {"placement": "null"},
        {"placement": "[" * 100_000},
        {"model": "[" * 100_000},
        {"model": "3"},
    ],
)
def test_store_explains_the_other_spaces_despite_a_broken_description(
    description: str | dict[str, str], directory: Path
) -> None:
    path = next(directory.rglob("space.json"))
    other = path.parent.parent / ("ab" * 32) / "space.json"
    other.parent.mkdir(mode=0o700)
    right = json.loads(path.read_text())
    broken = right | description if isinstance(description, dict) else json.loads(description)
    other.write_text(json.dumps(broken))
    tokens = directory.parent / "tokens.json"
    hit = run("explain", directory, "--tokens", tokens)
    assert hit.exit_code == 0, hit.output
    assert "32 of 32 tokens can be loaded" in hit.output
    assert run("ls", directory).exit_code == 0


def test_store_explain_changes_nothing(directory: Path) -> None:
    """A description that belongs to another space would begin that space."""
    path = next(directory.rglob("space.json"))
    path.parent.rename(path.parent.with_name("ab" * 32))
    before = files(directory)
    done = run("explain", directory, "--tokens", directory.parent / "tokens.json")
    assert done.exit_code == 1
    assert before == files(directory)


@pytest.mark.parametrize(
    "fault", ["no index", "stale index", "old writer", "damaged", "no tmp", ""]
)
def test_store_ls_and_explain_write_nothing(fault: str, directory: Path) -> None:
    root = directory / ROOT
    if fault == "no index":
        shutil.rmtree(root / "index-1")
    elif fault == "stale index":
        (root / "index.stale").touch()
    elif fault == "old writer":
        left = root / "tmp" / f"1-{'0' * 16}"
        left.touch()
        os.utime(left, (1, 1))
    elif fault == "damaged":
        for path in directory.rglob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1])
    elif fault == "no tmp":
        (root / "tmp").rmdir()
    before = files(directory)
    assert "org/m" in run("ls", directory).output
    shown = run("explain", directory, "--tokens", directory.parent / "tokens.json")
    assert "32 of 32 tokens can be loaded" in shown.output
    assert before == files(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_store_accepts_the_files_of_named_owners(directory: Path) -> None:
    for path in [directory, *directory.rglob("*")]:
        os.chown(path, 12345, -1)
    tokens = ["--tokens", directory.parent / "tokens.json"]
    for arguments in (["ls"], ["explain", *tokens], ["check"], ["prune", "--keep", "0"]):
        command, *options = arguments
        assert 2 == run(command, directory, *options).exit_code
        assert 2 == run(command, directory, *options, "--owner", 54321).exit_code
        shown = run(command, directory, *options, "--owner", 54321, "--owner", 12345)
        assert 0 == shown.exit_code, shown.output


@pytest.fixture
def bucket(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A bucket with the pages of the directory, under the names of its files."""
    with running() as server:
        settings = {"AWS_ENDPOINT_URL": server.url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "r"}
        login = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        for name, value in {**settings, **login}.items():
            monkeypatch.setenv(name, value)
        for pattern in ("*.safetensors", "space.json"):
            for path in directory.rglob(pattern):
                server.objects[f"f/{path.relative_to(directory)}"] = path.read_bytes()
        yield server


def test_store_looks_at_a_bucket_as_at_a_directory(directory: Path, bucket: S3Server) -> None:
    tokens, place = ["--tokens", directory.parent / "tokens.json"], "s3://b/f"
    before = dict(bucket.objects)
    for command, *options in (["ls"], ["explain", *tokens], ["check"]):
        there, here = run(command, place, *options), run(command, directory, *options)
        assert 0 == here.exit_code == there.exit_code, there.output
        assert here.output == there.output
    assert before == bucket.objects
    damaged, moved, *_ = sorted(name for name in before if name.endswith(".safetensors"))
    bucket.objects[damaged] = before[damaged][:-1]
    letter = f"{moved}.note"
    bucket.objects[letter] = b"stays"
    wrong = run("check", place)
    assert 1 == wrong.exit_code
    assert "file size" in wrong.output
    assert f"{letter.removeprefix('f/')}: foreign" in wrong.output.replace("\n", "")
    assert "7 objects" in wrong.output
    assert f"{damaged}.damaged" in bucket.objects
    assert "deleted 0 objects" in run("prune", place).output
    assert f"{damaged}.damaged" not in bucket.objects
    space = next(iter(before)).split("/")[2]
    assert "deleted 7 objects, 0 B left" in run("prune", place, "--space", space).output
    assert {letter, f"f/{ROOT}/{space}/space.json"} == bucket.objects.keys()
    for wrong_option in (["prune", place, "--keep", "0"], ["ls", place, "--owner", "5"]):
        assert 2 == run(*wrong_option).exit_code


def test_store_names_a_bucket_that_fails(bucket: S3Server) -> None:
    bucket.before = lambda _: Answer(403, b"<Error><Code>AccessDenied</Code></Error>")
    for arguments in (["ls", "s3://b/f"], ["check", "s3://b/f"], ["prune", "s3://b/f"]):
        shown = run(*arguments)
        assert 2 == shown.exit_code
        assert "AccessDenied" in shown.output
    for address in ("s3://user:SECRET@b/f", "s3://b/f?SECRET"):
        shown = run("ls", address)
        assert 2 == shown.exit_code
        assert "SECRET" not in shown.output


def test_store_prune_leaves_files_of_others_and_goes_on(directory: Path) -> None:
    first, second, *_ = sorted(directory.rglob("*.safetensors"))
    first.write_text("a letter to a friend, of some length")
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    space = next((directory / ROOT).glob("?" * 64)).name
    pruned = run("prune", directory, "--space", space)
    assert pruned.exit_code == 1
    assert str(first) in pruned.output.replace("\n", "")
    assert [first] == [*directory.rglob("*.safetensors*")]


def test_store_shows_a_name_in_one_line(directory: Path) -> None:
    os.close(os.open(os.fsencode(directory / ROOT) + b"/\xff\n9 objects", os.O_CREAT))
    done = run("check", directory)
    assert done.exit_code == 1
    assert [line for line in done.output.splitlines() if line.startswith("9")] == []
    done.output.encode()


@pytest.mark.parametrize("text", ["[" * 100_000, "{}", "[1.5]", "[true]"])
def test_store_explain_refuses_tokens_that_are_no_tokens(text: str, directory: Path) -> None:
    tokens = directory.parent / "tokens.json"
    tokens.write_text(text)
    done = run("explain", directory, "--tokens", tokens)
    assert done.exit_code == 2
    assert "expected" in done.output


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o770])
def test_store_opens_a_directory_with_its_own_permissions(mode: int, tmp_path: Path) -> None:
    FileObjects(tmp_path / "pages", mode=mode).close()
    for arguments in (["ls"], ["check"], ["prune", "--keep", "0"]):
        done = run(arguments[0], tmp_path / "pages", *arguments[1:])
        assert done.exit_code == 0, done.output
    assert mode == stat.S_IMODE((tmp_path / "pages" / ROOT / "tmp").stat().st_mode)


def test_store_refuses_a_directory_that_anybody_may_change(directory: Path) -> None:
    (directory / ROOT).chmod(0o777)
    assert run("ls", directory).exit_code == 2
