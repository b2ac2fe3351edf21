"""Implement `kvspec view`: a page on this computer that shows who reads what."""

from __future__ import annotations

import socket
import sys
import webbrowser

import typer

from kvspec.cli import printing


def view(
    port: int = typer.Option(8765, min=0, max=65535, help="Port of the page. 0 takes a free one."),
    browser: bool = typer.Option(True, help="Open the page in a browser."),
) -> None:
    """Show in a browser who reads what, for engines that you choose.

    The server runs on this computer only. It ends with Ctrl-C.
    """
    try:
        import uvicorn  # noqa: PLC0415 - only this command needs it, and a server

        from kvspec.cli.view_server import HOSTS, app  # noqa: PLC0415 - see the line above
    except ModuleNotFoundError as error:
        sys.stderr.write(f"kvspec: {error.name} is not installed: pip install 'kvspec[view]'\n")
        raise typer.Exit(printing.REFUSED) from None

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOSTS[0], port))
        except OSError as error:
            sys.stderr.write(f"kvspec: port={port}: cannot be used: {error.strerror}\n")
            raise typer.Exit(printing.REFUSED) from None
        # The queue of the socket accepts the browser before the server runs.
        listening.listen()
        address = f"http://{HOSTS[0]}:{listening.getsockname()[1]}/"
        typer.echo(f"{address} (Ctrl-C ends it)")
        if browser:
            webbrowser.open(address)
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listening])
