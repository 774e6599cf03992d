"""S3 on this machine: moto's server in a thread, used over HTTP, which fails on demand.

`Server.fail` sets the faults from then on:

    none            no faults
    every/10        every tenth request: in turns an answer 503 and a broken connection
    after/N/WORD    all requests, after N answered requests that write a name with WORD in it
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

HOST = "127.0.0.1"
NEEDED = {"moto": "moto", "flask": "flask", "flask_cors": "flask-cors", "s3fs": "s3fs"}
"""Module -> package of the server and its client."""
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "2",  # botocore waits up to a second between attempts
    "NO_PROXY": HOST,
    "no_proxy": HOST,
}


class Server:
    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self.url = ""
        self.fail("none")

    def fail(self, faults: str) -> None:
        """Set the faults; see the module's docstring."""
        self._kind, *self._rest = faults.split("/")
        self._requests, self._writes = itertools.count(1), itertools.count(1)
        self._is_dead = False

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if self._fails(environ["PATH_INFO"], environ["REQUEST_METHOD"]):
            if self._kind != "every" or next(self._writes) % 2:
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start("503 Service Unavailable", [("Content-Length", "0")])
            return []
        return self._app(environ, start)

    def _fails(self, path: str, method: str) -> bool:
        if self._kind == "every":
            return next(self._requests) % int(self._rest[0]) == 0
        if self._kind == "after" and not self._is_dead:
            after, word = int(self._rest[0]), self._rest[1]
            self._is_dead = method in ("PUT", "POST") and word in path and next(self._writes) > after
        return self._is_dead


@contextmanager
def running() -> Iterator[Server]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = Server(DomainDispatcherApplication(create_backend_app))
    listening = make_server(HOST, 0, server, threaded=True)
    server.url = f"http://{HOST}:{listening.port}"
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        listening.shutdown()
