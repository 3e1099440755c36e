"""The site: its gallery runs, and it builds without a warning."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GALLERY = sorted((ROOT / "docs/gallery").glob("*.py"))
ENVIRONMENT = {**os.environ, "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_the_gallery_has_scripts_with_titles() -> None:
    assert len(GALLERY) >= 10
    for script in GALLERY:
        assert re.match(r'"""\n[^\n]+\n=+\n', script.read_text()), script.name
        assert re.match(r"\d\d_", script.name)  # what docs/conf.py runs


@pytest.mark.slow
@pytest.mark.parametrize("script", GALLERY, ids=lambda script: script.stem)
def test_a_script_of_the_gallery_runs_in_20_seconds(script: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-W", "error::UserWarning:__main__", str(script)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """As ``make docs`` does; the gallery has tests of its own and is left out."""
    pytest.importorskip("sphinx_gallery")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-D", "plot_gallery=0", "-b", "html"]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(tmp_path)], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert [page.name for page in tmp_path.rglob("*.html") if not all_scroll(page.read_text())] == []
    page = (tmp_path / "api/optim.html").read_text()
    assert 'id="kfqn_ext.optim.KBFGS"' in page and "docs.pytorch.org/docs/stable/generated/torch.nn.Module.html" in page


def all_scroll(page: str) -> bool:
    """Whether each table is in a box that scrolls, and the style that makes figures do so on a phone is there."""
    tables = re.findall(r'(<div class="table-wrapper[^>]*>\s*)?<table class="docutils', page)
    return all(tables) and "_static/site.css" in page


def test_inventories_have_a_page_for_each_name() -> None:
    """Sphinx's first format: name, kind, page."""
    for inventory in (ROOT / "docs/inventories").glob("*.inv"):
        head, *lines = inventory.read_text().splitlines()
        assert head == "# Sphinx inventory version 1"
        assert all(re.fullmatch(r"[\w.]+ \w+ [\w./-]+\.html", line) for line in lines if not line.startswith("#"))
