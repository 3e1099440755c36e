"""Working runs off in processes; the one that started them alone writes the log."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path

import torch

from benchmarks.turns import prepare
from benchmarks.untuned.data import Source
from benchmarks.untuned.lists import ENTRIES, PROBLEMS
from benchmarks.untuned.log import Found, Trial
from benchmarks.untuned.training import train
from workloads import records
from workloads.records import Record


class Here(Executor):
    """Runs things in this process, as they are submitted."""

    def submit(self, function: Callable[..., Record], /, *args: object) -> "Future[Record]":
        future: Future[Record] = Future()
        future.set_result(function(*args))
        return future


def start_process() -> None:
    """Set what holds for every run, as subnormal numbers of a unit that has died would count as seconds."""
    prepare("cpu")
    torch.set_flush_denormal(True)
    parent = parent_process()
    if parent is not None:  # whoever is killed leaves no one working behind
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def executor(jobs: int) -> Executor:
    """Processes to run things in; a single job runs here."""
    if jobs == 1:
        start_process()
        return Here()
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=start_process)


def one(trial: Trial, source: Source) -> Record:
    """Run one trial, and say what it was and how it went."""
    started = time.perf_counter()
    problem, entry = PROBLEMS[trial.problem], ENTRIES[trial.optimizer]
    found = train(problem, entry, trial.setting, trial.steps, trial.seed, source)
    return record(trial, source, found, started)


def record(trial: Trial, source: Source, found: Record, started: float) -> Record:
    """A line of the log: what was run, what was found, and seconds of the wall clock since the start."""
    return {**asdict(trial), "quick": source.quick, **found, "wall": round(time.perf_counter() - started, 3)}


def work_off(
    due: Callable[[Found], Iterable[Trial]],
    found: Found,
    path: Path,
    run: Callable[[Trial], Record],
    jobs: int,
    finished: Callable[[Record], object],
) -> None:
    """Run what is due until nothing is.

    Args:
        due: What can run, given what is found.
        found: Finished runs, to which new ones are added.
        path: The log.
        run: Runs one, and returns its record.
        jobs: How many at a time.
        finished: Called with each new record.
    """
    running: dict[Future[Record], Trial] = {}
    with executor(jobs) as pool:
        try:
            while True:
                taken = {trial.key for trial in running.values()}
                waiting = (trial for trial in due(found) if trial.key not in taken)
                for trial in islice(waiting, jobs - len(running)):
                    running[pool.submit(run, trial)] = trial
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    record = future.result()
                    records.append(path, record)
                    found[running.pop(future).key] = record
                    finished(record)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
