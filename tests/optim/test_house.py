"""The optimizer is one object in one file, whose parts do not reach into each other."""

from pathlib import Path

from tests.house import survey


def test_the_optimizer_is_one_object() -> None:
    """Fewer attributes are welcome, more are a reason to ask whose they are."""
    house = survey("KBFGS")
    assert house.files == ["optim/kbfgs.py", "optim/optimizer.py"]
    assert len(house.attributes) <= 12, house.attributes
    assert house.shared == [] and house.crossing == []


def test_it_sees_an_object_that_is_cut_in_two(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(
        "class Base:\n    def __init__(self):\n        self.x, self.y = 1, 2\n"
        "    def step(self):\n        self.hook()\n"
    )
    (tmp_path / "derived.py").write_text(
        "class Derived(Base):\n    def hook(self):\n        self.x += 1\n        self.step()\n"
    )
    house = survey("Derived", tmp_path)
    assert house.attributes == ["x", "y"] and house.shared == ["x"]
    assert house.crossing == ["base.py: self.hook()", "derived.py: self.step()"]
