"""Text from a model, token by token: greedy, by temperature, or from the likeliest tokens (top-p) only.

Each token takes a whole forward pass over what came before it: simple, and fast enough to see what a model
has learned; who serves a model exports it. Shape letters: S sequence length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestra.model.transformer import Transformer

# The smallest normal number of fp32: smaller ones would be 0, and the largest logit's share 0 ÷ 0.
_LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Choice:
    """How a token is chosen. `temperature` 0 takes the likeliest; `top_p` < 1 leaves out the tokens beyond
    the fewest whose probabilities sum to it. Equal seeds choose alike on one machine.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0


@torch.no_grad()
def sampled(
    model: Transformer,
    prompt: Sequence[int],
    choice: Choice,
    *,
    max_tokens: int,
    vocab_size: int,
    context: int,
    end_id: int | None = None,
) -> list[int]:
    """Return up to `max_tokens` tokens that follow a prompt of at least one token, without `end_id`, which
    ends them.

    Only tokens below `vocab_size` are chosen: a model's vocabulary may be padded. The last `context` tokens
    are looked at.
    """
    device = model.lm_head.weight.device
    # On the host, whatever the model is on: its draws depend on the seed alone.
    generator = torch.Generator().manual_seed(choice.seed)
    tokens = list(prompt)
    for _ in range(max_tokens):
        window_1S = torch.tensor([tokens[-context:]], device=device)
        logits_V = model.lm_head(model.hidden(window_1S)[:, -1])[0, :vocab_size]
        token = chosen(logits_V.float().cpu(), choice, generator)
        if token == end_id:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def chosen(logits_V: Tensor, choice: Choice, generator: torch.Generator) -> int:
    """Return one token by its logits [V] (fp32, host)."""
    if choice.temperature == 0:
        return int(logits_V.argmax())
    # Below the largest logit: near 0 the temperature would make infinities of numbers above 0.
    below_V = logits_V - logits_V.max()
    sorted_V, token_V = torch.softmax(below_V / max(choice.temperature, _LEAST_TEMPERATURE), dim=-1).sort(
        descending=True, stable=True
    )
    if choice.top_p < 1:
        # A token stays as long as those before it do not sum up to the share: the first one always, which the
        # smallest shares are below where they are rounded to fp32.
        sorted_V[1:] = sorted_V[1:].where((sorted_V.cumsum(-1) - sorted_V)[1:] < choice.top_p, 0.0)
    return int(token_V[torch.multinomial(sorted_V, 1, generator=generator)])
