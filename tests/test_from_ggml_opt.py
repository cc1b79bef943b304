"""What ggml-opt and its Rust port have is here too: the page that says so, and tests that show it.

``golden/ggml_opt_items.json`` lists what ``ggml-opt.h`` declares, ``golden/prism_items.json`` the port's public types,
fields, methods, variants and error texts. Each has a row in ``docs/from-ggml-opt.md``: its name in augend, which must
exist, what differs, and the tests that show it, which must exist.
"""

from __future__ import annotations

import math
import re

import pytest

from augend.errors import ContractError
from augend.ggml import SGD, AdamW, Build, Fit, Graph, Kind, Loss, Optimizer, Parameters, Training
from item_pages import ROOT, is_test, items_of, problems

PAGE = (ROOT / "docs" / "from-ggml-opt.md").read_text("utf-8")
LISTS = {"ggml-opt": items_of("ggml_opt_items.json"), "prism-inference": items_of("prism_items.json")}


def header(software: str) -> list[str]:
    """Return the header of a table of items."""
    return [software, "augend", "what differs", "shown by"]


@pytest.mark.parametrize("software", LISTS)
def test_every_item_has_its_row(software: str) -> None:
    """Each item has one row, each row is of an item, and its objects and tests exist."""
    assert [] == problems(PAGE, LISTS[software], header(software))


@pytest.mark.parametrize("software", LISTS)
def test_a_missing_row_is_found(software: str) -> None:
    """The check is not blind: without the row of an item, and with a test of it renamed, the page is wrong."""
    for item in LISTS[software][::8]:
        start = PAGE.index(f"\n| `{item}` | ", PAGE.index(f"| {' | '.join(header(software))} |"))
        line = PAGE[start : PAGE.index("\n", start + 1)]
        assert [f"{item} has no row"] == problems(PAGE.replace(line, "", 1), LISTS[software], header(software))
        assert problems(PAGE.replace(line, line.replace("::test_", "::test_no_", 1)), LISTS[software], header(software))


def test_every_test_that_the_page_names_exists() -> None:
    """In the other tables, too."""
    named = re.findall(r"`(tests/[^`]+)`", PAGE)
    assert len(named) > sum(map(len, LISTS.values()))
    assert [] == [one for one in named if not is_test(one)]


# ------------------------------------------------------------------ the behaviour


def test_the_kinds_have_ggmls_names() -> None:
    """Two optimizers, whose values are the names that ggml prints."""
    assert ["adamw", "sgd"] == [kind.value for kind in Kind]


def test_defaults_are_ggmls() -> None:
    """What ggml fills in where nothing is said: AdamW, a window of one, updates, and these numbers, in float32."""
    graph = Graph()
    x = graph.tensor((1, 1))
    outputs = graph.add(x, graph.tensor(1, parameter=True))
    training = Training(inputs=x, outputs=outputs, loss=Loss.SUM)
    assert (Kind.ADAMW, 1, Build.UPDATE) == (training.kind, training.period, training.build)
    assert Parameters(AdamW(1e-3, 0.9, 0.999, 1e-8, 0.0), SGD(1e-3, 0.0)) == training.parameters == Parameters()
    assert 1e-3 != training.parameters.adamw.alpha == float.fromhex("0x1.0624dep-10")
    assert [10, 20, 30] == [build.value for build in Build]
    assert (0.0, None, None) == (
        (options := Fit(epochs=1, logical_batch=1)).validation_split,
        options.parameters,
        options.patience,
    )
    assert Kind.ADAMW is Optimizer(graph, training).kind


def test_parameters_are_named_or_listed() -> None:
    """The port's arrays of five and of two numbers are taken in its order, and what is no such list is refused."""
    numbers = [0.5, 0.25, 0.75, 0.125, 0.0625]
    parameters = Parameters(adamw=numbers, sgd=[0.5, 0.25])
    assert numbers == [getattr(parameters.adamw, name) for name in ("alpha", "beta1", "beta2", "eps", "wd")]
    assert (0.5, 0.25) == (parameters.sgd.alpha, parameters.sgd.wd)
    for wrong in ({"adamw": numbers[:4]}, {"sgd": numbers}, {"sgd": 0.5}, {"adamw": [math.nan, "a", 0, 0, 0]}):
        with pytest.raises(ContractError):
            Parameters(**wrong)
