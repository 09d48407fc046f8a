"""The page in Debian's Chromium, as a person sees it. Errors behind the page are recorded for the test."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Response, sync_playwright

DESK = (1360, 900)
PHONE = (390, 844)
PARTS = ("map", "path", "queues", "subscriptions", "knowledge", "pipeline")


@contextmanager
def open_browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    assert chromium is not None, "please install chromium (Debian: apt-get install chromium)"
    # Chromium's sandbox does not work for root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


class OpenPage:
    """A context manager that opens a new tab. At its end it checks that no error happened except those in `expected`:
    console errors, exceptions, violations of the policy, and answers of 400 or more."""

    def __init__(self, browser: Browser, http: str, *, size: tuple[int, int] = DESK, theme: str = "light") -> None:
        self._browser = browser
        self._http = http
        self._size = size
        self._theme = theme
        self._context: BrowserContext | None = None
        self.faults: list[str] = []
        # "401 /v1/layers"
        self.expected: set[str] = set()

    def __enter__(self) -> OpenPage:
        self._context = self._browser.new_context(
            viewport={"width": self._size[0], "height": self._size[1]},
            color_scheme="dark" if self._theme == "dark" else "light",
        )
        self.page: Page = self._context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("response", self._on_response)
        self.page.goto(self._http)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._context is not None
        self._context.close()
        if kind is None:
            unexpected = [fault for fault in self.faults if fault not in self.expected]
            assert not unexpected, unexpected

    def go_to(self, part: str) -> None:
        self.page.get_by_role("navigation").get_by_role("link", name=part.capitalize(), exact=True).click()
        self.page.locator(f"#part-{part}").wait_for(state="visible")

    def _on_console(self, message: ConsoleMessage) -> None:
        # `_on_response` records failed answers in more detail.
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def _on_response(self, response: Response) -> None:
        if response.status >= 400:
            self.faults.append(f"{response.status} {urlsplit(response.url).path}")
