"""Rows that several documents share, and activations that are computed twice."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from augend.errors import ContractError
from augend.models import Llama, lora
from augend.models._positions import places

TINY = {"vocab_size": 11, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24}
LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def roughened(model, seed):
    """Give a model weights that make every part matter, norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]) + 0.1)
    return model


def shared(lengths, seed):
    """Draw a row of documents, and return it with their numbers: ``[1, length]`` both."""
    length = sum(lengths)
    tokens = torch.randint(0, 11, (1, length), generator=torch.Generator().manual_seed(seed))
    return tokens, torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


class TestDocuments:
    """`Llama(tokens, documents)`."""

    @given(LENGTHS, st.booleans(), st.integers(0, 99))
    @settings(max_examples=25)
    def test_a_document_has_the_logits_of_a_row_of_its_own(self, lengths, grouped, seed):
        """Attention does not cross documents, and positions begin anew.

        To first order both rows' errors are proportional to the unit roundoff, so in float64 they may differ by 2^-29
        of what the float32 models are off; a factor of 64 allows for errors that happened to cancel there.
        """
        model = roughened(Llama(**{**TINY, "kv_heads": 2 if grouped else 4}), seed)
        exact = copy.deepcopy(model).double()
        tokens, documents = shared(lengths, seed)
        actual, single = exact(tokens, documents), model(tokens, documents).double()
        alone = [exact(part) for part in tokens.split(lengths, dim=1)]
        expected = torch.cat(alone, dim=1)
        bound = 64 * 2.0**-29 * (single - expected).abs().max()
        assert (actual - expected).abs().max() <= bound

    @given(LENGTHS, st.data(), st.integers(0, 99))
    @settings(max_examples=25)
    def test_neighbours_change_no_bit(self, lengths, data, seed):
        """Whatever the other documents of a row say, to the bit."""
        kept = data.draw(st.integers(0, len(lengths) - 1))
        model = roughened(Llama(**TINY), seed)
        tokens, documents = shared(lengths, seed)
        others = torch.where(documents == kept, tokens, (tokens + 1) % 11)
        here = documents[0] == kept
        assert torch.equal(model(tokens, documents)[0, here], model(others, documents)[0, here])

    @given(LENGTHS, st.integers(0, 99))
    @settings(max_examples=15)
    def test_only_where_numbers_change_matters(self, lengths, seed):
        """A number may come again behind another one: that is a document more."""
        model = roughened(Llama(**TINY), seed)
        tokens, documents = shared(lengths, seed)
        assert torch.equal(model(tokens, documents), model(tokens, documents % 2))

    @given(LENGTHS)
    def test_positions_begin_anew(self, lengths):
        """Attention sees differences of positions alone, but angles are rounded: they are those of a row of its own."""
        _, documents = shared(lengths, 0)
        options = {"head_width": 4, "theta": 10.0, "like": torch.zeros(1)}
        together = places(sum(lengths), documents, **options)
        alone = [places(length, None, **options) for length in lengths]
        assert torch.equal(torch.cat([one.cosine for one in alone]), together.cosine[0, 0])
        assert torch.equal(torch.cat([one.sine for one in alone]), together.sine[0, 0])

    def test_gradients_do_not_cross(self):
        """The loss of one document reaches the embedding of its own tokens alone."""
        model = roughened(Llama(**TINY), 0)
        tokens, documents = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 0, 1, 1, 1]])
        x = model.model.embed_tokens(tokens).detach().requires_grad_()
        model.model.embed_tokens.register_forward_hook(lambda *_: x)
        model(tokens, documents)[0, :2].square().sum().backward()
        assert (x.grad[0, :2].abs().sum(-1) > 0).all()
        assert torch.equal(torch.zeros(3, 16), x.grad[0, 2:])

    def test_other_shapes_are_refused(self):
        """One number a token."""
        with pytest.raises(ContractError, match=r"one number for each token; got \[1, 2\] for tokens \[1, 3\]"):
            Llama(**TINY)(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64))


class TestCheckpointedActivations:
    """`Llama(checkpoint_activations=True)`."""

    @pytest.mark.parametrize("adapters", [False, True])
    @pytest.mark.parametrize("documents", [False, True])
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16])
    def test_changes_no_bit(self, adapters, documents, dtype):
        """Logits and gradients are those of a model that keeps its activations, with dropout, and under autocast."""
        results = []
        tokens, numbers = shared([3, 4], 0)
        for checkpointed in (False, True):
            model = Llama(**TINY, dropout=0.3, checkpoint_activations=checkpointed)
            if adapters:
                lora(model, rank=2, dropout=0.3)
            roughened(model, 0)
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                logits = model(tokens, numbers if documents else None)
            logits.float().square().sum().backward()
            gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
            results.append([logits, *gradients, torch.rand(1)])
        assert all(torch.equal(kept, again) for kept, again in zip(*results, strict=True))

    @pytest.mark.parametrize("checkpointed", [False, True])
    def test_a_layer_keeps_its_input_alone(self, checkpointed):
        """Autograd keeps one tensor more for each layer more."""
        kept = []

        def keep(tensor):
            kept[-1] += 1
            return tensor

        for layers in (1, 3):
            kept.append(0)
            model = Llama(**{**TINY, "layers": layers}, checkpoint_activations=checkpointed)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                model(torch.arange(8)[None])
        assert checkpointed == (kept[0] + 2 == kept[1])
