"""A real model: SmolLM2-135M, of Q4_1, Q8_0 and F32 tensors, as llama.cpp's users have it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from llamas import bits, in_llama_cpp

import gguf
from augend.gguf import Model, load, save
from augend.models import Llama

pytestmark = pytest.mark.long

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEADS = {"attn_q": 9, "attn_k": 3}
READ_BY_BOTH = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from augend.gguf import load
path = Path(sys.argv[1])
config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config)
theirs = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
print(sum(torch.equal(theirs[name], tensor) for name, tensor in load(path).state.items()))
"""


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Model:
    """Load it once."""
    return load(smollm2)


def test_all_tensors_are_what_the_package_makes_of_them(smollm2: Path, model: Model) -> None:
    """All 272 tensors are those of gguf.quants.dequantize to the bit, where llama.cpp's converter puts its rows."""
    tensors = {one.name: one for one in gguf.GGUFReader(smollm2).tensors}
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for layer in range(30):
        names |= {f"blk.{layer}.{theirs}": f"model.layers.{layer}.{ours}" for theirs, ours in NAMES.items()}
    assert 272 == len(tensors) == len(model.state) == len(names)
    for theirs, ours in names.items():
        read = tensors[f"{theirs}.weight"]
        expected = gguf.quants.dequantize(read.data, read.tensor_type)
        actual = model.state[f"{ours}.weight"].numpy()
        if heads := HEADS.get(theirs.split(".")[-1]):
            actual = in_llama_cpp(actual, heads)
        assert expected.tobytes() == np.ascontiguousarray(actual).tobytes(), theirs
    assert {
        "vocab_size": 49152,
        "width": 576,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "hidden": 1536,
        "max_length": 8192,
        "rope_theta": 100_000.0,
        "norm_eps": float(np.float32(1e-5)),
        "tied": True,
    } == model.configuration


def test_transformers_reads_the_same_weights(smollm2: Path) -> None:
    """What transformers makes of the file is the same to the bit; how long both take is benchmarks/gguf_reading.py."""
    done = subprocess.run([sys.executable, "-c", READ_BY_BOTH, smollm2], capture_output=True, text=True, check=True)
    assert 272 == int(done.stdout)


def test_it_can_be_given_back(model: Model, tmp_path: Path) -> None:
    """Saved as F32 and loaded again, it has the same bits and says the same of itself."""
    header = save(tmp_path / "again.gguf", model.state, like=model)
    changed = {key for key, value in model.header.metadata.items() if value != header.metadata[key]}
    assert {"general.file_type"} == changed
    assert bits(model.state) == bits(load(tmp_path / "again.gguf").state)


def test_it_knows_the_capital_of_france(model: Model) -> None:
    """A Llama with its weights and its tokenizer goes on as llama.cpp does."""
    llama = Llama(**model.configuration)
    llama.load_state_dict(model.state)
    prompt = model.tokenizer.encode("The capital of France is")
    with torch.no_grad():
        assert " Paris." == model.tokenizer.decode(llama.generate(prompt, 2))
