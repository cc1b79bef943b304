"""Documents that share rows: the same numbers as without."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import augend
from augend.errors import ConfigError
from augend.models import Llama
from augend.sources import Bytes, digits, packed
from augend.sources._packed import _bins
from augend.sources._source import of_tokens

DOCUMENTS = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=9)


class Table(nn.Module):
    """Logits that depend on the token alone, so that they have the same bits wherever it stands."""

    def __init__(self, vocabulary=258):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0)))

    def forward(self, tokens, documents=None):
        return self.weight[tokens]


def source_of(documents, seed=0):
    """Make a source of rows with so many tokens, and so many of them in the prompt."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for size, prompt in documents:
        tokens = torch.randint(0, 256, (size,), generator=generator)
        labels = tokens.masked_fill(torch.arange(size) < prompt, -100)
        rows.append({"tokens": tokens, "labels": labels})
    return of_tokens(rows, Bytes())


def batches(source, **options):
    """Return its rows in batches."""
    return augend.Batches(source.rows, collate_fn=source.collate, **{"batch_size": 4, "microbatch_size": 3, **options})


class TestLayout:
    """What a micro-batch looks like."""

    @given(DOCUMENTS, st.integers(12, 40))
    def test_every_token_stands_in_its_document_once(self, documents, length):
        """By `places` each document is read back whole, and what is left is padding."""
        source = source_of(documents)
        plain = list(source.rows)
        made = packed(source, length).collate(plain)
        tokens, labels, numbers = (made[name].flatten() for name in ("tokens", "labels", "documents"))
        assert made["tokens"].shape[1] <= length
        seen = []
        for number, row in enumerate(plain):
            places = made["places"][number]
            at = places[: len(row["tokens"])]
            assert torch.equal(row["tokens"], tokens[at])
            assert [-100, *row["labels"][1:].tolist()] == labels[at].tolist()
            assert {number} == set(numbers[at].tolist())
            assert {-1} >= set(places[len(at) :].tolist())
            assert torch.equal(at[0] + torch.arange(len(at)), at)
            seen += at.tolist()
        rest = sorted(set(range(len(tokens))) - set(seen))
        assert len(seen) == len(set(seen))
        assert {(Bytes.padding, -100, -1)} >= set(
            zip(tokens[rest].tolist(), labels[rest].tolist(), numbers[rest].tolist(), strict=True)
        )

    @given(st.lists(st.integers(1, 10), min_size=1, max_size=12), st.integers(10, 25))
    def test_rows_are_filled_well(self, sizes, length):
        """No row is over-full, none could take the first of a later one, and the first document stands first."""
        bins = _bins(sizes, length)
        assert sorted(each for one in bins for each in one) == list(range(len(sizes)))
        assert 0 == bins[0][0]
        loads = [sum(sizes[each] for each in one) for one in bins]
        assert max(loads) <= length
        assert sum(2 * load <= length for load in loads) <= 1

    def test_collation_goes_to_workers(self):
        """It can be pickled."""
        source = packed(source_of([(3, 1), (2, 0)]), 8)
        again = pickle.loads(pickle.dumps(source.collate))  # noqa: S301  our own
        expected, actual = (collate(list(source.rows)) for collate in (source.collate, again))
        assert all(torch.equal(value, actual[name]) for name, value in expected.items())


class TestNumbers:
    """Losses, counts, error bars."""

    @given(DOCUMENTS, st.integers(12, 40), st.integers(1, 4))
    @settings(max_examples=40)
    def test_error_bars_are_those_of_documents(self, documents, length, microbatch_size):
        """Given equal losses of tokens, value, error and count of loss and accuracy are the same to the bit."""
        source = source_of(documents)
        results = []
        for one in (source, packed(source, length)):
            data = batches(one, microbatch_size=microbatch_size)
            measured = augend.evaluate(Table(), data, loss=one.loss, metrics=one.metrics)
            results.append({name: repr((each.value, each.error, each.count)) for name, each in measured.items()})
        assert results[0] == results[1]

    @given(DOCUMENTS, st.integers(0, 99))
    @settings(max_examples=20)
    def test_a_llama_comes_to_the_losses_of_rows_of_their_own(self, documents, seed):
        """Each document's loss in float64 is off by 2^-29 of what float32 is off, times 64 for luck that differs."""
        torch.manual_seed(seed)
        model = Llama(width=16, layers=1, heads=2)
        exact = copy.deepcopy(model).double()
        source = source_of(documents, seed)
        plain, made = source.collate(list(source.rows)), packed(source, 16).collate(list(source.rows))
        expected = source.loss(exact, plain)
        actual, single = (packed(source, 16).loss(one, made) for one in (exact, model))
        assert torch.equal(expected.count, actual.count)
        off = (single.total.double() - expected.total).abs().max()
        assert (actual.total - expected.total).abs().max() <= 64 * 2.0**-29 * off

    def test_training_is_that_of_documents(self):
        """A step's count and loss are the same to the bit; its gradient is, too, but for the order of sums.

        Each element of the gradient is a sum of at most 10 terms, off by γ(10) of the sum of their sizes on each side
        (Higham 2002, §3.1); that sum is at most 10 / 9, since 9 tokens count and a term is at most 1 / 9.
        """
        source = source_of([(5, 2), (1, 0), (7, 3), (3, 0)])
        done, gradients = [], []
        for one in (source, packed(source, 12)):
            model = Table()
            grads = augend.Accumulator(model)
            batch = next(iter(batches(one)))
            for microbatch in grads.microbatches(batch):
                grads.backward(one.loss(model, microbatch))
            done.append(grads.finish())
            gradients.append(model.weight.grad)
        assert 9 == done[0].count == done[1].count
        assert repr(done[0].loss) == repr(done[1].loss)
        u = 2.0**-24
        assert ((gradients[0] - gradients[1]).abs() <= 2 * 10 * u / (1 - 10 * u) * 10 / 9).all()

    def test_a_logit_that_is_nan_shows(self):
        """In the accuracy as in the loss."""
        source = packed(source_of([(5, 0), (4, 0)]), 12)
        model = Table()
        with torch.no_grad():
            model.weight[:, 0] = math.nan
        measured = augend.evaluate(model, batches(source), loss=source.loss, metrics=source.metrics)
        assert [True, True] == [math.isnan(each.value) for each in measured.values()]


class TestRefusals:
    """What cannot be packed."""

    def test_a_length_is_two_tokens_or_more(self):
        """One token predicts nothing."""
        with pytest.raises(ConfigError, match="at least 2 tokens; got 1"):
            packed(source_of([(3, 0)]), 1)

    def test_other_losses_would_be_lost(self):
        """A source that is no text, or has a loss of its own, is refused."""
        other = replace(source_of([(3, 0)]), loss=lambda model, microbatch: None)
        for source in (digits(), other):
            with pytest.raises(ConfigError, match="only rows of tokens with the loss of the next token"):
                packed(source, 8)

    def test_a_document_must_fit(self):
        """The message has both lengths."""
        source = packed(source_of([(3, 0), (9, 0)]), 8)
        with pytest.raises(ConfigError, match="a row of the data has 9 tokens, and is to be packed into 8"):
            source.collate(list(source.rows))
