"""The public API as a user writes it, for the type checker alone: every line must check, nothing here is run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_type

import torch
from torch import Tensor, nn

import augend
from augend import Accumulator, Batches, Estimate, Finished, History, Tally, data, errors, losses, metrics, schedules


def loss(model: nn.Module, microbatch: data.Microbatch) -> Tally:
    logits: Tensor = model(microbatch["inputs"])
    return losses.cross_entropy(logits, microbatch["labels"])


def two_terms(model: nn.Module, microbatch: data.Microbatch) -> Mapping[str, Tally]:
    tally = loss(model, microbatch)
    return {"loss": tally, "auxiliary": tally}


def train(model: nn.Module, rows: Mapping[str, Tensor]) -> float:
    optimizer = torch.optim.AdamW(model.parameters())
    grads = Accumulator(model, dtype="float64", loss_scale=2.0)
    batches = Batches(rows, batch_size=8, microbatch_size=2, seed=0, epochs=1)
    accuracy = metrics.Accuracy()
    for batch in batches:
        assert_type(batch.step, int)
        assert_type(batch.last, bool)
        for microbatch in grads.microbatches(batch):
            assert_type(microbatch.real_rows, int)
            tally = loss(model, microbatch)
            assert_type(tally.mean(), Tensor)
            grads.backward(tally)
        done = grads.step(optimizer, max_norm=1.0, empty="skip", nonfinite="raise")
        assert_type(done, Finished)
        assert_type(done.loss, Estimate)
        assert_type(done.norm, float)
    return accuracy.compute().value


def resume(model: nn.Module, grads: Accumulator) -> Accumulator:
    other = Accumulator(model)
    try:
        other.load_state_dict(grads.state_dict())
    except errors.ContractError as error:
        raise SystemExit(str(error)) from error
    other.reset()
    return other


def short(model: nn.Module, rows: Mapping[str, Tensor]) -> dict[str, Estimate]:
    train_rows, validation_rows = augend.split(rows, fraction=0.1, seed=0)
    batches = Batches(train_rows, batch_size=8, microbatch_size=2)
    held_out = Batches(validation_rows, batch_size=8, microbatch_size=2, shuffle=False, epochs=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = augend.fit(
        model,
        batches,
        loss=loss,
        optimizer=optimizer,
        steps=10,
        schedule=schedules.cosine(0.1, steps=10),
        validation=held_out,
        metrics={"again": loss},
    )
    assert_type(history, History)
    augend.fit(model, batches, loss=two_terms, optimizer=optimizer, epochs=1)
    return augend.evaluate(model, held_out, loss=loss)
