"""The site of the demo: the admin on a free port of the loopback, with a password for this run only."""

from __future__ import annotations

import re
import secrets
import time
from http.cookiejar import CookieJar
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, ProxyHandler, build_opener

from django.contrib.auth import get_user_model

from testproject.demo.processes import Child, Children, DemoError

USER = "demo"


class Site:
    """A running `manage.py runserver` and its superuser."""

    def __init__(self, children: Children) -> None:
        self.password = secrets.token_urlsafe(9)
        get_user_model()._default_manager.create_superuser(USER, "", self.password)  # type: ignore[attr-defined]
        # Port 0: the system chooses one, and the server says which. With DEBUG it serves the admin's static
        # files, and says what went wrong.
        arguments = ("runserver", "--noreload", "127.0.0.1:0")
        self.child: Child = children.manage(*arguments, name="site", DEBUG="1")

    def address(self, patience: float = 30.0) -> str:
        """Wait for the server and return the admin's address."""
        deadline = time.monotonic() + patience
        while self.child.ended is None and time.monotonic() < deadline:
            if found := re.search(r"http://127\.0\.0\.1:\d+/", self.child.log.read_text(errors="replace")):
                return found[0] + "admin/"
            time.sleep(0.05)
        raise DemoError(
            f"The site did not start. Its log: {self.child.log.read_text(errors='replace')[-2000:]}"
        )

    def shows(self, path: str) -> bool:
        """Log in as a browser would and say whether this page of the admin can be had."""
        opener = build_opener(ProxyHandler({}), HTTPCookieProcessor(CookieJar()))
        login = f"{self.address()}login/"
        try:
            with opener.open(login, timeout=10) as page:
                token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page.read().decode())
            form = {"username": USER, "password": self.password, "csrfmiddlewaretoken": token and token[1]}
            wanted = f"/admin/{path}"
            with opener.open(f"{login}?next={wanted}", urlencode(form).encode(), timeout=10) as page:
                return bool(page.url.endswith(wanted))
        except (URLError, TimeoutError):
            return False
