"""torch's switches are afterwards what they were."""

import subprocess
import sys
import threading

import pytest
import torch

from kfqn_ext.linalg import full_precision, precision

# What is set once in a process can't be unset: reads of the older switches then fail.
_FOLLOWS = """
from torch import backends
from kfqn_ext.linalg import full_precision

general = {"all": backends, "mkldnn": backends.mkldnn}["NAME"]
value, own = {"all": "tf32", "mkldnn": "bf16"}["NAME"], backends.mkldnn.matmul
general.fp32_precision = value
with full_precision():
    assert own.fp32_precision == "ieee"
assert own.fp32_precision == value
general.fp32_precision = "ieee"
assert own.fp32_precision == "ieee", "it no longer follows"
own.fp32_precision = value
with full_precision():
    assert own.fp32_precision == "ieee"
assert own.fp32_precision == value
"""


ONE_FOR_ALL = not hasattr(torch.backends.cuda.matmul, "fp32_precision")


@pytest.mark.skipif(ONE_FOR_ALL, reason="older torch has one switch for all")
@pytest.mark.parametrize("name", ["all", pytest.param("mkldnn", marks=pytest.mark.slow)])
def test_a_switch_that_follows_a_more_general_one_follows_it_afterwards(name: str) -> None:
    subprocess.run([sys.executable, "-c", _FOLLOWS.replace("NAME", name)], check=True)


class Switch:
    """One of torch's, of a device that this machine may lack."""

    fp32_precision = "tf32"


def test_the_last_of_several_threads_resets_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    switch, seen = Switch(), []
    monkeypatch.setattr(precision, "_switches", lambda: (switch,))
    second_is_in, first_is_out = threading.Event(), threading.Event()

    def second() -> None:
        with full_precision():
            second_is_in.set()
            assert first_is_out.wait(30)
            seen.append(switch.fp32_precision)

    thread = threading.Thread(target=second)
    with full_precision():
        thread.start()
        assert second_is_in.wait(30)
    first_is_out.set()
    thread.join()
    assert seen == ["ieee"]
    assert switch.fp32_precision == "tf32"
