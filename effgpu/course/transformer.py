"""The transformer of the running example, in plain PyTorch."""

from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Transformer(nn.Module):
    """A pre-norm transformer. `model(texts)` is `embed`, then each of `blocks`, then `classify`.

    With `causal`, a token sees only the tokens before it, and `classify` gives logits for each token. Packed texts also
    give their `positions` [batch, length], and an `attention` that maps queries, keys and values, each [batch, heads,
    length, width / heads], to such a tensor.
    """

    def __init__(self, classes, vocabulary, length, layers, width, heads, dropout=0.1, causal=False):
        super().__init__()
        self.width = width
        self.embed = Embed(vocabulary, length, width, dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, causal) for _ in range(layers))
        self.classify = Classify(width, classes, per_token=causal)

    def forward(self, texts, positions=None, *attention):  # texts: [batch, length]
        x = self.embed(texts, positions)  # [batch, length, width]
        for block in self.blocks:
            x = block(x, *attention)  # [batch, length, width]
        return self.classify(x)  # [batch, classes], or [batch, length, classes] if causal


class Embed(nn.Module):
    """The sum of a vector for the token and a vector for its position."""

    def __init__(self, vocabulary, length, width, dropout):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)  # as in GPT-2: learns faster than with PyTorch's std of 1

    def forward(self, texts, positions=None):  # texts: [batch, length]
        in_order = self.positions.weight[: texts.shape[1]]  # [length, width]
        vectors = in_order if positions is None else self.positions(positions)
        return self.dropout(self.tokens(texts) + vectors)  # [batch, length, width]


class Block(nn.Module):
    """Attention mixes the tokens of a text. The MLP works on each token alone."""

    def __init__(self, width, heads, dropout, causal):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, *attention):  # x: [batch, length, width]
        x = x + self.dropout(self.attention(self.attention_norm(x), *attention))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Attention(nn.Module):
    """Self-attention with several heads."""

    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, attention=None):  # x: [batch, length, width]
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # [batch, length, 3, heads, width / heads]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        x = attention(q, k, v) if attention else scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(x.transpose(1, 2).flatten(2))  # [batch, length, width]


class Classify(nn.Module):
    """Logits of a text, from the mean of its tokens, or of each token."""

    def __init__(self, width, classes, per_token):
        super().__init__()
        self.per_token = per_token
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, classes)

    def forward(self, x):  # x: [batch, length, width]
        x = self.norm(x)
        return self.logits(x if self.per_token else x.mean(1))
