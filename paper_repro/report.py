"""One self-contained HTML file: statement, tables, figures, configuration, certificate, hardware, how to reproduce."""

from __future__ import annotations

import base64
import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Report", "number", "with_interval"]

_STYLE = """
:root{color-scheme:light}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;color:#1b1b1b;background:#fff;
max-width:66rem;margin:2rem auto;padding:0 1.2rem}
h1{font-size:1.6rem;margin-bottom:.2rem} h2{font-size:1.2rem;margin-top:2.2rem;border-bottom:1px solid #ddd}
.sub,.small{color:#555} .sub{margin-top:0} .small{font-size:.88rem} .wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.88rem;margin:.6rem 0;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.3rem 0} th,td{padding:.28rem .6rem;border-bottom:1px solid #e4e4e4}
th{text-align:left;border-bottom:2px solid #999;vertical-align:bottom} td.n,th.n{text-align:right}
figure{margin:1rem 0} img{max-width:100%;height:auto} figcaption{color:#555;font-size:.88rem}
pre{background:#f6f6f6;padding:.7rem;overflow-x:auto;font-size:.82rem}
.worse{background:#fdf1ec;border-left:4px solid #D55E00;padding:.4rem 1rem;margin-bottom:1rem}
.v{white-space:nowrap;font-weight:600} .v.reproduced{color:#00745a} .v.partly{color:#8a6100}
.v.refuted{color:#b34700} .v.not{color:#555}
"""


def number(value: object, digits: int = 3) -> str:
    """Return a number for people: ``digits`` significant ones, thousands kept whole, an en dash for NaN or None."""
    if value is None or (isinstance(value, float | np.floating) and not math.isfinite(float(value))):
        return "–"
    if isinstance(value, bool | np.bool_ | str):
        return str(value)
    if isinstance(value, int | np.integer):
        return f"{int(value):,}"
    x = float(value)  # type: ignore[arg-type]
    if x == 0:
        return "0"
    if 1e-3 <= abs(x) < 1e5:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(x))))
        return f"{x:,.{decimals}f}"
    return f"{x:.{digits - 1}e}"


def with_interval(ratio: float, low: float, high: float) -> str:
    """Return ``ratio [low, high]``, or the ratio alone where there is no interval."""
    if not math.isfinite(ratio):
        return "–"
    if math.isfinite(low) and math.isfinite(high):
        return f"{ratio:.3f} [{low:.3f}, {high:.3f}]"
    return f"{ratio:.3f}"


class Report:
    """Collects sections and writes them as one HTML file without external references.

    Parameters
    ----------
    title, subtitle : str
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._body = [f"<h1>{html.escape(title)}</h1>"]
        if subtitle:
            self._body.append(f'<p class="sub">{html.escape(subtitle)}</p>')

    def heading(self, text: str) -> None:
        """Start a section."""
        self._body.append(f"<h2>{html.escape(text)}</h2>")

    def say(self, text: str, lead: str = "") -> None:
        """Add a paragraph, opened by a word or two in bold if ``lead`` is given."""
        head = f"<strong>{html.escape(lead)}:</strong> " if lead else ""
        self._body.append(f"<p>{head}{html.escape(text)}</p>")

    def worse(self, sentences: Sequence[str]) -> None:
        """Add the plain statement of what got worse."""
        items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
        self._body.append(f'<div class="worse"><strong>What got worse</strong><ul>{items}</ul></div>')

    def points(self, sentences: Sequence[str], title: str = "") -> None:
        """Add a bullet list, under a title in bold if there is one."""
        items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
        head = f"<strong>{html.escape(title)}</strong>" if title else ""
        self._body.append(f"<div>{head}<ul>{items}</ul></div>")

    def small(self, sentences: Sequence[str], title: str) -> None:
        """Add one compact paragraph in small print."""
        text = " ".join(html.escape(sentence) for sentence in sentences)
        self._body.append(f'<p class="small"><strong>{html.escape(title)}.</strong> {text}</p>')

    def table(self, header: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> None:
        """Add a table; numbers are right-aligned, verdict words are coloured."""
        numeric = [
            all(not isinstance(row[i], str) or row[i][:1] in "0123456789–-" for row in rows) for i in range(len(header))
        ]
        out = ['<div class="wide"><table>']
        if caption:
            out.append(f"<caption>{html.escape(caption)}</caption>")
        cells = (
            f"<th{' class=n' if n else ''}>{html.escape(name)}</th>" for name, n in zip(header, numeric, strict=True)
        )
        out.append("<tr>" + "".join(cells) + "</tr>")
        out.extend(
            "<tr>" + "".join(_cell(value, n) for value, n in zip(row, numeric, strict=True)) + "</tr>" for row in rows
        )
        out.append("</table></div>")
        self._body.append("".join(out))

    def figure(self, png: str | os.PathLike[str], caption: str) -> None:
        """Embed a PNG."""
        data = base64.b64encode(Path(png).read_bytes()).decode("ascii")
        text = html.escape(caption)
        self._body.append(
            f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
        )

    def code(self, text: str) -> None:
        """Add preformatted text."""
        self._body.append(f"<pre>{html.escape(text)}</pre>")

    def details(self, summary: str, values: Mapping[str, Any] | str) -> None:
        """Add a folded block of JSON or text."""
        text = values if isinstance(values, str) else json.dumps(values, indent=2, default=str, ensure_ascii=False)
        self._body.append(f"<details><summary>{html.escape(summary)}</summary><pre>{html.escape(text)}</pre></details>")

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write the file (temporary, then rename) and return its path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        page = (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{html.escape(self._title)}</title><style>{_STYLE}</style></head><body>"
            + "\n".join(self._body)
            + "</body></html>\n"
        )
        temporary = path.with_name(path.name + ".part")
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(path)
        return path


def _cell(value: object, numeric: bool) -> str:
    text = number(value) if not isinstance(value, str) else value
    if text in ("reproduced", "partly", "refuted", "not reproduced", "not identifiable"):
        return f'<td><span class="v {text.split()[0]}">{text}</span></td>'
    return f"<td{' class=n' if numeric else ''}>{html.escape(text)}</td>"
