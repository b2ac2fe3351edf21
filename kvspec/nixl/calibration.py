"""Read and write the file with the measured costs of a machine.

Invariant: a file is used only if it is complete and was measured on this machine. A file that the
caller named is refused otherwise. The default file is replaced by the default costs, and
`Costs.origin` contains the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import instance
from kvspec.nixl.agent import package_names
from kvspec.nixl.costs import FIGURES, Costs

VARIABLE = "KVSPEC_CALIBRATION"
VERSION = 1
MAX_BYTES = 1 << 16


@attrs.frozen(kw_only=True)
class Machine:
    """What figures hold for: the processor's name and cores, nixl's version, UCX's transports."""

    cpu: str
    cores: int
    nixl: str
    transports: str

    @staticmethod
    def here() -> Machine:
        """Return this machine."""
        return Machine(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            nixl=_nixl(),
            transports=os.environ.get("UCX_TLS", ""),
        )


def place() -> Path:
    """Return where figures are kept: `KVSPEC_CALIBRATION`, or in the user's cache directory.

    `SpecError` where neither is known, as of a user who has no home.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(cache).expanduser() / "kvspec" / "calibration.json"
    except RuntimeError as error:
        raise SpecError(VARIABLE, None, "a path, since this user has no home") from error


def calibrated(path: str | os.PathLike[str] | None = None) -> Costs:
    """Return the costs that `kvspec calibrate` wrote on this machine.

    Args:
        path: File to read. By default, the file that `kvspec calibrate` writes. If the default
            file cannot be used, the default costs are returned, and their `origin` says why.

    Returns:
        The costs, in seconds.

    Raises:
        SpecError: If *path* is given, and it does not contain a calibration of this machine.
    """
    if path is not None:
        try:
            named = Path(path)
        except TypeError as error:
            raise SpecError("path", path, "a path") from error
        return _read(named)
    try:
        return _read(place())
    except SpecError as error:
        missing = isinstance(error.__cause__, FileNotFoundError)
        why = "`kvspec calibrate` was not run here" if missing else error
        return Costs(origin=f"the stated defaults: {why}")


def writable(path: Path | None = None) -> Path:
    """Return where figures are to be kept, *path* or `place`; `SpecError` if none can be."""
    path = place() if path is None else path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder, free = path.is_dir(), os.access(path.parent, os.W_OK)
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    if folder or not free:
        raise _unwritable(path, "this is a folder" if folder else "nothing may be written there")
    return path


def _unwritable(path: Path, why: object) -> SpecError:
    return SpecError("calibration", str(path), f"a file that can be written: {why}")


def save(costs: Costs, path: Path | None = None) -> Path:
    """Write *costs* of this machine to *path*, whole or not at all; return where.

    `SpecError` if that cannot be.
    """
    path = writable(path)
    text = json.dumps(
        {
            "version": VERSION,
            "machine": attrs.asdict(Machine.here()),
            "seconds": {name: getattr(costs, name) for name in FIGURES},
        },
        indent=2,
    )
    partly = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partly.write_text(text + "\n", encoding="utf-8")
        partly.replace(path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            partly.unlink()
        raise _unwritable(path, error) from error
    return path


def _read(path: Path) -> Costs:
    field = f"calibration {path}"
    text = _bytes(field, path)
    try:
        held = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpecError(field, str(error), "a file of JSON, whole") from error
    kept = _members(field, held, {"version", "machine", "seconds"})
    if kept["version"] != VERSION:
        raise SpecError(f"{field}: version", kept["version"], f"{VERSION}; calibrate again")
    here = attrs.asdict(Machine.here())
    there = _members(f"{field}: machine", kept["machine"], set(here))
    for name, value in here.items():
        if there[name] != value:
            raise SpecError(f"{field}: {name}", there[name], f"{value!r}, this machine's")
    seconds = _members(f"{field}: seconds", kept["seconds"], set(FIGURES))
    try:
        return Costs(**seconds, origin=f"measured on this machine ({path})")
    except SpecError as error:
        place = f"{field}: {error.field}"
        raise SpecError(place, error.value, error.expected, rule=error.rule) from error


def _bytes(field: str, path: Path) -> bytes:
    """Return what the file at *path* has."""
    wanted, text, why = "a file that `kvspec calibrate` wrote", b"", "no plain file"
    try:
        if stat.S_ISREG(path.stat().st_mode):  # who opens a pipe waits for who writes
            with path.open("rb") as file:
                text = file.read(MAX_BYTES + 1)
            why = f"over {MAX_BYTES} bytes" if len(text) > MAX_BYTES else ""
    except (OSError, ValueError) as error:
        raise SpecError(field, getattr(error, "strerror", str(error)), wanted) from error
    if why:
        raise SpecError(field, why, wanted)
    return text


def _members(field: str, value: object, names: set[str]) -> Mapping[str, Any]:
    """Return *value* if it is an object with these *names* and no other."""
    held = instance(field, value, dict)
    if set(held) != names:
        raise SpecError(field, sorted(map(str, held)), f"{', '.join(sorted(names))}")
    return held


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else "unknown"


def _nixl() -> str:
    for name in package_names():
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"
