r"""How llama.cpp cuts text before byte pairs are merged: the pre-tokenizers that a GGUF file can name.

Each is a list of expressions applied one after the other; what an expression matches is a piece, and so is what lies
between its matches. They are those of the models' own ``tokenizer.json``, in the words of Oniguruma, but for the
contractions: those of llama.cpp have the letters of ASCII alone, where ``(?i:'s)`` also matches ``'ſ``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final

DIGITS: Final = r"\p{N}"
GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS: Final = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS: Final = rf"{CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_ONE_DIGIT: Final = rf"{CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}"
_SIGNS: Final = r"[\p{P}$+<=>^~|]+"


@final
@dataclass(frozen=True, slots=True)
class Words:
    """One way to cut text.

    Attributes:
        expressions: Applied one after the other.
        whole: Whether a piece that is a token as a whole stays whole, whatever the merges make of it.
        begins: Whether a text begins with the token for that where the file does not say.
    """

    expressions: tuple[str, ...]
    whole: bool = False
    begins: bool = False


_DEFAULT: Final = Words((_SIGNS, GPT2, r"\p{N}+", "[0-9]{3}"))
_LLAMA3: Final = Words((_THREE_DIGITS,), whole=True, begins=True)
_SINGLE_DIGITS: Final = Words((DIGITS, GPT2))

# tokenizer.ggml.pre of files of the architecture llama and its kin.
WORDS: Final[Mapping[str, Words]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "exaone4", "mpt", "olmo"), Words((GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), Words((_THREE_DIGITS,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), Words((_ONE_DIGIT,))),
}
