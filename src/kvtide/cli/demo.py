"""``kvtide demo``: see a prompt loaded from the pool instead of recomputed."""

from __future__ import annotations

import sys
import time

import click
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from kvtide.engines.vllm.demo import DemoReport, run_demo, table_rows


class _Progress:
    """Says what goes on, on stderr: one line each, on a terminal with a spinner on the last."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: Status | None = None
        self._line = ""
        self._start = time.monotonic()

    def __call__(self, text: str) -> None:
        line = f"[{time.monotonic() - self._start:4.0f} s] {text}"
        if not self._console.is_terminal:
            click.echo(line, err=True)
            return
        self.close()
        self._line = line
        self._status = self._console.status(escape(text))
        self._status.start()

    def close(self) -> None:
        """Replace the spinner by a line that stays: it may say where the logs are."""
        if self._status is not None:
            self._status.stop()
            self._status = None
            click.echo(self._line, err=True)


@click.command("demo")
@click.option(
    "--model",
    metavar="PATH",
    show_default="a small one with random weights, made on first use",
    help="A model's folder.",
)
@click.option(
    "--store",
    metavar="URL",
    show_default="a fresh local:// pool, removed afterwards",
    help="The pool.",
)
@click.option(
    "--prompt-tokens",
    metavar="N",
    type=click.IntRange(min=64),
    default=2048,
    show_default=True,
    help="Length of the prompt.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(*, model: str | None, store: str | None, prompt_tokens: int, as_json: bool) -> None:
    """Run one prompt through three vLLM engines, one after another.

    The first fills a pool, the second loads from it, the third runs without kvtide. Exits
    with 1 if their tokens differ or nothing was loaded. Takes about two minutes.
    """
    progress = _Progress()
    try:
        report = run_demo(model=model, store=store, prompt_tokens=prompt_tokens, progress=progress)
    finally:
        progress.close()
    click.echo(report.to_json()) if as_json else _print_table(report)
    for fault in report.faults():
        click.echo(f"error: {fault}", err=True)
    if report.faults():
        sys.exit(1)


def _print_table(report: DemoReport) -> None:
    table = Table(title="kvtide demo", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in table_rows(report):
        table.add_row(name, value)
    # A width that the longest row fits, so that a narrow or absent terminal cuts nothing off.
    Console(width=84, highlight=False).print(table)
    for note in report.notes():
        click.echo(note)
