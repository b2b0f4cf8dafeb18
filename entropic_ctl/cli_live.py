"""What a person sees while something runs: progress on standard error, and the live view of a generation."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from entropic_ctl.cli_console import console
from entropic_ctl.collectors import Collector
from entropic_ctl.signals import Finish, StepPlan, StepResult

__all__ = ["GenerationView", "progress", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
_EVERY_S = 2.0


def sparkline(values: Sequence[float], width: int, top: float | None = None) -> str:
    """Return the last ``width`` values as block characters from 0 to ``top`` (their own maximum by default)."""
    shown = [v for v in values if np.isfinite(v)][-width:]
    if not shown:
        return ""
    ceiling = top if top is not None else max(shown)
    if ceiling <= 0:
        return _BARS[0] * len(shown)
    steps = np.clip(np.asarray(shown) / ceiling * (len(_BARS) - 1), 0, len(_BARS) - 1)
    return "".join(_BARS[round(s)] for s in steps.tolist())


@contextmanager
def progress(title: str, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str, float], None]]:
    """Yield ``report(what, share)``; on a terminal a bar, otherwise a line every two seconds, on standard error."""
    screen = console(stderr=True, soft_wrap=True)
    if not screen.is_terminal:
        last = [clock()]

        def line(what: str, share: float) -> None:
            if clock() - last[0] >= _EVERY_S:
                last[0] = clock()
                screen.print(f"[{100 * share:3.0f}%] {what}")

        yield line
        return
    layout = (
        TextColumn("{task.fields[title]}"),
        BarColumn(bar_width=28),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*layout, console=screen, transient=True) as bar:
        task = bar.add_task("", total=1.0, title=title)

        def report(what: str, share: float) -> None:
            bar.update(task, completed=min(1.0, max(0.0, share)), description=what)

        yield report


class GenerationView(Collector):
    """The live view of one request: text, entropy, temperature, budget, pages read.

    A collector like :class:`entropic_ctl.metrics.Metrics` (the engine feeds it) that draws itself on a terminal.
    """

    def __init__(self, console: Console, history: int = 512) -> None:
        self._console = console
        self._text = ""
        self._entropy: deque[float] = deque(maxlen=history)
        self._tempered: deque[float] = deque(maxlen=history)
        self._temperature: deque[float] = deque(maxlen=history)
        self._now = {"theta": 0.0, "kept": 1.0, "context": 0}
        self.tokens = 0
        self._live: Live | None = None

    @contextmanager
    def showing(self) -> Iterator[GenerationView]:
        """Draw while the block runs."""
        with Live(self._render(), console=self._console, refresh_per_second=8, transient=True) as live:
            self._live = live
            yield self
        self._live = None

    def add_text(self, text: str) -> None:
        """Append text that became certain."""
        self._text += text

    def step(self, plan: StepPlan, result: StepResult, finished: tuple[Finish, ...]) -> None:  # noqa: ARG002
        """Take in one iteration and redraw."""
        if plan.n_rows:
            self._now = {
                "theta": float(plan.theta_nats[0]),
                "kept": float(result.kept_fraction[0]) if result.kept_fraction.size else 1.0,
                "context": int(plan.context[0] + plan.n_tokens[0]),
            }
        self._entropy.extend(result.model_entropy.tolist())
        self._tempered.extend(result.tempered_entropy.tolist())
        self._temperature.extend(result.temperature.tolist())
        self.tokens += int(result.tokens.shape[0])
        if self._live is not None:
            self._live.update(self._render())

    def _render(self) -> RenderableType:
        width = max(20, min(100, self._console.width - 24))
        rows = max(4, self._console.height - 9)
        body = Text("\n".join(self._text.splitlines()[-rows:]) or "...")
        top = max([*self._entropy, 1e-9])

        def track(name: str, values: deque[float], unit: str, ceiling: float | None = None) -> Text:
            last = f"{values[-1]:6.3f} {unit}" if values else ""
            return Text.assemble((f"{name:<10}", "bold"), (sparkline(list(values), width, ceiling), "cyan"), f" {last}")

        status = (
            f"token {self.tokens}   context {self._now['context']}   θ {self._now['theta']:.3g} nats   "
            f"pages read {100 * self._now['kept']:.0f}%"
        )
        return Group(
            Panel(body, title="text", title_align="left", border_style="dim"),
            track("H model", self._entropy, "nats", top),
            track("H(T)", self._tempered, "nats", top),
            track("T", self._temperature, ""),
            Text(status, style="dim"),
        )
