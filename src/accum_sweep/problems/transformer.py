"""A small decoder-only transformer: pre-norm, learned positions. Loads torch, so it is imported late.

Shapes: n sequences, t tokens, w width, h heads.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INIT_STD = 0.02  # of weights and embeddings, as in GPT-2 (Radford et al., 2019)


class Transformer(nn.Module):
    """From tokens (n, t) to logits (n, t, vocabulary); a position sees itself and those before it."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(heads, width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict, at each position, the token that follows."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))  # (n, t, w)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Block(nn.Module):
    """Attention, then a perceptron of four times the width, each added to what it was given: (n, t, w) to the same."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), CausalAttention(heads, width, dropout))
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and then the perceptron make of `x`."""
        x = x + self.dropout(self.attention(x))
        y: Tensor = x + self.dropout(self.perceptron(x))
        return y


class CausalAttention(nn.Module):
    """Scaled dot-product attention with `heads` heads: (n, t, w) to the same.

    Needs no mask for padding that stands at the end: no token before it looks there.
    """

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.in_projection = nn.Linear(width, 3 * width)
        self.out_projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Gather at each position what those up to it hold."""
        n, t, w = x.shape
        heads = self.in_projection(x).view(n, t, 3, self.heads, w // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (n, h, t, w / h)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        y: Tensor = self.out_projection(seen.transpose(1, 2).reshape(n, t, w))
        return y


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
