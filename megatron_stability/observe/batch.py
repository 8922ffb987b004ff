"""How unlike text a batch of tokens is: repeated n-grams and token entropy of its worst row.

A page of one repeated phrase, a run of one token or a table of zeros has many repeated n-grams and few different
tokens; ordinary text of a few thousand tokens has hardly a repeated 8-gram. Both scores are of one row, so they do not
depend on how rows are dealt to ranks and micro-batches.
"""

from __future__ import annotations

import torch

#: Names of what `scores` returns, in its order.
SCORES = ("data/repeated", "data/entropy")
_MULTIPLIER = 6364136223846793005  # of Knuth's MMIX generator: odd, so that the hash mod 2^64 loses nothing


@torch.no_grad()
def scores(tokens_bs: torch.Tensor, ngram: int) -> torch.Tensor:
    """The worst row's scores, on the tokens' device, without a copy to the host.

    Args:
        tokens_bs: [b, s] integer token ids, s >= 2.
        ngram: n; of a shorter row all of it is one n-gram.

    Returns:
        [2] fp64: the largest share of n-grams that stood in the row before, in [0, 1), and the least entropy of a row's
        tokens in nats, in [0, log s].
    """
    tokens_bs = tokens_bs.long()
    n = min(ngram, tokens_bs.shape[1])
    hashes = torch.zeros_like(tokens_bs[:, n - 1 :])
    for at in range(n):  # a polynomial in the token ids, modulo 2^64
        hashes = hashes * _MULTIPLIER + tokens_bs[:, at : at + hashes.shape[1]] + 1
    ordered = hashes.sort(dim=1).values
    repeated_b = (ordered[:, 1:] == ordered[:, :-1]).sum(dim=1).double() / ordered.shape[1]
    return torch.stack([repeated_b.amax(), _entropy(tokens_bs).amin()])


def _entropy(tokens_bs: torch.Tensor) -> torch.Tensor:
    """[b] nats: log s - Σ c·log c / s over the counts c of a row's tokens."""
    ordered = tokens_bs.sort(dim=1).values
    length = ordered.shape[1]
    # Rank k of a token within its run of equals: Σ over the run of log-ratios telescopes to c·log c.
    places = torch.arange(length, device=ordered.device).expand_as(ordered)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    start = torch.where(begins, places, 0).cummax(dim=1).values
    k = (places - start + 1).double()
    terms = k * k.log() - (k - 1) * (k - 1).clamp(min=1).log()
    return torch.log(torch.tensor(float(length), dtype=torch.float64)) - terms.sum(dim=1) / length
