"""Exchange prompts between real engines of different makers, and compare their answers.

A producer computes a prompt, and a consumer loads it and decodes. The engines of each maker run in
its own environment, as processes that this program calls (see `lines`). Before each row, all unused
memory of both engines is filled with NaN. The output has one row for each model and ordered pair of
engines. Each row tries all sizes of blocks of both. The outcome is one of:

  same        Greedy tokens are those of the consumer alone and of transformers, log probabilities
              are close, and the consumer computed only the last token of each prompt.
  refused     The transfer was refused, with the reason.
  different   Tokens or log probabilities differ.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
from lines import Failed, Program

sys.path.append(str(Path(__file__).parents[1] / "vllm"))
import tables
from models import VOCABULARY, make
from scenarios import beginnings

# Tokens that the consumer decodes for each prompt.
TOKENS = 16
# Log probabilities that differ by less are equal. Engines add in a different order.
CLOSE = 1e-3
# The prompt of the request after one that was refused.
NEXT = 2
# Fills the memory of engines that must be finite.
GARBAGE = 1e4
# Seconds until a producer has freed its prompts.
FREEING = 30.0
REVISION = "1"
HERE = Path(__file__).parent

# The models, and the sizes of vLLM's blocks. Its attention for CPUs takes blocks of 32 tokens, and
# its MLA takes blocks of 16.
MODELS = {
    "llama-6": (32, 64),
    "qwen3-6": (32, 64),
    "gemma-2": (32, 64),
    "exaone-2": (32, 64),
    "deepseek": (16, 32),
    "deepseek-3": (16, 32),
}
# The sizes of the other engines' blocks.
SIZES = (16, 32)
# SGLang attends by torch alone on CPUs here. It has no MLA and no EXAONE 4 then. These are the
# sizes of pages for each TP size. Two engines of each need memory, so all sizes of TP and pages
# occur, but not all combinations.
SGLANG: dict[str, dict[int, tuple[int, ...]]] = {
    "llama-6": {1: (1, 16), 2: (32,)},
    "qwen3-6": {1: (16, 32), 2: (1,)},
    "gemma-2": {1: (16, 32), 2: (1,)},
}
# Models with windows, whose code in SGLang does not show how keys are rotated.
KEYS = {"gemma-2": {"rotary": "halves", "rotary_size": 32, "normalized": True}}
# Models that `llama_engine` can convert.
LLAMA = ("llama-6", "qwen3-6")
# The program of each maker. llama.cpp shares the environment of transformers.
PROGRAMS = {
    "llama": "llama_engine.py",
    "transformers": "transformers_engine.py",
    "vllm": "vllm_engine.py",
    "sglang": "sglang_engine.py",
}
# The model of the rows that must be refused, and one of equal shapes whose keys are normalised.
REFUSING, MEANING = "llama-6", "qwen3-6"


@attrs.frozen
class Engine:
    """A started engine.

    Attributes:
        program: The program that runs it.
        name: Its name there, and the `engine_id` of its session.
        block: Tokens of a block.
    """

    program: Program
    name: str
    block: int

    def call(self, name: str, **arguments: Any) -> Any:  # noqa: ANN401
        """Call the program."""
        return self.program.call(name, engine=self.name, **arguments)


@attrs.frozen
class Kind:
    """The engines of one maker and TP size for one model, one for each size of blocks.

    Attributes:
        name: The maker, and the TP size if it can have several.
        producers: The engines that compute prompts.
        consumers: The engines that load prompts: the same, unless an engine can have only one role.
        alone: The answers of an engine that computes the prompts itself.
        filling: What unused memory is filled with: NaN, or `GARBAGE` if the answers of the engine
            alone depend on NaN there.
    """

    name: str
    producers: tuple[Engine, ...]
    consumers: tuple[Engine, ...]
    alone: list[dict[str, Any]]
    filling: float

    @property
    def sizes(self) -> str:
        """The sizes of the blocks."""
        return ", ".join(str(engine.block) for engine in self.producers)


def prompts() -> list[list[int]]:
    """Return the prompts of `scenarios`, each with a last token."""
    draw = random.Random(8)  # noqa: S311 - the same each time
    return [[*beginning, draw.randrange(3, VOCABULARY)] for beginning in beginnings()]


def distance(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> float:
    """Return the largest difference of log probabilities, or infinity if a token differs."""
    if expected["tokens"] != actual["tokens"]:
        return math.inf
    worst = 0.0
    for want, got in zip(expected["logprobs"], actual["logprobs"], strict=True):
        # The last of five may differ if two are almost equal.
        differences = [abs(want[token] - got[token]) for token in want.keys() & got.keys()]
        worst = max(worst, *differences) if differences else math.inf
        # NaN is not larger than anything, so `max` might lose it.
        if any(math.isnan(value) for value in (*want.values(), *got.values())):
            return math.inf
    return worst


def clear(engine: Engine, filling: float) -> None:
    """Forget cached prompts and fill all memory of an engine's cache."""
    deadline = time.monotonic() + FREEING
    while not engine.call("clear", value=filling):
        if time.monotonic() > deadline:
            raise Failed(f"{engine.name} still holds {engine.call('held')} prompts")
        time.sleep(0.2)


def alone(engine: Engine, filling: float) -> list[dict[str, Any]]:
    """Return the answers of an engine that computes the prompts itself, in filled memory."""
    clear(engine, filling)
    return [engine.call("alone", prompt=prompt, count=TOKENS) for prompt in prompts()]


def moved(producer: Engine, consumer: Engine, prompt: list[int]) -> dict[str, Any]:
    """Return the answer of a consumer to a prompt that the producer has computed."""
    prefilled = producer.call("prefill", prompt=prompt)
    if prefilled["ticket"] is None:
        raise Failed(f"not held: {prefilled['why']}")
    return loaded(consumer, prompt, prefilled["ticket"])


def loaded(consumer: Engine, prompt: list[int], ticket: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a consumer that loads the prompt of *ticket*."""
    answer = consumer.call("decode", prompt=prompt, count=TOKENS, ticket=ticket)
    if answer["finish"] != "length":
        raise Failed(answer["why"] or answer["finish"])
    if (computed := answer["computed"] - TOKENS + 1) > 1:
        raise Failed(answer["why"] or f"the consumer computed {computed} tokens")
    found: dict[str, Any] = answer
    return found


def pair(producer: Kind, consumer: Kind, teacher: Kind) -> tuple[str, ...]:
    """Return the outcome of all sizes, and the differences to the consumer and to transformers.

    If only some prompts are refused, the others must be the same, and their number is named.
    """
    worst, sent, refusals = [0.0, 0.0], 0, list[str]()
    for one in producer.producers:
        for other in consumer.consumers:
            sizes = f"blocks {one.block} -> {other.block}"
            try:
                clear(one, producer.filling)
                clear(other, consumer.filling)
                for number, prompt in enumerate(prompts()):
                    sent += 1
                    try:
                        answer = moved(one, other, prompt)
                    except Failed as failed:
                        refusals.append(f"{sizes}, prompt {number}: {failed}")
                        continue
                    for place, kind in enumerate((consumer, teacher)):
                        found = distance(kind.alone[number], answer)
                        worst[place] = max(worst[place], found)
                    if max(worst) > CLOSE:
                        return (f"different: {sizes}, prompt {number}", *map(shown, worst))
                # Each of these calls fails if a prompt is still held.
                clear(one, producer.filling)
                clear(other, consumer.filling)
            except Failed as failed:
                return f"different: {sizes}: {failed}", "", ""
    if len(refusals) == sent:
        return f"refused: {refusals[0]}", "", ""
    outcome = "same"
    if refusals:
        outcome += f"; refused: {len(refusals)} of {sent} prompts, the first: {refusals[0]}"
    return (outcome, *map(shown, worst))


def shown(difference: float) -> str:
    """Return a difference with one digit."""
    return "tokens" if math.isinf(difference) else f"{difference:.0e}"


def kind(name: str, engines: Mapping[str, tuple[Engine, ...]], *, finite: bool = False) -> Kind:
    """Return a kind, after its engine of the role "null" has answered alone.

    That engine is stopped if it has no other role.
    *finite* is whether its memory must be finite, although the engine alone allows NaN.
    """
    (single, *_) = engines["null"]
    answers = alone(single, 0.0)
    again = alone(single, math.nan)
    if single not in engines["decode"]:
        single.call("stop")
    same = max(map(distance, answers, again)) < CLOSE
    filling = math.nan if same and not finite else GARBAGE
    return Kind(name, engines["prefill"], engines["decode"], answers, filling)


class Engines:
    """Starts the programs and the engines of one model at a time."""

    def __init__(self, folder: Path, makers: list[str]) -> None:
        self.folder, self.makers = folder, makers
        self._programs: dict[str, Program] = {}

    def program(self, maker: str, name: str = "") -> Program:
        """Return the program of *maker*, or one more of another *name*. Start it if necessary."""
        name = name or maker
        if name not in self._programs or self._programs[name].ended:
            python = os.environ.get(f"KVSPEC_{maker.upper()}_PYTHON") or sys.executable
            command = [python, str(HERE / PROGRAMS[maker])]
            # SGLang finds its plug-ins and the stand-ins for its kernels in folders on the path.
            folders = [str(HERE / each) for each in ("stub", "site") if maker == "sglang"]
            path = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
            log = self.folder / f"{name}.log"
            self._programs[name] = Program(command, log, {"PYTHONPATH": path})
        return self._programs[name]

    def start(
        self,
        maker: str,
        model: str,
        block: int,
        *,
        name: str,
        program: str = "",
        path: str = "",
        **more: Any,  # noqa: ANN401
    ) -> Engine:
        """Begin to start an engine. Call `ready` before another call of its program."""
        if maker == "sglang":
            more |= {"filling": str(self.folder / f"{name}.filling"), "keys": KEYS.get(model)}
        found = Engine(self.program(maker, program), name, block)
        settings = {"path": str(self.folder / (path or model)), "model": model, "block": block}
        settings |= {"revision": REVISION, **more}
        if maker == "vllm":
            settings["log"] = str(self.folder / f"{name}.log")
        found.program.send("start", engine=name, **settings)
        return found

    def kinds(self, model: str) -> list[Kind]:
        """Start all engines of *model*, transformers first."""
        make(model, self.folder)
        found = {"transformers": self._roles("transformers", "transformers", model, SIZES)}
        if "vllm" in self.makers:
            for tp in (1, 2):
                name = f"vLLM TP {tp}"
                found[name] = self._roles("vllm", name, model, MODELS[model], tp=tp)
        if "llama" in self.makers and model in LLAMA:
            found["llama.cpp"] = self._roles("llama", "llama.cpp", model, SIZES)
        if "sglang" in self.makers:
            for tp, pages in SGLANG.get(model, {}).items():
                name, one = f"SGLang TP {tp}", pages[:1]
                found[name] = {
                    role: self._sizes("sglang", name, model, sizes, tp=tp, role=role)
                    for role, sizes in {"prefill": pages, "decode": pages, "null": one}.items()
                }
        for call in ("answer", "ready"):
            for engine in {each for roles in found.values() for each in chain(*roles.values())}:
                # Each start has one answer.
                engine.program.answer() if call == "answer" else engine.call(call)
        # SGLang keeps a page for each token that a window has passed. Alone it has written all of
        # them. A loaded prompt lacks them, and masked tokens are multiplied by zero.
        windows = model in KEYS
        return [
            kind(name, roles, finite=windows and name.startswith("SGLang"))
            for name, roles in found.items()
        ]

    def _roles(self, *arguments: Any, **more: Any) -> dict[str, tuple[Engine, ...]]:  # noqa: ANN401
        """Begin to start engines that have all roles."""
        return dict.fromkeys(("prefill", "decode", "null"), self._sizes(*arguments, **more))

    def _sizes(
        self,
        maker: str,
        name: str,
        model: str,
        sizes: tuple[int, ...],
        **more: Any,  # noqa: ANN401
    ) -> tuple[Engine, ...]:
        """Begin to start an engine of each size."""
        found = []
        for size in sizes:
            label = "-".join([name, *filter(None, [more.get("role")]), model, str(size)])
            label = label.replace(" ", "-").lower()
            found.append(self.start(maker, model, size, name=label, **more))
        return tuple(found)

    def stop(self, kinds: list[Kind]) -> None:
        """End the engines of *kinds*, and the programs that have only one engine."""
        for engine in {each for kind in kinds for each in (*kind.producers, *kind.consumers)}:
            with contextlib.suppress(Failed):  # A killed engine.
                engine.call("stop")
        for name in self._programs.keys() - PROGRAMS.keys():
            self._programs.pop(name).end()

    def close(self) -> None:
        """End all programs."""
        for program in self._programs.values():
            program.end()


Row = tuple[str, ...]
# The cell of a row with the outcome.
OUTCOME = 4


def rows(engines: Engines, only: str) -> Iterator[tuple[str, Row]]:
    """Yield the word with which the outcome must begin, and the row, for all models."""
    for model in filter(lambda model: only in model, MODELS):
        kinds = engines.kinds(model)
        for row in answers(kinds, model):
            yield "same", row
        if model == REFUSING:
            # One engine of each maker.
            for other in [each for each in kinds[1:] if "TP 2" not in each.name]:
                for row in refusals(engines, kinds[0], other):
                    yield "refused", row
                for row in faults(engines, kinds[0], other):
                    yield "same", row
        engines.stop(kinds)


def answers(kinds: list[Kind], model: str) -> Iterator[Row]:
    """Yield the rows in which the answers of engines must be equal. The first is the teacher."""
    teacher = kinds[0]
    for kind in kinds[1:]:
        worst = max(map(distance, teacher.alone, kind.alone))
        outcome = "same" if worst < CLOSE else "different"
        if not math.isnan(kind.filling):
            outcome += ": differs from itself if its free memory is NaN, so filled with 10000"
        yield model, "-", kind.name, kind.sizes, outcome, "", shown(worst)
    for producer in kinds:
        for consumer in kinds:
            if producer is not consumer:
                sizes = f"{producer.sizes} -> {consumer.sizes}"
                found = pair(producer, consumer, teacher)
                yield model, producer.name, consumer.name, sizes, *found


def goes_on(consumer: Engine, kind: Kind | None, helper: Engine | None) -> bool:
    """Return whether a consumer serves the next request.

    It is a prompt of the *helper*, or one that the consumer computes itself. If *kind* is known,
    its answer must be right.
    """
    prompt = prompts()[NEXT]
    try:
        if helper is not None:
            answer = moved(helper, consumer, prompt)
        else:
            answer = consumer.call("alone", prompt=prompt, count=TOKENS)
    except Failed:
        return False
    return kind is None or distance(kind.alone[NEXT], answer) < CLOSE


def refused(
    producer: Engine, consumer: Engine, kind: Kind | None, helper: Engine | None, spoil: str = ""
) -> str:
    """Return the outcome of a transfer that must be refused. The consumer must go on.

    *spoil* names a change of the ticket between the two. The others are of `goes_on`.
    """
    prompt, *others = prompts()
    ticket = producer.call("prefill", prompt=prompt)["ticket"]
    if spoil == "changed":
        group, (first, blocks) = next(iter(ticket["remote_block_ids"].items()))
        ticket["remote_block_ids"][group] = [first, [blocks[0] + 1, *blocks[1:]]]
    if spoil == "confused":
        prompt = others[0]
    try:
        loaded(consumer, prompt, ticket)
    except Failed as failed:
        if goes_on(consumer, kind, helper):
            return f"refused: {failed}"
        return f"different: the next request fails after: {failed}"
    return "different: the consumer has used it"


def refusals(engines: Engines, teacher: Kind, other: Kind) -> Iterator[Row]:
    """Yield rows of transfers between transformers and another engine that must be refused."""
    make(MEANING, engines.folder)
    variants = {
        "another dtype": {"dtype": "bfloat16"},
        "another revision": {"revision": "2"},
        "normalised keys": {"path": MEANING},
    }
    writer, reader = other.producers[0], other.consumers[0]
    for what, settings in variants.items():
        name = f"{other.name}-{what}".replace(" ", "-").lower()
        wrong = engines.start("transformers", REFUSING, SIZES[0], name=name, **settings)
        wrong.program.answer()
        label, sizes = f"transformers, {what}", (str(wrong.block), str(reader.block))
        clear(reader, other.filling)
        found = refused(wrong, reader, other, teacher.producers[0])
        yield REFUSING, label, other.name, " -> ".join(sizes), found, "", ""
        clear(writer, other.filling)
        found = refused(writer, wrong, None, None)
        yield REFUSING, other.name, label, " -> ".join(sizes[::-1]), found, "", ""
        wrong.call("stop")
    for spoil in ("changed", "confused"):
        for producer, consumer in ((teacher, other), (other, teacher)):
            ends = producer.producers[0], consumer.consumers[0]
            for end, kind in zip(ends, (producer, consumer), strict=True):
                clear(end, kind.filling)
            helper = teacher.producers[0] if consumer is other else None
            found = refused(*ends, consumer, helper, spoil)
            label, sizes = f"{producer.name}, {spoil} ticket", [str(end.block) for end in ends]
            yield REFUSING, label, consumer.name, " -> ".join(sizes), found, "", ""


def faults(engines: Engines, teacher: Kind, other: Kind) -> Iterator[Row]:
    """Yield rows in which the producer is killed after it has answered."""
    name = f"killed-{other.name}".replace(" ", "-").lower()
    doomed = engines.start("transformers", REFUSING, SIZES[0], name=name, program=name)
    doomed.program.answer()
    for producer, engine, consumer in (
        ("transformers", doomed, other),
        (other.name, other.producers[0], teacher),
    ):
        reader, prompt = consumer.consumers[0], prompts()[0]
        clear(reader, consumer.filling)
        ticket = engine.call("prefill", prompt=prompt)["ticket"]
        with contextlib.suppress(Failed):  # A program that ends has no answer.
            engine.call("kill")
        try:
            loaded(reader, prompt, ticket)
            found = "different: the consumer has used the ticket"
        except Failed as failed:
            helper = teacher.producers[0] if consumer is other else None
            found = f"different: the next request fails after: {failed}"
            if goes_on(reader, consumer, helper):
                found = f"same: only this request fails: {failed}"
        sizes = f"{engine.block} -> {reader.block}"
        yield REFUSING, f"{producer}, killed", consumer.name, sizes, found, "", ""


COLUMNS = (
    "model",
    "producer",
    "consumer",
    "blocks",
    "outcome",
    "to the consumer alone",
    "to transformers",
)


def judged(chosen: argparse.Namespace, folder: Path) -> tables.Rows:
    """Run the chosen rows. Each must have the outcome that `rows` names."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    engines = Engines(folder, chosen.maker or ["vllm", "sglang", "llama"])
    found, place = rows(engines, chosen.only), OUTCOME
    if chosen.stored:
        import stored  # noqa: PLC0415 - it imports this module

        found, place = stored.rows(engines, chosen.only), stored.COLUMNS.index("outcome")
    try:
        for must, row in found:
            yield row[place].startswith(must), row
        makers = ("transformers", *engines.makers)
        return "; ".join(engines.program(maker).call("version") for maker in makers)
    finally:
        engines.close()


def main() -> None:
    """Run the chosen rows, and print their table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--maker", action="append", choices=["vllm", "sglang", "llama"])
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--stored", action="store_true", help="continue from stored pages instead")
    columns = COLUMNS
    if "--stored" in sys.argv:
        import stored  # noqa: PLC0415 - it imports this module

        columns = stored.COLUMNS
    tables.run(parser, columns, judged)


if __name__ == "__main__":
    main()
