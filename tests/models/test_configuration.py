"""What a Llama says of itself."""

from __future__ import annotations

import pytest
import torch

from augend import models


@pytest.mark.parametrize("options", [{}, {"kv_heads": 1, "hidden": 40, "tied": False, "rope_theta": 500.0}])
def test_a_configuration_makes_the_same_model(options):
    """It has every argument that weights and logits depend on, those left out too; what is done to it does nothing."""
    model = models.Llama(width=32, layers=2, heads=2, max_length=20, norm_eps=1e-3, dropout=0.5, **options).eval()
    configuration = model.configuration
    other = models.Llama(**configuration).eval()
    other.load_state_dict(model.state_dict())
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens), other(tokens))
    assert options.items() <= configuration.items()
    assert 10 == len(configuration)
    configuration["width"] = 1
    assert 32 == model.configuration["width"]
