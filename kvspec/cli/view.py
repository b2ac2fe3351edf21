"""Implement `kvspec view`: a page on this computer that shows who reads what."""

from __future__ import annotations

import socket
import webbrowser

import typer

from kvspec.cli import printing
from kvspec.errors import SpecError


def view(
    port: int = typer.Option(8765, min=0, max=65535, help="Port of the page. 0 takes a free one."),
    browser: bool = typer.Option(True, help="Open the page in a browser."),
) -> None:
    """Show in a browser who reads what, for engines that you choose.

    The server runs on this computer only. It ends with Ctrl-C.
    """
    with printing.reported_errors(), socket.socket() as listening:
        try:
            import uvicorn  # noqa: PLC0415 - only this command needs it, and a server

            from kvspec.cli.view_server import HOSTS, page_app  # noqa: PLC0415 - see the line above
        except ModuleNotFoundError as error:
            rule = "is not installed: run pip install 'kvspec[view]'"
            raise SpecError("view", error.name, rule=rule) from None
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOSTS[0], port))
        except OSError as error:
            raise SpecError("port", port, rule=f"cannot be used: {error.strerror}") from None
        # The queue of the socket accepts the browser before the server runs.
        listening.listen()
        address = f"http://{HOSTS[0]}:{listening.getsockname()[1]}/"
        typer.echo(f"{address} (Ctrl-C ends it)")
        if browser:
            webbrowser.open(address)
        config = uvicorn.Config(page_app, log_level="warning", timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listening])
