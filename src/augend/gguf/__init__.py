"""GGUF files: models from llama.cpp and to llama.cpp, and any other tensors."""

from augend.gguf._adapter import save_adapter
from augend.gguf._header import Header, TensorInfo, read_header
from augend.gguf._load import Model, load, read
from augend.gguf._metadata import Value
from augend.gguf._save import save
from augend.gguf._tokenizer import Tokenizer, tokenizer_of
from augend.gguf._vocabulary import metadata_of
from augend.gguf._write import write

__all__ = [
    "Header",
    "Model",
    "TensorInfo",
    "Tokenizer",
    "Value",
    "load",
    "metadata_of",
    "read",
    "read_header",
    "save",
    "save_adapter",
    "tokenizer_of",
    "write",
]
