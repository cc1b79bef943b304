"""What a trained language model says to a prompt that it did not see."""

from __future__ import annotations

from augend import Batches, models
from augend.sources import Tokenizer

_PROMPT_TOKENS = 32  # of a row that has no prompt of its own
_SAMPLE_TOKENS = 200


def sample(model: models.Llama, data: Batches, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the prompt of the first row, and the model's most likely completion of it.

    Args:
        model: The model.
        data: Rows of ``tokens`` and ``labels``; its position does not move. What comes before the first supervised
            label is the prompt; where that is nothing, a few tokens are.
        tokenizer: The way back to text.
    """
    microbatch = next(iter(next(iter(data.fresh()))))
    tokens, labels = microbatch["tokens"][0].tolist(), microbatch["labels"][0].tolist()
    if "documents" in microbatch:  # several share a row, and of none is the first token supervised
        length = int((microbatch["documents"][0] == microbatch["documents"][0, 0]).sum())
        tokens, labels = tokens[:length], [*labels[1:2], *labels[1:length]]
    length = next((at for at, label in enumerate(labels) if label >= 0), 0) or _PROMPT_TOKENS
    prompt = tokens[: min(length, model.max_length)]
    completion = model.generate(prompt, _SAMPLE_TOKENS, stop=tokenizer.end_of_text)
    return tokenizer.decode(prompt), tokenizer.decode(completion)
