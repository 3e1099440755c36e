"""The steps that all sections look at: those of some contenders on the three problems, built on the device."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.contenders import CONTENDERS, Contender
from benchmarks.gpu.place import Place
from benchmarks.ready import Ready
from benchmarks.report import markdown
from benchmarks.turns import first_line

NAMES = ("sgdm", "adam", "muon", "onepass", "onepass-bf16", "untuned", "kbfgs", "kbfgs-bf16", "kfac")
KINDS = ("ordinary", "due")


def each(place: Place, problem: str) -> Iterator[tuple[str, Contender, Ready]]:
    """The contenders on one problem, each built and warm, with its name; those that fail are noted and left out."""
    for name in NAMES:
        contender = CONTENDERS[name]
        try:
            ready = contender.build(place.set_up(problem))
            for kind in contender.kinds:
                ready.steps[kind]()
        except Exception as error:
            place.failures.append(f"{problem}, {name}: {first_line(error)}")
            continue
        yield name, contender, ready


def kinds(ready: Ready) -> list[str]:
    """What kinds of steps there are, less than a warm start."""
    return [kind for kind in KINDS if kind in ready.steps]


def title(name: str, kind: str, ready: Ready) -> str:
    """What a row of one kind of step is called."""
    return f"{name}, {'not due' if kind == 'ordinary' else kind}" if len(kinds(ready)) > 1 else name


def table(head: str, found: Mapping[str, Mapping[str, Any]], text: Callable[[Any], str]) -> str:
    """A row a step and a column a problem; empty where a contender failed."""
    titles = dict.fromkeys(title for problem in found.values() for title in problem)
    rows = [[t, *(text(problem[t]) if t in problem else "" for problem in found.values())] for t in titles]
    return markdown([[head, *found], *rows])
