"""How alike two texts are: ROUGE-L, BLEU, exact match, first difference.

ROUGE-L (Lin, 2004) is the F measure of the longest common subsequence, by the package ``rouge-score``; BLEU (Papineni
et al., 2002) by ``sacrebleu`` with its ``13a`` tokens. ROUGE's own tokens keep Latin letters and digits only; here
every word of every script and every other visible character counts, in lower case.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from entropic_ctl.errors import BadInputError
from entropic_ctl.signals import FloatArray, IntArray

__all__ = ["corpus_bleu", "first_difference", "require_metrics", "rouge_l", "sentence_bleu"]


def require_metrics() -> None:
    """Import the two packages that judge texts.

    Raises
    ------
    BadInputError
        Naming what is absent and the extra that brings it.
    """
    try:
        for name in ("rouge_score.rouge_scorer", "sacrebleu.metrics"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BadInputError(
            f"comparing texts needs the package {(error.name or '').split('.')[0]!r}, which is not installed",
            where="entropic eval",
            remedy="pip install 'entropic-ctl[eval]'",
        ) from None


class _Words:
    """Tokens for ROUGE: words of any script, and single other characters."""

    def tokenize(self, text: str) -> list[str]:
        """Return the tokens of a text."""
        return re.findall(r"\w+|[^\w\s]", text.lower())


def rouge_l(text: str, reference: str) -> float:
    """Return the ROUGE-L F measure in [0, 1]; 1 for two texts without any token."""
    from rouge_score.rouge_scorer import RougeScorer

    tokens = _Words()
    if not tokens.tokenize(text) and not tokens.tokenize(reference):
        return 1.0
    return float(RougeScorer(["rougeL"], tokenizer=tokens).score(reference, text)["rougeL"].fmeasure)


def _bleu(**options: Any) -> Any:
    from sacrebleu.metrics import BLEU

    return BLEU(tokenize="13a", **options)


def sentence_bleu(text: str, reference: str) -> float:
    """Return BLEU of one text in [0, 100], of the n-gram orders it has; 100 for two blank texts."""
    if not text.strip() and not reference.strip():
        return 100.0
    return float(_bleu(effective_order=True).sentence_score(text, [reference]).score)


def corpus_bleu(texts: Sequence[str], references: Sequence[str]) -> Callable[[IntArray], FloatArray]:
    """Return a function from the indices (..., n) of some texts to their BLEU (...) as one corpus, in [0, 100].

    Counts are taken once per text, so that a bootstrap costs sums only. Orders that no text of the corpus has are left
    out; blank pairs are equal and add nothing.

    Parameters
    ----------
    texts, references : sequence of str
        Equally many.
    """
    metric = _bleu(effective_order=True)
    parts = [metric.corpus_score([a], [[b]]) for a, b in zip(texts, references, strict=True)]
    table = np.array([[part.sys_len, part.ref_len, *part.counts, *part.totals] for part in parts], np.int64)
    orders = len(parts[0].counts)

    def one(sums: list[int]) -> float:
        if not any(sums[:2]):
            return 100.0
        correct, total = sums[2 : 2 + orders], sums[2 + orders :]
        options = {"smooth_method": metric.smooth_method, "effective_order": True}
        return float(metric.compute_bleu(correct, total, sums[0], sums[1], **options).score)

    def score(index: IntArray) -> FloatArray:
        sums = table[index].sum(axis=-2)
        return np.array([one(row) for row in sums.reshape(-1, sums.shape[-1]).tolist()]).reshape(sums.shape[:-1])

    return score


def first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the first index at which two token lists differ (the shorter one's length if it begins the other), or -1.

    Parameters
    ----------
    a, b : sequence of int
    """
    for at, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return at
    return -1 if len(a) == len(b) else min(len(a), len(b))
