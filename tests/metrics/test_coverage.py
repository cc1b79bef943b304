"""How often intervals of one standard error cover the truth: the claims of docs/error-bars.md."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import numpy as np
import pytest

STUDY = Path(__file__).parents[2] / "benchmarks" / "coverage.py"
DATA_SETS = 10_000
FOUR_DEVIATIONS = 4 * 100 * math.sqrt(0.25 / DATA_SETS)  # percent; of a share of so many data sets, at most


@pytest.fixture(scope="module")
def study():
    """Load the benchmark, which is a script."""
    spec = importlib.util.spec_from_file_location("coverage_study", STUDY)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses looks for annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("rows", [64, 128, 256])
def test_two_thirds_are_covered_from_64_light_tailed_rows_on(study, rows):
    """Rows of 1 to 20 items, longer ones with larger losses: 66 to 70 % of 10,000 intervals cover the true ratio."""
    assert 66 <= study.means(study.POPULATIONS["light"], rows, data_sets=DATA_SETS) <= 70


@pytest.mark.parametrize(("rows", "expected"), [(2, 1 / 2), (3, 1 / math.sqrt(3))])
def test_few_equal_rows_are_covered_as_student_says(study, rows, expected):
    """Normal rows of equal length: coverage is P(|t| <= 1) with n - 1 degrees of freedom, known in closed form."""
    population = study.Population(lambda _, shape: np.ones(shape), study.light)
    assert abs(study.means(population, rows, data_sets=DATA_SETS) - 100 * expected) <= FOUR_DEVIATIONS


@pytest.mark.parametrize(("likeness", "items"), [(0.0, 1), (0.0, 20), (0.3, 20)])
@pytest.mark.parametrize("rows", [16, 64])
def test_an_accuracy_near_one_is_covered_where_the_normal_interval_is_not(study, rows, likeness, items):
    """At 90 to 99.9 % right, the reported interval covers in 60 % of cases or more; the normal one in 2 to 75 %."""
    for share in (0.9, 0.97, 0.99, 0.999):
        assert study.accuracies(rows, share, likeness, items)["augend"] >= 60 - FOUR_DEVIATIONS
    assert study.accuracies(rows, 0.999, likeness, items)["normal"] <= 60


def test_the_simulation_uses_the_estimator_of_the_library(study):
    """Vectorised intervals are those of Estimate.ratio and Estimate.proportion but for rounding.

    Sums of 64 rows, and a handful of operations on them: γ(72) of each term, and the terms of an end of the interval
    sum to at most four times the larger of value and end.
    """
    unit = 2.0**-53
    assert study.disagreement() <= 4 * 72 * unit / (1 - 72 * unit)
