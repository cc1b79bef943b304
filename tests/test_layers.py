"""The rules of the house hold, and each rule can fail."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import augend
import house as rules

HOMES = {"Tally": "augend._tally", "fit": "augend._fit", "Batches": "augend.data"}

# rule, file, source that breaks it, what the offence says
OFFENCES = [
    (rules.unknown_rooms, "cellar.py", "", "room 'cellar' has no layer"),
    (rules.upward_imports, "losses.py", "from augend._finish import Finished", "layer 2 imports augend._finish"),
    (rules.upward_imports, "losses.py", "from augend.metrics import Mean", "layer 2 imports augend.metrics of layer 2"),
    (rules.upward_imports, "_tally.py", "from augend._numerics import norm", "layer 0 imports augend._numerics"),
    (rules.upward_imports, "_finish/__init__.py", "from augend._accumulator import A", "imports augend._accumulator"),
    (rules.upward_imports, "data/_deal.py", "def f():\n    import augend._fit", "_deal.py:2"),
    (rules.upward_imports, "data/_deal.py", "if TYPE_CHECKING:\n    from augend._fit import fit", "_deal.py:2"),
    (
        rules.upward_imports,
        "_fit.py",
        "from augend._progress import Bar",
        "layer 4 imports augend._progress",
    ),
    (rules.upward_imports, "metrics/_m.py", "import augend\naugend.fit()", "_m.py:2"),
    (rules.upward_imports, "_fit.py", "from augend import _cli", "layer 4 imports augend._cli of layer 6"),
    (rules.back_doors, "metrics/_m.py", "from augend._numerics._norm import norm", "past the door of its room"),
    (rules.back_doors, "metrics/_m.py", "from augend._numerics import _norm", "past the door of its room"),
    (rules.back_doors, "_fit.py", "from augend.data import _thing", "takes the private name _thing"),
    (
        rules.private_addresses,
        "_fit.py",
        "from augend._tally import Tally",
        "augend._tally, which is no public",
    ),
    (rules.private_addresses, "_cli/_x.py", "import augend._tally", "augend._tally, which is no public"),
    (rules.private_addresses, "_fit.py", "from augend import _tally", "augend._tally, which is no public"),
    (rules.private_addresses, "losses.py", "from augend import Tally", "import Tally from augend._tally"),
    (rules.relative_imports, "losses.py", "from ._tally import Tally", "imports Tally relatively"),
    (rules.relative_imports, "losses.py", "from . import errors", "imports errors relatively"),
    (rules.cycles, "data/_deal.py", "from augend.data._order import order", "_deal -> augend.data._order -> augend"),
    (rules.distributed, "_finish/_sum.py", "import torch.distributed as dist", "imports torch.distributed"),
    (rules.distributed, "_finish/_sum.py", "from torch import distributed", "imports torch.distributed"),
    (rules.distributed, "_finish/_sum.py", "from torch.distributed.tensor import DTensor", "imports torch.distributed"),
    (rules.distributed, "_finish/_sum.py", "import torch\ntorch.distributed.barrier()", "uses torch.distributed"),
    (rules.steppers, "_fit.py", "def f(optimizer): optimizer.step()", "calls optimizer.step()"),
    (rules.steppers, "_accumulator.py", "def f(self): self.optimizer.step()", "calls self.optimizer.step()"),
    (rules.printers, "losses.py", "print(1)", "calls print()"),
    (rules.printers, "_fit.py", "import sys\nsys.stderr.write('')", "uses sys.stderr"),
    (rules.shells, "_fit.py", "import tomllib", "imports tomllib"),
    (rules.shells, "sources/_text.py", "from msgspec import toml", "imports msgspec"),
    (rules.shells, "testing/_cuts.py", "import argparse", "imports argparse"),
    (rules.shells, "models/_mlp.py", "import os\nos.environ['A']", "reads os.environ"),
    (rules.doors, "data/__init__.py", "import torch\n", "does more than re-export"),
    (rules.doors, "data/__init__.py", "X = 1", "does more than re-export"),
    (rules.doors, "data/__init__.py", "def f(): pass", "does more than re-export"),
    (rules.habits, "losses.py", "hasattr(1, 'a')", "calls hasattr()"),
    (rules.habits, "losses.py", "assert True", "asserts"),
    (rules.habits, "losses.py", "try: pass\nexcept Exception: pass", "catches every exception"),
    (rules.habits, "losses.py", "try: pass\nexcept: pass", "catches every exception"),
    (rules.sizes, "losses.py", "\n" * 301, "has 301 lines"),
    (rules.sizes, "losses.py", "def f():\n" + "    1\n" * 45, "f has 46 lines"),
]

LEGAL = [
    ("_accumulator.py", "from augend._finish import Finished\nfrom augend.data import Batches"),
    ("_tally.py", "from augend.errors import TallyError"),
    ("_fit.py", "from augend import Tally\nfrom augend.data import Batches"),
    ("_fit.py", "import augend\naugend.Tally\naugend.data.Batches"),
    ("_fit.py", "def f(grads, optimizer): grads.step(optimizer)"),
    ("_cli/_fit.py", "import sys\nimport typer\nfrom augend._fit import fit\nprint(sys.stdout)"),
    ("_config/_load.py", "import os\nimport tomllib\nfrom augend import __version__\nos.environ"),
    ("_group.py", "import torch.distributed as dist\ndist.barrier()"),
    ("_finish/_apply.py", "def f(optimizer): optimizer.step()"),
    ("data/_deal.py", "from augend.data._rows import rows"),
    ("data/__init__.py", '"""Rows."""\nfrom augend.data._deal import deal\n__all__ = ["deal"]'),
    ("losses.py", "def f():\n" + '    """' + "a\n" * 60 + '    """\n' + "    1\n" * 43),
    ("losses.py", '"""' + "a\n" * 300 + '"""\n' + "1\n" * 290),
]


@pytest.fixture(scope="module")
def house() -> rules.House:
    """The package as it is, with the front door's own table."""
    spec = importlib.util.find_spec("augend")
    return rules.House(Path(spec.submodule_search_locations[0]), augend._HOMES)


def planted(root: Path, path: str, source: str) -> rules.House:
    """Build a small house with one file planted in it."""
    files = {
        "__init__.py": "",
        "errors.py": "",
        "_tally.py": "",
        "_fit.py": "",
        "_finish/__init__.py": "",
        "_accumulator.py": "",
        "_numerics/__init__.py": "",
        "_numerics/_norm.py": "",
        "_cli/__init__.py": "",
        "metrics/__init__.py": "",
        "data/__init__.py": "",
        "data/_rows.py": "",
        "data/_order.py": "from augend.data._deal import deal",
    }
    for name, text in {**files, path: source}.items():
        file = root / "augend" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return rules.House(root / "augend", HOMES)


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(house: rules.House, rule) -> None:
    """No file of the package breaks the rule."""
    offences = list(rule(house))
    assert [] == offences, "\n".join([rule.__doc__, *offences])


@pytest.mark.parametrize(("rule", "path", "source", "says"), OFFENCES)
def test_an_offence_is_found(tmp_path: Path, rule, path: str, source: str, says: str) -> None:
    """A planted offence against the rule is reported once, with what is wrong."""
    offences = list(rule(planted(tmp_path, path, source)))
    assert 1 == len(offences), offences
    assert says in offences[0]


@pytest.mark.parametrize(("path", "source"), LEGAL)
def test_what_is_allowed_is_not_reported(tmp_path: Path, path: str, source: str) -> None:
    """Imports and calls as the house means them are no offence against any rule."""
    house = planted(tmp_path, path, source)
    assert [] == [offence for rule in rules.RULES for offence in rule(house)]


def test_every_rule_has_a_planted_offence() -> None:
    """No rule is in force that was never seen to fail."""
    assert {rule.__name__ for rule in rules.RULES} == {rule.__name__ for rule, *_ in OFFENCES}
