"""``augend generate``: what a trained language model says to a prompt."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from augend._cli._failures import Reported
from augend._cli._options import SavedPath, Traceback
from augend.errors import ConfigError

if TYPE_CHECKING:
    from augend._cli._restore import Restored


def generate(
    path: SavedPath,
    *,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.", show_default=False)],
    max_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Most tokens to add.")] = 200,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T", min=0, help="Draw tokens by chance: 1 as the model has them, less for likelier ones."
        ),
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Draw from the likeliest tokens that together have this probability.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(metavar="S", min=0, max=2**63 - 1, help="Decides what is drawn.")] = 0,
    show_traceback: Traceback = False,
) -> None:
    """Continue a prompt with the model of a run's newest good checkpoint, or of the checkpoint given.

    Each token is the most likely one, or drawn with --temperature, until the model ends the text, N tokens are there,
    or it can take no more. Only the new text is printed.
    """
    with Reported(show_traceback=show_traceback):
        if not prompt:
            raise ConfigError("--prompt: empty; give a text to continue, such as --prompt 'def main()'")
        if not 0 < top_p <= 1:
            raise ConfigError(f"--top-p {top_p}: expected a probability above 0, and at most 1")
        if not temperature < math.inf:
            raise ConfigError(f"--temperature {temperature}: expected a finite number, such as 0.8")

        from augend._cli._restore import restored

        chances = Chances(temperature=temperature, top_p=top_p, seed=seed)
        _print(completion(restored(path), prompt, max_tokens, chances))


class Chances(TypedDict, total=False):
    """How tokens are chosen, as ``augend.models.Llama.generate`` has it; nothing: the most likely ones."""

    temperature: float
    top_p: float
    seed: int


def completion(source: Restored, prompt: str, max_tokens: int, chances: Chances) -> str:
    """Return what the model says to a prompt.

    Raises:
        ConfigError: The run has no language model, or the prompt does not fit it.
    """
    from augend import models

    tokenizer, model = source.rows.source.tokenizer, source.model
    if tokenizer is None:
        name = source.run.data.source
        raise ConfigError(f"data.source = {name!r} has no tokenizer for a prompt; generate needs a run on text")
    if not isinstance(model, models.Llama):
        name = source.run.model.name
        raise ConfigError(f"model.name = {name!r} made a {type(model).__name__}; generate needs an augend.models.Llama")
    tokens, length = tokenizer.encode(prompt), model.max_length
    if not tokens:
        raise ConfigError("--prompt: the run's tokenizer makes no token of it; give another text")
    if tokenizer.start_of_text is not None:
        tokens = [tokenizer.start_of_text, *tokens]
    if len(tokens) >= length:
        room = f"{len(tokens)} tokens, and prompt and completion together may have {length}"
        raise ConfigError(f"--prompt: {room}; shorten it to {length - 1} tokens at most")
    return tokenizer.decode(model.generate(tokens, max_tokens, stop=tokenizer.end_of_text, **chances))


def _print(text: str) -> None:
    """Print a text as it is: a console would turn its tabs into spaces."""
    from augend._cli._console import Output

    console = Output()
    try:
        print(text, file=sys.stdout, flush=True)
    except BrokenPipeError:
        console.on_broken_pipe()
