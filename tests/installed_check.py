"""What a user has who installed the package and has no checkout: `make release-check` runs this in a new environment.

    python installed_check.py README.md

Runs the README's code, times the import, and checks a user's file with `mypy --strict`.
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

# BackPACK has no types; what is said of its own functions is no concern of a user's.
MYPY = "[mypy]\nstrict = True\n[mypy-backpack.*]\nignore_missing_imports = True\n"
USER = Path(__file__).with_name("users_file.py").read_text()


def programs(page: str) -> list[str]:
    """The blocks of Python of a page; one that continues comes after the one that it continues."""
    found: list[str] = []
    for kind, block in re.findall(r"^```python *(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        if kind == "continuation":
            found[-1] += block
        else:
            found.append(block)
    return found


def cpu_seconds(code: str) -> float:
    """Of a fresh process, the least of three."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


def main() -> int:
    page = Path(sys.argv[1]).read_text()
    os.environ.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        where = subprocess.run(
            [sys.executable, "-c", "import kfqn_ext; print(kfqn_ext.__file__)"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        print("installed at", where)
        assert Path(where).is_relative_to(sys.prefix)

        blocks = programs(page)
        for block in blocks:
            subprocess.run([sys.executable, "-W", "error::UserWarning:__main__", "-c", block], check=True)
        print(f"{len(blocks)} programs of the README run")
        assert blocks

        ours, theirs = cpu_seconds("import kfqn_ext"), cpu_seconds("import torch, backpack")
        print(f"import kfqn_ext: {ours:.2f} s of CPU time, {ours - theirs:.2f} s more than torch and BackPACK")
        assert ours < theirs + 0.3

        Path("mypy.ini").write_text(MYPY)
        Path("user.py").write_text(USER)
        subprocess.run([sys.executable, "-m", "mypy", "user.py"], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
