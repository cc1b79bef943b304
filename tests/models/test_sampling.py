"""Tokens drawn by chance: as likely as they should be, and no others."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from augend import models
from augend.errors import ContractError
from augend.models._sampling import chosen

DRAWS = 4000


def drawn(logits, temperature, top_p, seed=0, draws=DRAWS):
    """Return how often each token comes."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [chosen(logits, temperature, top_p, generator) for _ in range(draws)]
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.7), (1e-9, 1.0), (1e-300, 1.0)])
def test_frequencies_are_the_distribution(temperature, top_p):
    """Each token comes as often as it should, within five standard deviations; those left out never come."""
    logits = torch.tensor([0.5, -1.0, 1.5, 0.0, 1.4])
    expected = torch.softmax((logits - logits.max()).double() / temperature, dim=0)
    order = expected.argsort(descending=True).tolist()
    kept, together = [], 0.0
    for token in order:
        if together >= top_p:
            break
        kept.append(token)
        together += float(expected[token])
    counts = drawn(logits, temperature, top_p)
    for token in range(5):
        chance = float(expected[token]) / together if token in kept else 0.0
        assert abs(int(counts[token]) - DRAWS * chance) <= 5 * math.sqrt(DRAWS * chance * (1 - min(chance, 1.0)))


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20), st.floats(1e-6, 10), st.integers(0, 2**63 - 1)
)
def test_the_narrowest_choice_is_the_most_likely_token(values, temperature, seed):
    """At temperature 0 it is the first of the most likely tokens; with a tiny top_p one that is as likely in float64.

    exp has the same value for two logits no further apart than a few roundings of 1 (2⁻⁵⁰) times the temperature.
    """
    logits = torch.tensor(values)
    generator = torch.Generator().manual_seed(seed)
    best = int(logits.argmax())
    assert best == chosen(logits, 0.0, 1.0, generator)
    token = chosen(logits, temperature, 1e-30, generator)
    assert float(logits[best]) - float(logits[token]) <= 2.0**-50 * temperature


def test_a_seed_decides_and_nothing_else_is_drawn_from():
    """The same seed says the same; torch's own state neither matters nor moves; without a temperature it is greedy."""
    torch.manual_seed(0)
    model = models.Llama(width=32, layers=1, heads=2)
    state = torch.get_rng_state()
    first = model.generate([1, 2], 30, temperature=1.5, seed=7)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(1)
    assert first == model.generate([1, 2], 30, temperature=1.5, seed=7)
    assert first != model.generate([1, 2], 30, temperature=1.5, seed=8)
    assert model.generate([1, 2], 30) == model.generate([1, 2], 30, temperature=1.0, top_p=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": math.inf}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_p": 1.1}],
)
def test_what_is_no_distribution_is_refused(wrong):
    """Each by its name and value."""
    ((name, value),) = wrong.items()
    with pytest.raises(ContractError, match=re.escape(f"{name} must be") + f".*{value}"):
        models.Llama(width=32, layers=1, heads=2).generate([1], 3, **wrong)
