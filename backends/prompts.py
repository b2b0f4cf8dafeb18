"""Built-in prompts of several kinds, and long real text that ships with every CPython (the language reference)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from backends.models import LoadedModel
from entropic_ctl.errors import BadInputError

__all__ = ["KINDS", "PROMPTS", "Prompt", "document", "document_ids", "read_prompts"]


@dataclass(frozen=True)
class Prompt:
    """A prompt: its kind, its text, and whether it is a chat turn (else the model continues the text)."""

    kind: str
    text: str
    chat: bool = True


def read_prompts(path: str | Path) -> tuple[Prompt, ...]:
    """Read prompts from a UTF-8 file: JSON Lines (``.jsonl``), or one chat prompt per line; blank lines are left out.

    A JSON line is an object with ``text`` and, optionally, ``kind`` (a word to group by) and ``chat`` (false continues
    the text as it stands).

    Raises
    ------
    BadInputError
        If the file cannot be read, holds no prompt, or a line is no such object.
    """
    where = str(path)
    try:
        lines = Path(path).read_bytes().decode("utf-8-sig").splitlines()
    except OSError as error:
        raise BadInputError(f"cannot read prompts: {error.strerror}", where=where) from None
    except UnicodeDecodeError as error:
        raise BadInputError(f"not UTF-8 at byte {error.start}", where=where) from None
    found = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise BadInputError("no prompts", where=where, allowed="one per line")
    if Path(path).suffix != ".jsonl":
        return tuple(Prompt("own", line) for _, line in found)
    return tuple(_prompt(line, where, number) for number, line in found)


def _prompt(line: str, where: str, number: int) -> Prompt:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not {"text"} <= values.keys() <= {"text", "kind", "chat"}:
        raise BadInputError(
            "not a prompt", where=where, line=number, value=line, allowed='{"text": ..., "kind": ..., "chat": ...}'
        )
    kinds = {"text": str, "kind": str, "chat": bool}
    for field, value in values.items():
        if not isinstance(value, kinds[field]) or value == "":
            raise BadInputError("bad value", where=where, line=number, field=field, value=value)
    return Prompt(values.get("kind", "own"), values["text"], chat=values.get("chat", True))


def document() -> str:
    """Return the topics of the language reference, in alphabetical order, as one text (about 200,000 tokens)."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def document_ids(model: LoadedModel, n_tokens: int, *, start: int = 0) -> list[int]:
    """Return ``n_tokens`` tokens of :func:`document`, from token ``start`` of the part that begins at that place.

    Raises
    ------
    BadInputError
        If the text is not that long.
    """
    wanted = start + n_tokens
    ids = model.prompt_ids(document()[: 12 * wanted + 100], chat=False)  # a token has far less than 12 characters
    if len(ids) < wanted:
        raise BadInputError("the document is not that long", field="n_tokens", value=wanted, allowed=f"<= {len(ids)}")
    return ids[start:wanted]


def _part(topic: str, characters: int) -> str:
    from pydoc_data.topics import topics

    return str(topics[topic])[:characters]


PROMPTS = (
    Prompt("question", "What causes the seasons on Earth?"),
    Prompt("question", "Explain to a child why the sky is blue."),
    Prompt("story", "Write a short story about a lighthouse keeper who finds a message in a bottle."),
    Prompt("story", "Once upon a time, in a village at the edge of a dark forest, there lived", chat=False),
    Prompt("code", "Write a Python function that returns the n-th Fibonacci number."),
    Prompt("code", "def is_prime(n: int) -> bool:\n", chat=False),
    Prompt("list", "List the planets of the solar system in order, one per line."),
    Prompt("list", "Give me ten ideas for a healthy breakfast."),
    Prompt("arithmetic", "What is 17 + 25? Show your work."),
    Prompt("arithmetic", "A train travels 60 km in 45 minutes. What is its average speed in km per hour?"),
    Prompt("document", _part("assignment", 1200), chat=False),
    Prompt("document", _part("exceptions", 1200), chat=False),
)
KINDS = tuple(dict.fromkeys(prompt.kind for prompt in PROMPTS))
