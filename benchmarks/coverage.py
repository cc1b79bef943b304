"""How often does an interval of one standard error cover the true value?

Prints one line of JSON: coverage in percent, over 10,000 simulated data sets each, of means over rows of unequal length
and of accuracies near 0 and 1. A good interval of one standard error covers in 68.3 % of all cases.
`docs/error-bars.md` shows the numbers.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

import augend
from augend._numerics import Moments

DATA_SETS = 10_000
SEED = 0
ROWS = (2, 4, 8, 16, 32, 64, 256)
ROWS_OF_ACCURACY = (16, 64, 256)
ITEMS = 20  # of a row where the rows of an accuracy have several
SHARES = (0.5, 0.9, 0.97, 0.99, 0.999)
FEWEST_EVENTS = 5  # as in Estimate.proportion

Floats = npt.NDArray[np.float64]
Shape = tuple[int, int]  # data sets, rows


@dataclass(frozen=True)
class Population:
    """Where simulated rows come from.

    Args:
        lengths: Draws the items of rows.
        rates: Draws the mean loss of an item of rows of these lengths; its expectation is 2 plus ``slope`` times
            the length.
        slope: How the loss of an item grows with the length of its row.
        moments: The first and second moment of the lengths.
    """

    lengths: Callable[[np.random.Generator, Shape], Floats]
    rates: Callable[[np.random.Generator, Floats], Floats]
    slope: float = 0.0
    moments: tuple[float, float] = (1.0, 1.0)

    @property
    def truth(self) -> float:
        """The ratio that the estimates aim at, E[s] / E[c]."""
        return 2 + self.slope * self.moments[1] / self.moments[0]

    def draw(self, rng: np.random.Generator, shape: Shape) -> tuple[Floats, Floats]:
        """Draw the totals and counts of rows."""
        count = self.lengths(rng, shape)
        return count * (self.rates(rng, count) + self.slope * count), count


def uniform(rng: np.random.Generator, shape: Shape) -> Floats:
    """Draw lengths from 1 to 20, all equally likely."""
    return rng.integers(1, 21, shape).astype(np.float64)


def skewed(rng: np.random.Generator, shape: Shape) -> Floats:
    """Draw lognormal lengths: half of them above 20, one in a hundred above 200."""
    return np.ceil(np.exp(rng.normal(3.0, 1.0, shape)))


def light(rng: np.random.Generator, count: Floats) -> Floats:
    """Draw normal losses: a part of the row, and one of every item, which averages out over the row."""
    return 2 + 0.5 * rng.normal(size=count.shape) + rng.normal(size=count.shape) / np.sqrt(count)


def skewed_rates(rng: np.random.Generator, count: Floats) -> Floats:
    """Draw lognormal losses, of skewness 6."""
    return 2 * np.exp(rng.normal(-0.5, 1.0, count.shape))


def heavy(rng: np.random.Generator, count: Floats) -> Floats:
    """Draw losses from Student's t with three degrees of freedom, whose third moment is infinite."""
    return 2 + rng.standard_t(3, count.shape)


POPULATIONS = {
    "light": Population(uniform, light, slope=0.05, moments=(10.5, 143.5)),
    "lengths": Population(skewed, light),
    "losses": Population(uniform, skewed_rates),
    "heavy": Population(uniform, heavy),
}


def ratio(total: Floats, count: Floats) -> tuple[Floats, Floats]:
    """Return value and error of every data set, as ``Estimate.ratio`` forms them but in float64.

    Args:
        total: ``[data_sets, rows]``.
        count: The same shape.
    """
    rows = total.shape[1]
    all_counts = count.sum(axis=1)
    value = total.sum(axis=1) / all_counts
    deviations = total - value[:, None] * count  # [data_sets, rows]
    return value, np.sqrt(rows / (rows - 1) * (deviations**2).sum(axis=1)) / all_counts


def proportion(total: Floats, count: Floats) -> tuple[Floats, Floats]:
    """Return the ends of every data set's interval, as ``Estimate.proportion`` forms them but in float64.

    Args:
        total: ``[data_sets, rows]``, hits.
        count: The same shape.
    """
    value, error = ratio(total, count)
    all_counts = count.sum(axis=1)
    kinds = np.stack([total, count - total])  # [2, data_sets, rows]
    items, squares = kinds.sum(axis=2), (kinds**2).sum(axis=2)
    events = np.divide(items**2, squares, out=np.zeros_like(items), where=squares > 0)
    rarer = events.argmin(axis=0), np.arange(len(value))
    events, items = events[rarer], items[rarer]
    worth = all_counts * (events + 1) / (items + (count**2).sum(axis=1) / all_counts)
    low, high = wilson(value, worth)
    normal = events >= FEWEST_EVENTS
    return np.where(normal, value - error, low), np.where(normal, value + error, high)


def wilson(value: Floats, worth: Floats) -> tuple[Floats, Floats]:
    """Return the ends of Wilson's interval of one standard error for shares of ``worth`` independent items."""
    centre = (value + 0.5 / worth) / (1 + 1 / worth)
    half = np.sqrt(value * (1 - value) / worth + 0.25 / worth**2) / (1 + 1 / worth)
    return np.maximum(centre - half, 0), np.minimum(centre + half, 1)


def percent(low: Floats, high: Floats, truth: float) -> float:
    """Return how many intervals of a hundred cover the truth."""
    return round(100 * float(np.mean((low <= truth) & (truth <= high))), 1)


def means(population: Population, rows: int, *, data_sets: int = DATA_SETS, seed: int = SEED) -> float:
    """Return the coverage of the mean over so many rows of a population."""
    value, error = ratio(*population.draw(np.random.default_rng([seed, rows]), (data_sets, rows)))
    return percent(value - error, value + error, population.truth)


def hits(rng: np.random.Generator, shape: Shape, share: float, likeness: float, items: int) -> tuple[Floats, Floats]:
    """Draw hits and items of rows: beta-binomial, ``likeness`` being the correlation of the items of one row."""
    chances: Floats | float = share
    if likeness:
        odds = 1 / likeness - 1
        chances = rng.beta(share * odds, (1 - share) * odds, shape)
    return rng.binomial(items, chances, shape).astype(np.float64), np.full(shape, float(items))


def accuracies(
    rows: int, share: float, likeness: float = 0.0, items: int = 1, *, data_sets: int = DATA_SETS, seed: int = SEED
) -> dict[str, float]:
    """Return the coverage of the normal interval of an accuracy, and of the one that augend reports."""
    total, count = hits(np.random.default_rng([seed, rows]), (data_sets, rows), share, likeness, items)
    value, error = ratio(total, count)
    reported = proportion(total, count)
    return {"normal": percent(value - error, value + error, share), "augend": percent(*reported, share)}


def disagreement(data_sets: int = 20, seed: int = SEED) -> float:
    """Return the largest relative difference between this file's intervals and the library's."""
    rng = np.random.default_rng(seed)
    largest = 0.0
    for rows in (8, 64):
        for total, count in (
            *(population.draw(rng, (data_sets, rows)) for population in POPULATIONS.values()),
            *(hits(rng, (data_sets, rows), share, 0.1, ITEMS) for share in SHARES),
        ):
            binary = bool(((total >= 0) & (total <= count) & (total == np.floor(total))).all())
            value, error = ratio(total, count)
            ends = proportion(total, count) if binary else (value - error, value + error)
            estimate = augend.Estimate.proportion if binary else augend.Estimate.ratio
            for index in range(data_sets):
                exact = estimate(Moments.of(torch.from_numpy(total[index]), torch.from_numpy(count[index])))
                for end, ours in ((exact.low, ends[0][index]), (exact.high, ends[1][index])):
                    largest = max(largest, abs(end - ours) / max(abs(exact.value), abs(end)))
    return largest


def main() -> None:
    """Measure and print."""
    several = {"independent": 0.0, "alike": 0.3}
    result = {
        "question": "coverage of one standard error, percent",
        "data_sets": DATA_SETS,
        "seed": SEED,
        "means": {name: {rows: means(population, rows) for rows in ROWS} for name, population in POPULATIONS.items()},
        "accuracies": {share: {rows: accuracies(rows, share) for rows in ROWS_OF_ACCURACY} for share in SHARES},
        "accuracies_of_20_items": {
            name: {
                share: {rows: accuracies(rows, share, likeness, ITEMS) for rows in ROWS_OF_ACCURACY} for share in SHARES
            }
            for name, likeness in several.items()
        },
        "largest_relative_difference_from_augend": disagreement(),
        "normal_expectation": round(100 * math.erf(math.sqrt(0.5)), 1),
        "augend": augend.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
