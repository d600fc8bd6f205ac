"""The ``kvtide`` command: thin verbs over the library, one file each."""

from __future__ import annotations

import signal
import sys

import click

from kvtide import __version__
from kvtide.cli import demo, pool
from kvtide.errors import KVTideError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvtide")
def cli() -> None:
    """An incremental KV-cache pool for LLM inference engines."""


cli.add_command(demo.command)
cli.add_command(pool.command)


def main() -> None:
    """Run the command line: errors meant for the user are one message and exit code 1."""
    # What a verb started or made is ended and removed when it is told to stop, as after Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        cli(prog_name="kvtide")
    except KVTideError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
