"""``kvtide pool``: a Mooncake pool on this machine, for development and tests."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table

from kvtide.stores.mooncake_pool import LocalPool, PoolStatus, log_of
from kvtide.stores.mooncake_programs import PoolSettings
from kvtide.stores.mooncake_state import ProgramState
from kvtide.units import format_size, parse_size

_DEFAULTS = PoolSettings()


def _size(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    try:
        return parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


_FOLDER = click.option(
    "--folder",
    metavar="PATH",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="kvtide/pool in $XDG_CACHE_HOME, or in ~/.cache",
    help="Where the pool's state and logs are; one pool each.",
)


@click.group("pool")
def command() -> None:
    """Run a Mooncake pool on this machine, for development and tests.

    It is a master and a process that owns the pool's memory. Both go on when the terminal is
    closed, until `kvtide pool down`.
    """


@command.command("up")
@click.option(
    "--size",
    "segment_bytes",
    metavar="SIZE",
    callback=_size,
    default=format_size(_DEFAULTS.segment_bytes),
    show_default=True,
    help="Memory of the pool; taken as it is filled.",
)
@click.option(
    "--host",
    metavar="ADDRESS",
    default=_DEFAULTS.host,
    show_default=True,
    help="Address of this machine that the master listens on.",
)
@click.option(
    "--port",
    metavar="PORT",
    type=int,
    default=_DEFAULTS.port,
    show_default=True,
    help="The master's port.",
)
@click.option(
    "--metrics-port",
    metavar="PORT",
    type=int,
    default=_DEFAULTS.metrics_port,
    show_default=True,
    help="Port of the master's metrics, over HTTP.",
)
@click.option(
    "--lease-ms",
    metavar="MS",
    type=int,
    default=_DEFAULTS.lease_ms,
    show_default=True,
    help="How long a key that was asked for or read is kept from being evicted.",
)
@_FOLDER
@click.pass_context
def up(context: click.Context, /, *, folder: Path | None, **settings: Any) -> None:  # noqa: ANN401
    """Start the pool, and print the URL of the store.

    Where it runs already this says so, and exits with 0; with other options than it was started
    with, it exits with 1. Where one of its two processes has died, that one is started again.
    """
    given = {
        name: value
        for name, value in settings.items()
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    pool = _pool(folder)
    start = pool.up(given)
    size = format_size(start.settings.segment_bytes)
    what = f"a pool of {size}, with its logs in {pool.folder}"
    if not start.started:
        click.echo(f"it runs already: {what}", err=True)
    elif len(start.started) == 1:
        click.echo(f"started the {start.started[0]} again: {what}", err=True)
    else:
        click.echo(f"started {what}", err=True)
    if not IPv4Address(start.settings.host).is_loopback:
        click.echo("note: everyone who reaches it can read and write the pool", err=True)
    click.echo(start.settings.url)


@command.command("down")
@_FOLDER
def down(*, folder: Path | None) -> None:
    """End the pool: its memory is freed, its logs stay.

    Exits with 0 also where nothing ran.
    """
    pool = _pool(folder)
    ended = pool.down()
    if ended:
        click.echo(f"ended the {' and the '.join(ended)}")
    else:
        click.echo(f"no pool of {pool.folder} ran")


@command.command("status")
@_FOLDER
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def status(*, folder: Path | None, as_json: bool) -> None:
    """Show the pool's processes, and what the master counts.

    Exits with 0 if the pool can be used, with 1 if it cannot or there is none.
    """
    pool = _pool(folder)
    found = pool.status()
    if found is None:
        faults = [f"there is no pool of {pool.folder}: `kvtide pool up` starts one"]
    else:
        faults = found.faults()
    if as_json:
        click.echo(json.dumps({"faults": faults} | _as_json(found)))
    else:
        if found is not None:
            _print_table(found)
        for fault in faults:
            click.echo(f"error: {fault}", err=True)
    if faults:
        sys.exit(1)


def _pool(folder: Path | None) -> LocalPool:
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "kvtide" / "pool"
    return LocalPool(folder)


def _as_json(status: PoolStatus | None) -> dict[str, Any]:
    if status is None:
        return {"url": None}
    settings = asdict(status.state.settings)
    programs = {
        name: {
            "state": found.value,
            "pid": process.pid if (process := status.state.processes.get(name)) else None,
            "log": str(log_of(status.folder, name)),
        }
        for name, found in status.programs.items()
    }
    metrics = asdict(status.metrics) if status.metrics is not None else None
    url = {"url": status.state.settings.url, "folder": str(status.folder)}
    return url | {"settings": settings} | programs | {"metrics": metrics}


def _print_table(status: PoolStatus) -> None:
    table = Table(title="kvtide pool", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in _rows(status):
        table.add_row(name, value)
    Console(width=max(84, len(str(status.folder)) + 24), highlight=False).print(table)


def _rows(status: PoolStatus) -> list[tuple[str, str]]:
    settings, metrics = status.state.settings, status.metrics
    rows = [("store", settings.url)]
    for name, found in status.programs.items():
        dead = found is ProgramState.DEAD
        pid = "" if dead else f", process {status.state.processes[name].pid}"
        rows.append((name, found.value + pid))
    rows.append(("metrics", f"http://{settings.host}:{settings.metrics_port}/metrics"))
    rows.append(("logs", str(status.folder)))
    if metrics is None:
        return rows
    used = metrics.used_bytes / metrics.capacity_bytes if metrics.capacity_bytes else 0
    hits = f" ({metrics.num_hits / metrics.num_gets:.0%})" if metrics.num_gets else ""
    return [
        *rows,
        ("capacity", format_size(metrics.capacity_bytes)),
        ("used", f"{format_size(metrics.used_bytes)} ({used:.0%})"),
        ("keys", f"{metrics.num_keys:,}"),
        ("keys read, of these found", f"{metrics.num_gets:,}, {metrics.num_hits:,}{hits}"),
        ("keys checked", f"{metrics.num_checks:,}"),
        ("keys written", f"{metrics.num_puts:,}"),
        ("writes without room", f"{metrics.num_refused_puts:,}"),
        ("keys evicted", f"{metrics.num_evicted_keys:,}"),
        ("bytes evicted", format_size(metrics.evicted_bytes)),
        ("clients", f"{metrics.num_clients:,}"),
    ]
