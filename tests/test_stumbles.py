"""Where newcomers stumbled when they followed the README alone: a row each, with the tests that would see it again."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_links import LINK, PAGES, words

ROOT = Path(__file__).parents[1]

ELSEWHERE = {
    "KBFGS(model.parameters()), a list, groups": "optim/test_bad_input.py::test_no_model_in_the_first_place",
    "KBFGS(model, 0.1)": "optim/test_bad_input.py::test_a_rate_in_the_place_of_the_parameters",
    "a closure that draws at each call": "optim/test_repetition.py::test_a_closure_that_draws_a_minibatch_at_each_call",
    "Minibatch of a model with two inputs": "optim/test_several_inputs.py::test_inputs_in_order_and_by_name",
    "warm_start of a loader of Minibatch": "optim/test_several_inputs.py::test_a_warm_start_from_minibatches",
    "two passes are a closure's step": "optim/test_two_phase.py::test_all_forms_of_a_step_are_the_same_bit_for_bit",
    "print(q), print(q.A)": "test_newcomers.py::test_quantities_print_as_one_line_of_shapes",
    "print(optimizer)": "optim/test_groups_and_schedulers.py::"
    "test_repr_says_how_much_has_a_block_and_what_is_scheduled",
    "diagnostics() is a table": "optim/test_diagnostics.py::test_what_it_returns_prints_as_a_table",
    "diagnostics() is flat": "optim/test_diagnostics.py::test_as_dict_has_flat_names_and_numbers_of_python",
    "a ladder of hours": "curvature/test_entry.py::test_a_ladder_of_hours_is_not_begun_unasked",
    "import kfqn_ext; kfqn_ext.curvature": "test_imports.py::test_parts_are_loaded_when_they_are_named",
    "import kfqn_ext loads a compiler": "test_imports.py::test_eager_training_does_not_load_the_compiler",
    "examples.paper --help": "test_newcomers.py::test_help_of_the_papers_experiments_takes_little_more_than_torch",
    "table digits": "test_newcomers.py::test_a_table_of_eight_cells_of_a_second_takes_25_seconds_of_the_processor",
    "make docs has twelve names": "test_api.py::test_every_public_name_has_a_page",
    "See KroneckerOptimizer, which is not there": "test_api.py::test_every_argument_has_a_sentence",
}


@pytest.mark.parametrize("row", ELSEWHERE)
def test_a_row_has_its_test(row: str) -> None:
    file, name = ELSEWHERE[row].split("::")
    assert f"def {name}(" in (ROOT / "tests" / file).read_text()


def code(page: Path) -> list[str]:
    """The blocks of Python of a page."""
    return re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_default_comes_first(page: str) -> None:
    """That needs no tuning: no rate and no damping in the first optimizer that a page builds."""
    built = [line for block in code(ROOT / page) for line in block.splitlines() if re.match(r"optimizer = ", line)]
    assert built and re.match(r"optimizer = OnePassKBFGS\(model\)", built[0])


def test_the_readme_does_not_compare_the_dampings_of_two_methods() -> None:
    """K-BFGS's was called larger than KFAC's, and is smaller on the autoencoder."""
    assert not re.search(r"damping is (larger|smaller)", (ROOT / "README.md").read_text())


def test_two_passes_that_are_written_out_clear_gradients() -> None:
    """In a loop they would add up without a word."""
    blocks = [block for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")) for block in code(page)]
    loops = [block for block in blocks if ".second_pass():" in block]
    assert loops
    assert [block for block in loops if ".zero_grad(" not in block] == []


@pytest.mark.parametrize("target", ["docs/support.md", "examples/loops"])
def test_what_nothing_linked_to_is_linked(target: str) -> None:
    """From the README and from the site's first page, or from a page that these link to."""
    for page in (ROOT / "README.md", ROOT / "docs/index.md"):
        once = linked(page)
        twice = {path for other in once if other.suffix == ".md" for path in linked(other)}
        assert any(path.is_relative_to(ROOT / target) for path in once | twice)


def test_there_is_a_page_about_choosing_rate_and_damping() -> None:
    """The README had one sentence, and neither starting values nor what else could be set."""
    guide = ROOT / "docs/guide.md"
    assert guide in linked(ROOT / "README.md")
    assert all(name in guide.read_text() for name in ("warm_start", "curvature_update_freq", "diagnostics()"))


def test_a_page_on_loops_says_what_a_trainer_s_wrapper_lacks() -> None:
    """Of Accelerate's, ``first_pass`` is an AttributeError, and ``step(Minibatch)`` returns None."""
    loops = ROOT / "docs/loops.md"
    assert loops in linked(ROOT / "README.md")
    assert "Accelerate" in loops.read_text() and "optimizer.optimizer" in loops.read_text()


def linked(page: Path) -> set[Path]:
    """Files of the checkout that a page links to."""
    targets = [target.partition("#")[0] for target in LINK.findall(words(page.read_text())) if ":" not in target]
    paths = {(page.parent / target).resolve() for target in targets}
    return {path for path in paths if path.is_relative_to(ROOT)}


def test_every_page_is_linked_from_another() -> None:
    everywhere = {path for page in PAGES for path in linked(page) if path != page}
    assert [str(page) for page in (ROOT / "docs").glob("*.md") if page not in everywhere and page.stem != "index"] == []


def seconds(code: str) -> float:
    """CPU time of a fresh process, the least of three."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


@pytest.mark.slow
def test_import_takes_little_more_than_torch_and_backpack() -> None:
    assert seconds("import kfqn_ext") < 0.3 + seconds("import torch, backpack")
