"""Results as Markdown tables and as a figure."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # draws to files, so that no display is needed

import matplotlib.pyplot as plt

from benchmarks.contenders import CONTENDERS
from benchmarks.targets import TARGETS, row
from benchmarks.turns import counted
from workloads.environment import one_line
from workloads.lines import DPI, WIDTH

MB = 1e6
_LONGEST_ERROR = 100
_LONGEST_BAR = 4.0
_OURS = ("K-BFGS", "KFAC")


def render(results: dict[str, Any]) -> str:
    """All tables of a run."""
    # A small network of the same kind says nothing about a target.
    blocks = ["Small networks, to see that it runs."] if results["quick"] else [_targets(results["problems"])]
    for problem in results["problems"].values():
        blocks += [f"### {problem['title']}, minibatches of {problem['batch_size']}", _setting(problem)]
        blocks += [_steps(problem), _extraction(problem)]
    return "\n\n".join([*blocks, f"`{results['command']}`", one_line(results["environment"])])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head, and all columns but the first are numbers."""
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|---|" + "---:|" * (len(rows[0]) - 1), *body])


def _targets(problems: dict[str, Any]) -> str:
    rows = [["÷ SGD-m's step, where nothing else is said", "plain prototype", "best prototype", "target", "measured"]]
    for target in TARGETS:
        value = target.value(problems[target.problem]) if target.problem in problems else None
        if value is None:
            continue
        rows.append([target.what, target.plain, target.best, f"≤ {target.limit:.2f}", _number(value)])
    return markdown(rows)


def _setting(problem: dict[str, Any]) -> str:
    return f"A step of SGD-m takes {1e3 * problem['step_seconds']:.0f} ms; {problem['turns']} turns."


def _steps(problem: dict[str, Any]) -> str:
    adam = row(problem, "Adam").get("state")
    rows = [["optimizer", "time of a step ÷ SGD-m's", "median of", "peak memory, MB", "state, MB", "state ÷ Adam's"]]
    for line in problem["rows"]:
        name = line["row"] if line["error"] is None else _failure(line["row"], line["error"])
        state = line["state"]
        share = state / adam if state is not None and adam else None
        time = [_number(line["time"]), _runs(line["row"], problem["steps"])]
        rows.append([name, *time, _megabytes(line["peak"]), _megabytes(state), _number(share)])
    return markdown(rows)


def _runs(title: str, steps: dict[str, Any]) -> str:
    """How many runs a row's median is of: of its kinds of steps, the one that ran least."""
    kinds = [f"{name}: {kind}" for name, other in CONTENDERS.items() for kind in other.rows.get(title, ())]
    runs = [len(counted(range(steps[kind]["runs"]))) for kind in kinds if kind in steps]
    return str(min(runs)) if runs else ""


def _extraction(problem: dict[str, Any]) -> str:
    rows = [["quantities beside the gradient", "÷ plain forward-backward"]]
    for name, value in problem["extraction"].items():
        rows.append([_failure(name, value), ""] if isinstance(value, str) else [name, _number(value)])
    return markdown(rows)


def _failure(name: str, error: str) -> str:
    short = error if len(error) <= _LONGEST_ERROR else f"{error[:_LONGEST_ERROR]}…"
    return f"{name} does not run: {short}".replace("|", "/")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _megabytes(value: float | None) -> str:
    return "" if value is None else f"{value / MB:.1f}"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the time of a step of each optimizer, one panel a problem. Long bars are cut; their labels say how long."""
    problems = list(results["problems"].values())
    names = list(dict.fromkeys(line["row"] for problem in problems for line in problem["rows"]))
    figure, axes = plt.subplots(
        1, len(problems), figsize=(WIDTH, 1 + 0.21 * len(names)), sharey=True, squeeze=False, layout="constrained"
    )
    for ax, problem in zip(axes[0], problems, strict=True):
        times = {line["row"]: line["time"] for line in problem["rows"] if line["time"] is not None}
        _bars(ax, {names.index(name): time for name, time in times.items()}, names)
        ax.set_title(problem["title"], fontsize=9)
    axes[0][0].set_yticks(range(len(names)), names, fontsize=8)
    axes[0][0].invert_yaxis()
    figure.supxlabel("time of a step ÷ SGD-m's; ours are dark", fontsize=9)
    save(figure, path)


def _bars(ax: Any, times: dict[int, float], names: Sequence[str]) -> None:
    colors = ["C0" if names[place].startswith(_OURS) else "0.75" for place in times]
    bars = ax.barh(list(times), [min(time, _LONGEST_BAR) for time in times.values()], color=colors)
    ax.bar_label(bars, [f"{time:.2f}" for time in times.values()], padding=2, fontsize=8)
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_xlim(0, 1.4 * _LONGEST_BAR)
    ax.margins(y=0.01)
    ax.tick_params(axis="x", labelsize=8)


def save(figure: Any, path: Path) -> None:
    """Save and close a figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
