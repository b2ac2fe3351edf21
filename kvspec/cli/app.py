"""Collect the commands in one typer application."""

from __future__ import annotations

import typer

import kvspec
from kvspec.cli.calibrate import calibrate
from kvspec.cli.check import check
from kvspec.cli.plan import plan
from kvspec.cli.prove import prove
from kvspec.cli.store import store
from kvspec.cli.transfer import transfer
from kvspec.cli.vectors import vectors
from kvspec.cli.verify import verify
from kvspec.cli.view import view

app = typer.Typer(
    help="Plan, check and move KV cache transfers between two LLM serving engines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (check, verify, plan, transfer, calibrate, prove, vectors, view):
    app.command()(command)
app.add_typer(store, name="store")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"kvspec {kvspec.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Plan, check and move transfers of KV caches."""
    del version  # Its callback has handled it.
