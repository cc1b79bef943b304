"""llama.cpp itself, by ctypes: the C API that the wheel xllamacpp exports, on one thread.

Never imported by a test: where llama.cpp is misused it ends the process. ``llama_process.py`` runs it in one of its
own. Structures that are passed by value are opaque and larger than the real ones: the calling convention of Linux on
x86_64 passes and returns them in memory, so that their defaults need no declaration; the few fields that are set here
have their offsets in this build.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, c_bool, c_char_p, c_double, c_float, c_int, c_int8, c_int32, c_int64, c_void_p
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

F32 = 0
OPTIMIZER_ADAMW = 0
NEVER, MODEL_VOCABULARY_ONLY, MODEL_LOAD_MODE = 0, 72, 24
CONTEXT_TOKENS, CONTEXT_BATCH, CONTEXT_PHYSICAL, CONTEXT_FLASH, CONTEXT_KEYS, CONTEXT_VALUES = 0, 4, 8, 52, 104, 108
P = c_void_p


class Opaque(Structure):
    """Any structure that is passed by value."""

    _fields_ = (("bytes", c_int8 * 1024),)

    def put(self, offset: int, value: int, kind: type = c_int32) -> None:
        """Set a field by its offset."""
        kind.from_buffer(self, offset).value = value


class Batch(Structure):
    """llama_batch."""

    _fields_ = (
        ("tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embedding", P),
        ("position", POINTER(c_int32)),
        ("sequences", POINTER(c_int32)),
        ("sequence", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


class Message(Structure):
    """llama_chat_message."""

    _fields_ = (("role", c_char_p), ("content", c_char_p))


class OptimizerParameters(Structure):
    """ggml_opt_optimizer_params: alpha, beta1, beta2, eps, wd of AdamW; alpha, wd of SGD."""

    _fields_ = (("values", c_float * 7),)


class Options(Structure):
    """llama_opt_params."""

    _fields_ = (
        ("tokens", ctypes.c_uint32),
        ("filter", P),
        ("filter_argument", P),
        ("parameters", P),
        ("parameters_argument", P),
        ("kind", c_int),
    )


Trained = ctypes.CFUNCTYPE(c_bool, P, P)
Log = ctypes.CFUNCTYPE(None, c_int, c_char_p, P)
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [Log, P]),
    "llama_model_default_params": (Opaque, []),
    "llama_context_default_params": (Opaque, []),
    "llama_model_load_from_file": (P, [c_char_p, Opaque]),
    "llama_model_free": (None, [P]),
    "llama_model_get_vocab": (P, [P]),
    "llama_model_n_params": (ctypes.c_uint64, [P]),
    "llama_model_chat_template": (c_char_p, [P, c_char_p]),
    "llama_init_from_model": (P, [P, Opaque]),
    "llama_free": (None, [P]),
    "llama_set_n_threads": (None, [P, c_int32, c_int32]),
    "llama_get_memory": (P, [P]),
    "llama_memory_clear": (None, [P, c_bool]),
    "llama_vocab_n_tokens": (c_int32, [P]),
    "llama_vocab_bos": (c_int32, [P]),
    "llama_vocab_eos": (c_int32, [P]),
    "llama_tokenize": (c_int32, [P, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool]),
    "llama_detokenize": (c_int32, [P, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool]),
    "llama_chat_apply_template": (c_int32, [c_char_p, POINTER(Message), ctypes.c_size_t, c_bool, c_char_p, c_int32]),
    "llama_batch_init": (Batch, [c_int32, c_int32, c_int32]),
    "llama_batch_free": (None, [Batch]),
    "llama_decode": (c_int32, [P, Batch]),
    "llama_get_logits_ith": (POINTER(c_float), [P, c_int32]),
    "llama_adapter_lora_init": (P, [P, c_char_p]),
    "llama_set_adapters_lora": (c_int32, [P, POINTER(P), ctypes.c_size_t, POINTER(c_float)]),
    "llama_opt_init": (None, [P, P, Options]),
    "llama_opt_epoch": (None, [P, P, P, P, c_int64, P, P]),
    "ggml_opt_dataset_init": (P, [c_int, c_int, *[c_int64] * 4]),
    "ggml_opt_dataset_data": (P, [P]),
    "ggml_opt_dataset_labels": (P, [P]),
    "ggml_opt_result_init": (P, []),
    "ggml_opt_result_loss": (None, [P, POINTER(c_double), POINTER(c_double)]),
    "ggml_get_data": (P, [P]),
    "llama_model_save_to_file": (None, [P, c_char_p]),
}


@Log
def silent(_level: int, _text: bytes, _argument: int) -> None:
    """Say nothing of what llama.cpp has to say."""


@cache
def library() -> ctypes.CDLL:
    """Load llama.cpp and tell ctypes its signatures."""
    (path,) = Path(importlib.util.find_spec("xllamacpp").origin).parent.glob("xllamacpp*.so")
    llama = ctypes.CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(llama, name)
        function.restype, function.argtypes = result, arguments
    llama.llama_log_set(silent, None)
    llama.llama_backend_init()
    return llama


@contextmanager
def model_at(path: str, *, vocabulary_only: bool = False, mapped: bool = True) -> Iterator[int]:
    """Load a model, or no more of it than its vocabulary; where it is trained, not from a map of the file."""
    options = library().llama_model_default_params()
    options.put(MODEL_VOCABULARY_ONLY, int(vocabulary_only), c_int8)
    if not mapped:
        options.put(MODEL_LOAD_MODE, NEVER)
    model = library().llama_model_load_from_file(path.encode(), options)
    if model is None:
        raise ValueError(f"llama.cpp does not load {path}")
    yield model
    library().llama_model_free(model)


@contextmanager
def context_of(model: int, tokens: int, physical: int) -> Iterator[int]:
    """Make a context of so many tokens whose keys and values stay in float32, on one thread."""
    options = library().llama_context_default_params()
    for offset, value in (
        (CONTEXT_TOKENS, tokens),
        (CONTEXT_BATCH, tokens),
        (CONTEXT_PHYSICAL, physical),
        (CONTEXT_FLASH, NEVER),
        (CONTEXT_KEYS, F32),
        (CONTEXT_VALUES, F32),
    ):
        options.put(offset, value)
    context = library().llama_init_from_model(model, options)
    library().llama_set_n_threads(context, 1, 1)
    yield context
    library().llama_free(context)


def tokens(path: str, texts: Sequence[str], *, special: bool, begin: bool) -> dict[str, Any]:
    """Return the tokens of texts, and what they are in letters again.

    Args:
        path: The model.
        texts: The texts.
        special: Whether special tokens are recognised in texts.
        begin: Whether what the model wants before a text is put there.
    """
    llama, found, decoded = library(), [], []
    with model_at(path, vocabulary_only=True) as model:
        vocabulary = llama.llama_model_get_vocab(model)
        for text in texts:
            letters = text.encode()
            room = (c_int32 * (len(letters) + 8))()
            length = llama.llama_tokenize(vocabulary, letters, len(letters), room, len(room), begin, special)
            found.append(room[:length])
            said = ctypes.create_string_buffer(4 * len(letters) + 64)
            size = llama.llama_detokenize(vocabulary, room, length, said, len(said), not special, special)
            decoded.append(said.raw[:size].decode(errors="replace"))
        ends = [llama.llama_vocab_bos(vocabulary), llama.llama_vocab_eos(vocabulary)]
        return {"tokens": found, "texts": decoded, "ends": ends, "size": llama.llama_vocab_n_tokens(vocabulary)}


def tokens_of_all(paths: Sequence[str], texts: Sequence[str]) -> list[list[list[int]]]:
    """Return the tokens of texts for each of several models."""
    return [tokens(path, texts, special=True, begin=True)["tokens"] for path in paths]


def conversation(path: str, messages: Sequence[dict[str, str]], *, answer: bool) -> str:
    """Return a conversation in the model's own words, by llama.cpp's built-in copy of its template."""
    llama = library()
    said = [Message(each["role"].encode(), each["content"].encode()) for each in messages]
    with model_at(path, vocabulary_only=True) as model:
        template = llama.llama_model_chat_template(model, None)
        room = ctypes.create_string_buffer(1 << 16)
        size = llama.llama_chat_apply_template(
            template, (Message * len(said))(*said), len(said), answer, room, len(room)
        )
        return room.raw[:size].decode()


def logits(path: str, rows: Sequence[Sequence[int]], *, adapter: str | None = None, scale: float = 1) -> dict[str, Any]:
    """Return the logits at each token of rows of tokens, [length, vocabulary] each.

    Args:
        path: The model.
        rows: Tokens.
        adapter: A LoRA adapter to use with the model.
        scale: The factor of the adapter.
    """
    llama = library()
    room = max(map(len, rows))
    with model_at(path) as model, context_of(model, room, room) as context:
        if adapter is not None:
            loaded = llama.llama_adapter_lora_init(model, adapter.encode())
            if loaded is None:
                raise ValueError(f"llama.cpp does not load the adapter {adapter}")
            llama.llama_set_adapters_lora(context, (P * 1)(loaded), 1, (c_float * 1)(scale))
        size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        return {
            "logits": [_decoded(context, row, size) for row in rows],
            "parameters": llama.llama_model_n_params(model),
        }


def _decoded(context: int, row: Sequence[int], size: int) -> np.ndarray:
    llama = library()
    llama.llama_memory_clear(llama.llama_get_memory(context), True)
    batch = llama.llama_batch_init(len(row), 0, 1)
    batch.tokens = len(row)
    for place, token in enumerate(row):
        batch.token[place], batch.position[place], batch.sequences[place] = token, place, 1
        batch.sequence[place][0], batch.logits[place] = 0, 1
    if status := llama.llama_decode(context, batch):
        raise RuntimeError(f"llama_decode returned {status}")
    places = [np.ctypeslib.as_array(llama.llama_get_logits_ith(context, at), (size,)).copy() for at in range(len(row))]
    llama.llama_batch_free(batch)
    return np.stack(places)


def optimise(path: str, rows: np.ndarray, *, trained: int, rate: float, epochs: int, out: str | None) -> dict[str, Any]:
    """Train by llama_opt_epoch with AdamW, and return the loss of each part and its uncertainty for each epoch.

    Args:
        path: The model.
        rows: Tokens and the one that follows each row, [rows, length + 1]; llama.cpp wants a length that 256 divides.
        trained: How many rows are trained on; the others are evaluated.
        rate: The learning rate.
        epochs: How often.
        out: Where to save the model; None: nowhere.
    """
    llama, length = library(), rows.shape[1] - 1
    with model_at(path, mapped=False) as model, context_of(model, length, length) as context:
        parameters = OptimizerParameters((rate, 0.9, 0.999, 1e-8, 0.0, rate, 0.0))
        constant = ctypes.cast(llama.ggml_opt_get_constant_optimizer_params, P)
        every = ctypes.cast(llama.llama_opt_param_filter_all, P)
        options = Options(0, every, None, constant, ctypes.addressof(parameters), OPTIMIZER_ADAMW)
        llama.llama_opt_init(context, model, options)
        dataset = llama.ggml_opt_dataset_init(26, 26, length, length, len(rows), 1)
        for place, values in (("data", rows[:, :-1]), ("labels", rows[:, 1:])):
            tensor = getattr(llama, f"ggml_opt_dataset_{place}")(dataset)
            memory = (c_int32 * values.size).from_address(llama.ggml_get_data(tensor))
            np.frombuffer(memory, np.int32).reshape(values.shape)[...] = values
        losses = []
        for _ in range(epochs):
            results = [llama.ggml_opt_result_init() for _ in range(2)]
            llama.llama_opt_epoch(context, dataset, *results, trained, None, None)
            losses.append([_loss(result) for result in results])
        if out is not None:
            llama.llama_model_save_to_file(model, out.encode())
        return {"losses": losses}


def _loss(result: int) -> tuple[float, float]:
    value, uncertainty = c_double(), c_double()
    library().ggml_opt_result_loss(result, ctypes.byref(value), ctypes.byref(uncertainty))
    return value.value, uncertainty.value


def _answer(folder: Path, function: str, request: dict[str, Any]) -> None:
    """Write what a function returns, its arrays in files beside."""
    numbers = count()

    def saved(array: np.ndarray) -> dict[str, str]:
        path = folder / f"answer-{next(numbers)}.npy"
        np.save(path, array)
        return {"array": str(path)}

    request = {name: np.load(value["array"]) if isinstance(value, dict) else value for name, value in request.items()}
    answer = json.dumps(globals()[function](**request), default=saved)
    (folder / "answer.json").write_text(answer, "utf-8")


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    _answer(Path(asked["folder"]), asked["function"], asked["request"])
