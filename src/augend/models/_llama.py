"""A Llama: the decoder of Touvron et al. 2023, with the names that Hugging Face gives its parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from augend.errors import ContractError
from augend.models._positions import Places, places, rotated
from augend.models._sampling import check_chances, chosen

_STANDARD_DEVIATION = 0.02


@final
class Llama(nn.Module):
    """A causal language model: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

    Sources: Touvron et al., "LLaMA", 2023; RMSNorm of Zhang & Sennrich 2019; rotary positions of Su et al. 2021, in the
    rotate-half convention of Hugging Face; SwiGLU of Shazeer 2020; grouped queries of Ainslie et al. 2023. Parameters
    are named and shaped as in ``transformers``' ``LlamaForCausalLM`` (``model.layers.0.self_attn.q_proj.weight``);
    with tied embeddings there is no ``lm_head.weight``, as in its files.

    Weights begin normal with standard deviation 0.02, those that write into the residual stream (``o_proj``,
    ``down_proj``) with 0.02/√(2·layers) (Radford et al., "GPT-2", 2019, section 2.3), norms as ones.

    Args:
        vocab_size: How many tokens there are. The default is that of ``augend.sources.Bytes``.
        width: Size of the residual stream.
        layers: How many decoder layers.
        heads: How many query heads; ``width / heads`` must be an even whole number.
        kv_heads: How many key and value heads; divides ``heads``. None: as many.
        hidden: Width of the SwiGLU. None: 8/3 of ``width``, rounded up to a multiple of 32.
        max_length: Most tokens in a row.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Added to the mean square before its root.
        tied: Whether the output weights are the embedding itself.
        dropout: Probability of zeroing in training: embeddings, attention weights, what a layer adds.
        checkpoint_activations: Whether a layer keeps its input alone for the backward, and computes the rest once more
            there (Chen et al., "Training deep nets with sublinear memory cost", 2016): about a third more time for a
            fraction of the memory, and the same bits.

    Raises:
        ContractError: An argument is out of its range.

    Example:
        >>> model = augend.models.Llama(width=32, layers=1, heads=2)
        >>> model(torch.zeros(2, 7, dtype=torch.int64)).shape
        torch.Size([2, 7, 258])
    """

    def __init__(
        self,
        *,
        vocab_size: int = 258,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        kv_heads: int | None = None,
        hidden: int | None = None,
        max_length: int = 1024,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-5,
        tied: bool = True,
        dropout: float = 0.0,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        groups = heads if kv_heads is None else kv_heads
        between = -(-8 * width // 96) * 32 if hidden is None else hidden
        sizes = {"vocab_size": vocab_size, "width": width, "layers": layers, "heads": heads, "kv_heads": groups}
        sizes["hidden"] = between
        _check_positive({**sizes, "max_length": max_length})
        if width % (2 * heads):
            raise ContractError(f"width must be an even multiple of heads; got width {width} and {heads} heads")
        if heads % groups:
            raise ContractError(f"kv_heads must divide heads; got {groups} and {heads}")
        if not 0 <= dropout < 1:
            raise ContractError(f"dropout must be at least 0 and less than 1; got {dropout}")
        if rope_theta <= 0 or norm_eps < 0:
            raise ContractError(f"rope_theta must be positive, norm_eps not negative; got {rope_theta} and {norm_eps}")
        self.max_length = max_length
        self._configuration: dict[str, Any] = {**sizes, "max_length": max_length, "tied": tied}
        self._configuration |= {"rope_theta": rope_theta, "norm_eps": norm_eps}
        self.model = _Decoder(
            **sizes,
            rope_theta=rope_theta,
            norm_eps=norm_eps,
            dropout=dropout,
            checkpointed=checkpoint_activations,
        )
        self.lm_head = None if tied else nn.Linear(width, vocab_size, bias=False)
        self.reset_parameters()

    @property
    def configuration(self) -> dict[str, Any]:
        """The arguments that make a Llama which takes this one's weights, as `augend.gguf.save` wants them."""
        return dict(self._configuration)

    def reset_parameters(self) -> None:
        """Draw all weights anew from torch's global generator, in the order of ``named_parameters``."""
        narrow = _STANDARD_DEVIATION / math.sqrt(2 * len(self.model.layers))
        for name, parameter in self.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):
                nn.init.ones_(parameter)
            else:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=narrow if into_residual else _STANDARD_DEVIATION)

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the logits of each next token.

        Rows may be padded on the right with any token: attention is causal, so no position sees what follows it.

        Args:
            tokens: ``[rows, length]`` int64.
            documents: ``[rows, length]`` int64, for rows that several documents share: side by side, tokens with one
                number are one document. Attention stays within it and its positions begin at 0, so its logits are
                those it has in a row of its own. None: every row is one document.

        Returns:
            ``[rows, length, vocab_size]``, in the parameters' dtype.

        Raises:
            ContractError: A row is longer than ``max_length``, or ``documents`` has another shape than ``tokens``.

        Numerics:
            What a document shares its row with changes no bit of its logits; that it shares one at all does, by the
            rounding of sums.
        """
        if tokens.dim() != 2 or tokens.shape[1] > self.max_length:  # noqa: PLR2004  rows and length
            got = f"{list(tokens.shape)}: cut the rows, or build the model with a larger max_length"
            raise ContractError(f"tokens must be [rows, length] with length at most {self.max_length}; got {got}")
        if documents is not None and documents.shape != tokens.shape:
            got = f"{list(documents.shape)} for tokens {list(tokens.shape)}"
            raise ContractError(f"documents must have one number for each token; got {got}")
        x = self.model(tokens, documents)  # [rows, length, width]
        if self.lm_head is None:
            return functional.linear(x, self.model.embed_tokens.weight)
        logits: Tensor = self.lm_head(x)
        return logits

    @torch.no_grad()
    def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        stop: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[int]:
        """Continue a prompt with the most likely token, or with one drawn by its probability, again and again.

        Args:
            prompt: Tokens, at least one.
            max_tokens: How many to add at most; fewer where ``max_length`` is reached, none if the prompt fills it.
            stop: The token that ends the text; it is not returned.
            temperature: What logits are divided by before a token is drawn; 0: the most likely one is taken.
            top_p: Tokens are drawn from the fewest likely ones that together have this probability (Holtzman et al.,
                "The curious case of neural text degeneration", 2020).
            seed: Decides what is drawn; torch's own random state is not touched.

        Returns:
            The new tokens.

        Raises:
            ContractError: The prompt is empty or longer than ``max_length``, the temperature is negative or not finite,
                or ``top_p`` is not above 0 and at most 1.
        """
        check_chances(temperature, top_p)
        if not 1 <= len(prompt) <= self.max_length:
            raise ContractError(f"the prompt must have 1 to {self.max_length} tokens; got {len(prompt)}")
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        generator = torch.Generator().manual_seed(seed)
        try:
            tokens = list(prompt)
            for _ in range(min(max_tokens, self.max_length - len(prompt))):
                rows = torch.tensor([tokens], device=self.model.embed_tokens.weight.device)  # [1, length]
                token = chosen(self(rows)[0, -1], temperature, top_p, generator)
                if token == stop:
                    break
                tokens.append(token)
            return tokens[len(prompt) :]
        finally:
            for module, training in modes:
                module.training = training


def _check_positive(sizes: Mapping[str, int]) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ContractError(f"{name} must be at least 1; got {value}")


@final
class _Decoder(nn.Module):
    """Embedding, layers, norm: Hugging Face's ``model``."""

    def __init__(
        self,
        *,
        vocab_size: int,
        width: int,
        layers: int,
        heads: int,
        kv_heads: int,
        hidden: int,
        rope_theta: float,
        norm_eps: float,
        dropout: float,
        checkpointed: bool,
    ) -> None:
        super().__init__()
        self.head_width, self.rope_theta = width // heads, rope_theta
        self.embed_tokens = nn.Embedding(vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            _Layer(
                width,
                heads=heads,
                kv_heads=kv_heads,
                hidden=hidden,
                norm_eps=norm_eps,
                dropout=dropout,
                checkpointed=checkpointed,
            )
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=norm_eps)

    def forward(self, tokens: Tensor, documents: Tensor | None) -> Tensor:
        x = self.dropout(self.embed_tokens(tokens))  # [rows, length, width]
        at = places(tokens.shape[1], documents, head_width=self.head_width, theta=self.rope_theta, like=x)
        for layer in self.layers:
            x = layer(x, at)
        out: Tensor = self.norm(x)
        return out


@final
class _Layer(nn.Module):
    """Attention and SwiGLU, each added to the stream from its normalised copy."""

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        kv_heads: int,
        hidden: int,
        norm_eps: float,
        dropout: float,
        checkpointed: bool,
    ) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(width, eps=norm_eps)
        self.self_attn = _Attention(width, heads, kv_heads, dropout)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=norm_eps)
        self.mlp = _SwiGLU(width, hidden)
        self.dropout = nn.Dropout(dropout)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, at: Places) -> Tensor:
        if not self.checkpointed:
            return self._passed(x, at)
        # Within this forward, so that the second pass does not go through the hooks of a sharded layer again.
        out: Tensor = checkpoint(self._passed, x, at, use_reentrant=False)
        return out

    def _passed(self, x: Tensor, at: Places) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), at))  # [rows, length, width]
        out: Tensor = x + self.dropout(self.mlp(self.post_attention_layernorm(x)))
        return out


@final
class _Attention(nn.Module):
    """Causal attention whose key and value heads each serve ``heads / kv_heads`` query heads."""

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width, self.grouped, self.dropout = width // heads, kv_heads != heads, dropout
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, at: Places) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # [rows, heads, length, head_width]
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(
            rotated(query, at),
            rotated(key, at),
            value,
            attn_mask=at.mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=at.mask is None,
            enable_gqa=self.grouped,
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))  # [rows, length, width]
        return out


@final
class _SwiGLU(nn.Module):
    """Silu of one projection times another, projected back."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
