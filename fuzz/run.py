"""Fuzz the laws of one file, guided by coverage: `python fuzz/run.py TARGET [libFuzzer flags]`.

`python fuzz/run.py TARGET flood SECONDS [SEED [WAY]]` calls the target's `check` with random inputs
as fast as possible, without coverage. WAY names one of the generators in the target's `FLOODS`. The
first is the default.

TARGET is the name of a file of this folder (such as `contexts`), or the path of any file with
Hypothesis laws, such as `tests/laws/test_transfer.py`. The first byte of an input chooses the law,
and Hypothesis decodes the other bytes. Any exception of a law is a crash. A folder among the flags
is the corpus, which is kept between runs. Without one, a new corpus is made from seeds.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TARGETS = ("slices", "layouts", "contexts", "block_tables", "from_config", "handshakes", "messages")
# Bytes of the longest input. At this length most random inputs decode to a whole case.
LONGEST = 4096
# Inputs of a new corpus: enough that each law of a target starts with several.
SEEDS = 64
Law = Callable[[bytes], bytes | None]


def load(target: str) -> dict[str, Any]:
    """Return the attributes of the module *target*, by name."""
    path = FOLDER / f"{target}.py" if target in TARGETS else Path(target)
    spec = importlib.util.spec_from_file_location(f"fuzzed_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{target}: expected one of {', '.join(TARGETS)}, or the path of laws")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return vars(module)


def laws_of(target: str) -> dict[str, Law]:
    """Return the laws of *target* by name, each as a function of bytes.

    A law returns None for bytes that decode to nothing, and raises if it does not hold.
    """
    return {
        name: value.hypothesis.fuzz_one_input
        for name, value in sorted(load(target).items())
        if hasattr(value, "hypothesis") and not hasattr(value, "pytestmark")
    }


def one_input(laws: Sequence[Law]) -> Callable[[bytes], bytes | None]:
    """Return the function that passes an input to the law that its first byte chooses."""

    def run(data: bytes) -> bytes | None:
        return laws[data[0] % len(laws)](data[1:]) if data else None

    return run


def inputs(count: int, seed: int = 0, longest: int = LONGEST) -> Iterator[bytes]:
    """Yield *count* inputs of up to *longest* bytes; equal seeds give equal inputs."""
    rng = random.Random(seed)  # noqa: S311 - repeatable on purpose
    for _ in range(count):
        yield rng.randbytes(rng.randrange(longest // 16, longest))


def with_corpus(flags: list[str]) -> list[str]:
    """Return *flags* with a corpus of seeds, because short random inputs rarely decode to a case.

    A file among the flags is an input to run again. It needs no corpus.
    """
    if any(Path(flag).is_file() for flag in flags):
        return flags
    folders = [flag for flag in flags if not flag.startswith("-")]
    folder = Path(folders[0] if folders else tempfile.mkdtemp(prefix="corpus-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        for at, data in enumerate(inputs(SEEDS)):
            (folder / f"seed-{at}").write_bytes(data)
    # By default libFuzzer begins with short inputs and lengthens them slowly. Short inputs decode
    # to no case, so length control is off.
    return [f"-max_len={LONGEST}", "-len_control=0", *flags, *([] if folders else [str(folder)])]


def flood(target: str, seconds: float, seed: int = 0, way: str = "") -> str:
    """Check inputs for *seconds*; return how many, how many were valid, and the slowest time."""
    module = load(target)
    inputs_of = module["FLOODS"][way or next(iter(module["FLOODS"]))]
    stream = inputs_of(random.Random(seed))  # noqa: S311 - repeatable on purpose
    end, tried, valid, slowest, data = time.monotonic() + seconds, 0, 0, 0.0, b""
    while (began := time.monotonic()) < end:
        try:
            data, *more = next(stream)
            valid += module["check"](data, *more)
        except BaseException:
            print(f"seed {seed}, input {tried}: {data.hex()}")
            raise
        tried += 1
        slowest = max(slowest, time.monotonic() - began)
    return f"seed {seed}: {tried} inputs, {valid} of them valid; slowest {slowest:.3f} s"


def main() -> None:
    """Fuzz the target that the command line names."""
    if sys.argv[2:3] == ["flood"]:
        target, _, seconds, *rest = sys.argv[1:]
        print(flood(target, float(seconds), *map(int, rest[:1]), *rest[1:]))
        return
    try:
        import atheris  # noqa: PLC0415 - only fuzzing needs it
    except ImportError:
        raise SystemExit("atheris is not installed: pip install --group fuzz") from None
    if len(sys.argv) == 1:
        raise SystemExit(__doc__)
    program, target, *flags = sys.argv
    with atheris.instrument_imports(include=["kvspec"]):
        laws = laws_of(target)
    print(f"laws: {', '.join(laws)}")
    run = one_input(list(laws.values()))

    def crash_only(data: bytes) -> None:
        run(data)

    atheris.Setup([program, *with_corpus(flags)], crash_only)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
