"""A real browser, without a window, and pages of `energon view` served to it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from energon.cli.view import listen
from tests.servers.process import find_program, lack


@contextlib.contextmanager
def chromium() -> Iterator:
    """Run the browser; without it, the test is skipped, see `lack`."""
    program = find_program("chromium")
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError:
        lack("Playwright")
    switches = ["background-networking", "component-update", "sync", "gpu"]
    arguments = [f"--disable-{name}" for name in switches] + ["--no-first-run"]
    if os.geteuid() == 0:
        arguments.append("--no-sandbox")  # which root cannot have
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=program, args=arguments)
        except Error as exc:  # a library is missing, or its sandbox is not allowed here
            lack("Chromium", str(exc))
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def served(app) -> Iterator[str]:
    """Serve an application in a thread; yields the address of its first page."""
    import uvicorn

    settings = uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(settings)
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
