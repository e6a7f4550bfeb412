"""The local page of ``moefold plan --serve``: one process accepts, and one answers each request.

The first process imports everything, stays single-threaded and never computes. It forks a process
for each request, which ends when its browser goes away: a page that asks anew aborts what it asked
before, and so ends the search. Only this machine reaches it, and only with the secret that is part
of its address; requests whose ``Host`` is another name (DNS rebinding), or whose ``Origin`` is
another page, are refused.
"""

import json
import os
import re
import secrets
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ForkingMixIn
from typing import Any

from moefold.planner.page import page_data, render_form
from moefold.planner.plan import search_steps
from moefold.planner.serve.form import RefusedQuestion, ask, form_json

LOOPBACK = "127.0.0.1"
LOCAL_NAME = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)
"""Names of this machine that a browser may have asked for; the port may be that of a tunnel."""
MAX_BODY = 1 << 16
READ_SECONDS = 20
"""Time within which a request must arrive."""
SEARCH_SECONDS = 600
"""Time after which an answer is given up."""
MAX_ANSWERS = 8
"""Requests that are answered at a time; further ones wait."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def answers(values: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the answers to the texts of a form: what needs no search, then more of each search, and
    at the end ``state: done``; or once ``state: refused`` with what is wrong.
    """
    try:
        question = ask(values)
    except RefusedQuestion as refused:
        yield {"state": "refused", "complaints": [vars(one) for one in refused.complaints]}
        return
    common = {"command": question.command, "complaints": [vars(one) for one in question.notes]}
    yield {"state": "searching", "plan": page_data(question.plan, question.tokens), **common}
    for plan in search_steps(question.plan):
        state = "done" if plan.complete else "searching"
        yield {"state": state, "plan": page_data(plan, question.tokens), **common}


class PlanServer(ForkingMixIn, HTTPServer):
    """Serves the page at a free port, or at a given one, of this machine."""

    max_children = MAX_ANSWERS
    block_on_close = False
    # Others cannot listen at the same address.
    allow_reuse_port = False

    def __init__(self, values: Mapping[str, str], port: int = 0) -> None:
        """Listen.

        Args:
            values: texts with which the page's fields begin.
            port: port; 0 is any free one.

        Raises:
            OSError: the port is not free.
        """
        self.secret = secrets.token_urlsafe(16)
        # Here, so that the processes that answer begin with what this loads and computes.
        next(answers(values))
        self.page = render_form(form_json(values)).encode()
        super().__init__((LOOPBACK, port), Handler)

    @property
    def url(self) -> str:
        """The page's address, with its secret."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/{self.secret}/"

    def server_bind(self) -> None:
        """Bind, without asking a name server for this machine's name."""
        super(HTTPServer, self).server_bind()
        self.server_name = LOOPBACK
        self.server_port = self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a bug's traceback; browsers that went away are no bugs."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            traceback.print_exc()

    def close(self) -> None:
        """Stop listening, and end the processes that still answer."""
        self.server_close()
        for process in self.active_children or ():
            os.kill(process, 15)


class Handler(BaseHTTPRequestHandler):
    """Answers one request, in a process of its own."""

    server: PlanServer
    timeout = READ_SECONDS
    server_version = "moefold"
    sys_version = ""

    def do_GET(self) -> None:
        """Send the page."""
        if self._accepted() and self._is_at(""):
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Send answers to the form's texts, one JSON object in each line, as they are found."""
        if not self._accepted() or not self._is_at("answer") or not self._is_own_page():
            return
        body = self._body()
        if body is None:
            return
        self.send_response(HTTPStatus.OK)
        self._headers("application/x-ndjson")
        self._end_with_browser()
        try:
            for answer in answers(body):
                self._line(answer)
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}"
            self._line(
                {"state": "failed", "message": f"a bug, with its traceback on stderr: {said}"}
            )

    # ------------------------------------------------------------------------- what is refused

    def _accepted(self) -> bool:
        """Refuse names other than this machine's: such a page was led here by a name server."""
        if LOCAL_NAME.fullmatch(self.headers.get("Host", "")):
            return True
        self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this page is at http://127.0.0.1 alone")
        return False

    def _is_at(self, name: str) -> bool:
        """Refuse addresses without the secret."""
        if secrets.compare_digest(self.path.encode(), f"/{self.server.secret}/{name}".encode()):
            return True
        text = "no such page: take the address that moefold plan --serve has printed"
        self._refuse(HTTPStatus.NOT_FOUND, text)
        return False

    def _is_own_page(self) -> bool:
        """Refuse what another page sends; a browser names the page in each POST."""
        origin = self.headers.get("Origin")
        site = self.headers.get("Sec-Fetch-Site", "same-origin")
        own = f"http://{self.headers['Host']}".lower()
        is_json = self.headers.get_content_type() == "application/json"
        if site == "same-origin" and is_json and (origin is None or origin.lower() == own):
            return True
        self._refuse(HTTPStatus.FORBIDDEN, "only this page asks, with application/json")
        return False

    def _body(self) -> dict[str, Any] | None:
        """Return the form's texts; None if the request was refused."""
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,9}", length):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
            return None
        if int(length) > MAX_BODY:
            text = f"at most {MAX_BODY:,} bytes"
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
            return None
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            body = None
        if isinstance(body, dict):
            return body
        self._refuse(HTTPStatus.BAD_REQUEST, "the body is not a JSON object")
        return None

    # ------------------------------------------------------------------------- what is sent

    def _line(self, answer: Mapping[str, Any]) -> None:
        self.wfile.write(json.dumps(answer, allow_nan=False).encode() + b"\n")

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._send(status, f"{text}\n".encode(), "text/plain; charset=utf-8")

    def _send(self, status: HTTPStatus, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self._headers(kind)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _headers(self, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal is the user's."""

    def _end_with_browser(self) -> None:
        """End this process as soon as the browser closes the connection, or after too long."""
        connection = self.connection
        connection.settimeout(SEARCH_SECONDS)

        def watch() -> None:
            try:
                # The request is read: what comes next is the end.
                while connection.recv(1024):
                    pass
            except OSError:
                pass
            os._exit(0)

        threading.Thread(target=watch, daemon=True).start()
