"""All of the check of a GPU runs here, on a CPU; what a GPU alone has is put in its place."""

import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks.gpu import capture, check, kernels, steps, two, waits
from benchmarks.gpu.place import Place

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def place(device: torch.device = CPU, seconds: float = 300.0) -> Place:
    return Place(device, True, Path("nowhere"), time.perf_counter() + seconds)


LONG = ("Kernels of a step", "A step as a CUDA graph", "Two processes", "Tests")


@pytest.mark.parametrize(
    "title", [pytest.param(t, marks=pytest.mark.slow if t in LONG else ()) for t in check.SECTIONS]
)
def test_a_section_runs(title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "numbers.json", tmp_path / "page.md"
    options = ["--device", "cpu", "--quick", "--json", str(out), "--page", str(page), "--sections", title]
    assert check.main([*options, "--data-root", str(tmp_path)]) == 0
    results = json.loads(out.read_text())
    assert results["sections"][title]["failures"] == [] and results["sections"][title]["seconds"] > 0
    assert page.read_text() == check.render(results) and f"## {title}\n" in page.read_text()
    assert "nothing failed" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main([]) == 0
    assert capsys.readouterr().out == "gpu-check: no CUDA device here, nothing was checked.\n"


def test_a_section_that_fails_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(place: Place) -> Any:
        raise RuntimeError("no such kernel")

    def go_on(place: Place) -> Any:
        place.failures.append("one row")
        return {"left out": "a row"}

    sections = {"A": SimpleNamespace(measure=fail), "B": SimpleNamespace(measure=go_on, render=two.render)}
    monkeypatch.setattr(check, "SECTIONS", sections)
    files = ["--json", str(tmp_path / "numbers.json"), "--page", str(tmp_path / "page.md")]
    assert check.main(["--device", "cpu", "--quick", *files]) == 1
    text = (tmp_path / "page.md").read_text()
    assert "RuntimeError: no such kernel" in text and "Left out: a row." in text and "one row" in text


def test_what_has_no_time_is_left_out() -> None:
    assert check.run(lambda place: {}, place(seconds=-1))["failures"] == ["left out: the time was over"]


def test_a_contender_that_fails_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "NAMES", ("sgdm", "adam"))
    adam = steps.CONTENDERS["adam"]
    monkeypatch.setitem(steps.CONTENDERS, "adam", SimpleNamespace(kinds=adam.kinds, build=lambda setup: 1 / 0))
    here = place()
    assert [name for name, *_ in steps.each(here, "autoencoder")] == ["sgdm"]
    assert here.failures == ["autoencoder, adam: ZeroDivisionError: division by zero"]


# ------------------------------------------------------------------ what a GPU alone has


def test_time_is_that_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            clock[0] += 100.0

        def elapsed_time(self, end: "Event") -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def run() -> None:
        clock[0] += 3.0

    assert place(CUDA).milliseconds(run) == 3.0


@pytest.mark.filterwarnings("default")
def test_waits_are_warnings_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with waits.counted(place(CUDA)) as found:
        # The second is what torch says where the mode is first set.
        for message in (
            "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:1)",
            "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations",
        ):
            for _ in range(2):
                warnings.warn(message, stacklevel=1)
    assert len(found) == 2 and all(__file__ in where for where in found)
    assert modes == ["warn", "default"]


def test_waits_of_a_cpu_are_reads_of_numbers() -> None:
    with waits.counted(place()) as found:
        torch.ones(2)[0].item()
        torch.ones(2, dtype=torch.int64)[0].item()
    assert found == ["_local_scalar_dense"]


@pytest.mark.parametrize(
    ("event", "counts"),
    [
        ({"device_type": DeviceType.CUDA}, True),
        ({"device_type": DeviceType.CUDA, "is_user_annotation": True}, False),
        ({"device_type": DeviceType.CPU}, False),
    ],
)
def test_kernels_are_events_of_the_device(event: dict[str, Any], counts: bool) -> None:
    assert kernels._counts(SimpleNamespace(**event), True) is counts


def test_operations_inside_of_others_are_none() -> None:
    def step() -> None:
        torch.ones(2, 2).mean()  # which makes, and fills

    assert kernels.count(place(), step) == 2


def test_no_kernel_at_all_is_a_failure() -> None:
    with pytest.raises(RuntimeError, match="no kernel"):
        kernels.count(place(), lambda: None)


def test_a_graph_is_captured_once_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    @contextmanager
    def graph(which: Any) -> Iterator[None]:
        done.append("begin")
        yield
        done.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: done.append("replay")))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    replay: Callable[[], object] = capture.captured(place(CUDA), lambda: done.append("step"))
    replay()
    assert done == ["begin", "step", "end", "replay"]


def test_a_graph_that_moves_otherwise_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "captured", lambda place, step: lambda: None)
    found = capture._compare(place(), capture._OPTIMIZERS["onepass"], None)
    assert found["difference"] > 1e-6


def test_two_processes_need_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert two.render(two.measure(place(CUDA))) == "Left out: 1 GPU here."
