"""Data to begin with, each with the loss that fits it.

A source is a function that returns a `Source`: rows for `augend.Batches`, how to collate them, and a loss and metrics
for `augend.fit`. `docstrings`, `text` and `pairs` have rows of tokens and `augend.losses.causal_lm`; `digits` has
images and `augend.losses.cross_entropy`. `packed` lets rows of tokens share rows of the model.
"""

from __future__ import annotations

from augend.sources._digits import digits as digits
from augend.sources._docstrings import docstrings as docstrings
from augend.sources._packed import packed as packed
from augend.sources._pairs import pairs as pairs
from augend.sources._source import Source as Source
from augend.sources._text import text as text
from augend.sources._tokenizer import Bytes as Bytes
from augend.sources._tokenizer import ChatTokenizer as ChatTokenizer
from augend.sources._tokenizer import Tokenizer as Tokenizer
from augend.sources._tokenizer import TokenizerFile as TokenizerFile

__all__ = [
    "Bytes",
    "ChatTokenizer",
    "Source",
    "Tokenizer",
    "TokenizerFile",
    "digits",
    "docstrings",
    "packed",
    "pairs",
    "text",
]
