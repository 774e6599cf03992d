"""An S3 on this machine: moto's server in a process of its own, which fails as a test asks.

`python s3_server.py PORT` runs it. A request whose path begins with /_faults/ sets what fails from then on:

    none                nothing
    every/3             every third request: by turns an answer 503 and a connection that breaks
    after/N/WORD        all requests, once N of those that write a name with WORD in it have been answered
    kill/N/WORD/PID     the process is killed (-9) instead of the next answer to such a request
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

HOST = "127.0.0.1"
START_S = 60
NEEDED = {"moto": "moto", "flask": "flask", "flask_cors": "flask-cors", "s3fs": "s3fs"}
"""What it imports, and what asks it: modules and their packages."""
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_MAX_ATTEMPTS": "1",  # of botocore, which waits a second before another one
    "NO_PROXY": HOST,
    "no_proxy": HOST,
}


class Server:
    """A running server, as tests see it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://{HOST}:{port}"

    def fail(self, faults: str) -> None:
        """Let requests fail; see above."""
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"{self.url}/_faults/{faults}"
        ):
            pass


class _Faults:
    """The server's application, with faults in front of it."""

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self._app = app
        self._set("none")

    def _set(self, faults: str) -> None:
        kind, _, rest = faults.partition("/")
        self._kind, self._rest = kind, rest.split("/")
        self._requests, self._writes = itertools.count(1), itertools.count(1)
        self._is_dead = False

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith("/_faults/"):
            self._set(path.removeprefix("/_faults/"))
            start("200 OK", [])
            return []
        if self._fails(path, environ["REQUEST_METHOD"]):
            if self._kind != "every" or next(self._writes) % 2:
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            start("503 Service Unavailable", [("Content-Length", "0")])
            return []
        return self._app(environ, start)

    def _fails(self, path: str, method: str) -> bool:
        if self._kind == "every":
            return next(self._requests) % int(self._rest[0]) == 0
        if self._kind in ("after", "kill") and not self._is_dead:
            after, word = int(self._rest[0]), self._rest[1]
            self._is_dead = method in ("PUT", "POST") and word in path and next(self._writes) > after
            if self._is_dead and self._kind == "kill":
                os.kill(int(self._rest[2]), signal.SIGKILL)
        return self._is_dead


def serve(port: int) -> None:
    """Run the server until it is killed."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import run_simple

    app = DomainDispatcherApplication(create_backend_app)
    run_simple(HOST, port, _Faults(app), threaded=True)


@contextmanager
def running() -> Iterator[Server]:
    """A server that answers, for as long as the context is open."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, __file__, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None and time.monotonic() < deadline, "moto does not start"
            try:
                socket.create_connection((HOST, port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield Server(port)
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
