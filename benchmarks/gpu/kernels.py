"""Kernels of a step, as torch's profiler sees them."""

from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu import steps
from benchmarks.gpu.place import Place, Run
from workloads.clock import wait


def measure(place: Place) -> dict[str, Any]:
    """By problem and step: kernels, copies and fills on a GPU; operations on a CPU."""
    return {
        problem: {
            steps.title(name, kind, ready): count(place, ready.steps[kind])
            for name, _, ready in steps.each(place, problem)
            for kind in steps.kinds(ready)
        }
        for problem in place.problems
    }


def count(place: Place, step: Run) -> int:
    """Of one step."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.is_gpu else [])]
    with profile(activities=activities) as seen:
        step()
        wait(place.device)
    found = len([event for event in seen.events() if _counts(event, place.is_gpu)])
    if not found:
        raise RuntimeError("The profiler saw no kernel. It needs the right to read the GPU's counters.")
    return found


def _counts(event: Any, on_gpu: bool) -> bool:
    if on_gpu:  # what a user has named covers kernels and is none
        return event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    parent = event.cpu_parent
    return event.name.startswith("aten::") and (parent is None or not parent.name.startswith("aten::"))


def render(found: dict[str, Any]) -> str:
    return steps.table("kernels of a step", found, str)
