"""Prompts of four kinds of text that differ in how much of the answer stands in the prompt already."""

from __future__ import annotations

from backends.prompts import Prompt

__all__ = ["TEXT_KINDS"]

_NOTICE = (
    "The community library on Mill Street will close for repairs from the third of May to the twentieth of June. "
    "Books may be returned at the town hall. The reading group meets in the school canteen during that time."
)
_TABLE = "id,name,city\n1,Anna Berg,Oslo\n2,Ravi Patel,Pune\n3,Lena Fuchs,Graz\n4,Tomas Silva,Porto\n"
_CODE = (
    "def total_price(items):\n    total = 0\n    for item in items:\n        if item.price > 0:\n"
    "            total += item.price * item.count\n    return total\n"
)

TEXT_KINDS: dict[str, tuple[Prompt, ...]] = {
    "code": (
        Prompt("code", "Write a Python class for a stack with push, pop and peek."),
        Prompt("code", "import csv\n\n\ndef read_rows(path: str) -> list[dict[str, str]]:\n", chat=False),
        Prompt("code", "Write a JavaScript function that checks whether a string is a palindrome."),
    ),
    "prose": (
        Prompt("prose", "Write about a walk along the coast on a windy day in autumn."),
        Prompt("prose", "The old clock in the hall had not struck for eleven years, until one night", chat=False),
        Prompt("prose", "Describe a market in a small town early in the morning."),
    ),
    "chat": (
        Prompt("chat", "How do I keep basil alive indoors during winter?"),
        Prompt("chat", "My neighbour plays loud music at night. What could I say to him?"),
        Prompt("chat", "What is the difference between a virus and a bacterium?"),
    ),
    "extractive": (
        Prompt("extractive", f"Repeat the following notice word for word.\n\n{_NOTICE}"),
        Prompt("extractive", f"Copy this table exactly, then copy it once more.\n\n{_TABLE}"),
        Prompt("extractive", f"Return this function unchanged, but rename total to amount.\n\n{_CODE}"),
    ),
}
"""By kind; in ``extractive`` ones most of the answer is in the prompt."""
