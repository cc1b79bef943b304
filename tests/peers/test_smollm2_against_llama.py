"""SmolLM2-135M, as its users have it, against llama.cpp: read, fine-tuned and given back."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from vocabularies import lines, nonsense

import augend
from augend.gguf import Model, Tokenizer, load, save
from augend.models import Llama
from augend.sources import pairs

pytestmark = pytest.mark.long
TEXT = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")
LENGTH = 48


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    """Load it once."""
    return load(smollm2)


@pytest.fixture(scope="module")
def tokenizer(model: Model) -> Tokenizer:
    """Give its tokenizer."""
    return model.tokenizer


def llama_of(model: Model) -> Llama:
    """Build it."""
    with torch.device("meta"):
        built = Llama(**model.configuration)
    built.load_state_dict({name: tensor.clone() for name, tensor in model.state.items()}, assign=True)
    return built.eval()


def losses_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each supervised token of a row."""
    return functional.cross_entropy(logits[:-1].double(), labels[1:], reduction="none")[labels[1:] >= 0]


def test_tokens_and_conversations(llama, smollm2: Path, tokenizer: Tokenizer) -> None:
    """Tokens of real text and of nonsense are llama.cpp's, and so are the words of a conversation."""
    texts = [*lines(), *TEXT.splitlines(), *nonsense(2000), "<|im_start|>user\n1234<|im_end|>"]
    found = llama("tokens", path=str(smollm2), texts=texts, special=True, begin=True)
    assert [tokenizer.encode(text) for text in texts] == found["tokens"]
    assert [tokenizer.decode(tokens) for tokens in found["tokens"]][:-1] == found["texts"][:-1]
    said = [("system", "Be short."), ("user", "2+2?"), ("assistant", "4")]
    messages = [{"role": role, "content": content} for role, content in said]
    whole = llama("conversation", path=str(smollm2), messages=messages, answer=False)
    assert whole == "".join(text for text, _ in tokenizer.chat(messages)) + "\n"


def test_the_loss_of_a_text(llama, smollm2: Path, model: Model, tokenizer: Tokenizer) -> None:
    """The mean loss is llama.cpp's within 0.005 nats: it multiplies Q4_1 with 8-bit numbers, and augend with floats."""
    tokens = torch.tensor(tokenizer.encode(TEXT)[:1024])
    (theirs,) = llama("logits", path=str(smollm2), rows=[tokens.tolist()])["logits"]
    with torch.no_grad():
        ours = llama_of(model)(tokens[None])[0]
    expected = float(losses_of(ours, tokens).mean())
    assert float(losses_of(torch.from_numpy(theirs), tokens).mean()) == pytest.approx(expected, abs=0.005, rel=0)


def test_written_as_f32(llama, tmp_path: Path, model: Model, tokenizer: Tokenizer) -> None:
    """Where llama.cpp multiplies with floats, too, it agrees on every logit and on the most likely token everywhere."""
    tokens = torch.tensor(tokenizer.encode(TEXT)[:192])
    save(tmp_path / "f32.gguf", model.state, like=model)
    (theirs,) = llama("logits", path=str(tmp_path / "f32.gguf"), rows=[tokens.tolist()])["logits"]
    (tmp_path / "f32.gguf").unlink()
    with torch.no_grad():
        ours = llama_of(model)(tokens[None])[0]
    difference = losses_of(torch.from_numpy(theirs), tokens) - losses_of(ours, tokens)
    assert abs(float(difference.mean())) < 1e-4
    assert float((torch.from_numpy(theirs) - ours).abs().max()) < 2e-3
    assert torch.equal(torch.from_numpy(theirs).argmax(-1), ours.argmax(-1))


def documented() -> list[dict[str, str]]:
    """Return heads of functions and what their authors say of them."""
    found = {}
    for module in (inspect, ast, json, pytest, np.lib.array_utils, functional):
        for name, function in vars(module).items():
            says = inspect.getdoc(function) if inspect.isfunction(function) else None
            if says:
                found[f"def {name}{inspect.signature(function)!s:.60}:\n    "] = f'"""{says.splitlines()[0]}"""'
    return [{"prompt": head, "completion": says} for head, says in found.items()]


def test_what_was_learned_is_still_there(llama, tmp_path: Path, model: Model, tokenizer: Tokenizer) -> None:
    """A few steps on pairs lower the loss of held-out ones by more than its error bar, in llama.cpp, too."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, documented()[:112])), "utf-8")
    source = pairs(path, tokenizer=tokenizer, max_tokens=LENGTH)
    training, held_out = ([source.rows[at] for at in places] for places in (range(16, 112), range(16)))
    built = llama_of(model)

    def measured() -> augend.Estimate:
        data = augend.Batches(held_out, batch_size=16, microbatch_size=4, collate_fn=source.collate)
        return augend.evaluate(built, data, loss=source.loss)["loss"]

    before = measured()
    data = augend.Batches(training, batch_size=16, microbatch_size=4, seed=0, collate_fn=source.collate)
    optimizer = torch.optim.AdamW(built.parameters(), lr=2e-4)
    augend.fit(built, data, loss=source.loss, optimizer=optimizer, steps=6, max_norm=1.0)
    after = measured()
    assert after.value < before.value - before.error
    out = tmp_path / "tuned.gguf"
    save(out, built.state_dict(), like=model, type="q8_0")
    found = llama("logits", path=str(out), rows=[row["tokens"].tolist() for row in held_out])["logits"]
    theirs = [losses_of(torch.from_numpy(logits), row["labels"]) for logits, row in zip(found, held_out, strict=True)]
    loss = float(torch.cat(theirs).mean())
    assert loss < before.value - before.error
    assert loss == pytest.approx(after.value, abs=0.02, rel=0)
