"""Server that answers like the Hugging Face hub, as far as huggingface_hub needs it to load and push.

It accepts every token.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from hub_cache import REVISION

Repositories = Mapping[str, Mapping[str, bytes]]
"""Address of a repository such as "models/org/name" -> file name -> content."""


class FakeHub(ThreadingHTTPServer):
    """Serves repositories with one revision each; `sent` lists the files whose content was sent."""

    def __init__(self, repositories: Repositories) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = {name: dict(files) for name, files in repositories.items()}
        self.sent: list[str] = []
        self.visible: dict[str, str] = {}
        """Address of a created repository -> "private" or "public"."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub

    def do_HEAD(self) -> None:
        self._answer(send_content=False)

    def do_GET(self) -> None:
        self._answer(send_content=True)

    def do_POST(self) -> None:
        path, content = self.path.strip("/"), self.rfile.read(int(self.headers["Content-Length"]))
        repo = "/".join(path.split("/")[1:4])
        if path == "api/repos/create":
            told = json.loads(content)
            repo = f"models/{told['organization']}/{told['name']}"
            if repo in self.server.repositories:
                return self._reply(409, b"{}", {})
            self.server.repositories[repo], self.server.visible[repo] = {}, told["visibility"]
            answer: object = {"url": f"{self.server.url}/{repo}"}
        elif "/preupload/" in path:
            files = json.loads(content)["files"]
            answer = {"files": [{**each, "uploadMode": "regular", "shouldIgnore": False} for each in files]}
        else:
            for operation in map(json.loads, content.splitlines()):
                key, value = operation["key"], operation["value"]
                if key == "file":
                    self.server.repositories[repo][value["path"]] = base64.b64decode(value["content"])
                elif key == "deletedFile":
                    del self.server.repositories[repo][value["path"]]
            page = f"{self.server.url}/{repo.removeprefix('models/')}"
            answer = {"commitUrl": f"{page}/commit/{REVISION}", "commitOid": REVISION}
        self._reply(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _answer(self, *, send_content: bool) -> None:
        path = self.path.split("?")[0].strip("/")
        if path.startswith("api/"):
            return self._answer_api(path.removeprefix("api/"))
        repo, _, name = path.partition(f"/resolve/{REVISION}/")
        repo = repo if repo.startswith("datasets/") else f"models/{repo}"
        content = self.server.repositories.get(repo, {}).get(name)
        if content is None:
            return self._reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        if send_content:
            self.server.sent.append(name)
        self._reply(200, content, {"X-Repo-Commit": REVISION, "ETag": f'"{_digest(content)}"'}, send_content)

    def _answer_api(self, path: str) -> None:
        if path == "whoami-v2":
            known = "Authorization" in self.headers
            return self._reply(200 if known else 401, b'{"name": "me", "orgs": []}', {})
        repo = "/".join(path.split("/")[:3])
        files = self.server.repositories.get(repo)
        if files is None:
            return self._reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if "/tree/" in path:
            answer: object = [
                {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
                for name, content in files.items()
            ]
        else:
            answer = {"id": repo.partition("/")[2], "sha": REVISION, "siblings": []}
        self._reply(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _reply(self, status: int, content: bytes, headers: dict[str, str], send_content: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if send_content and self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the tests read `sent`."""


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()  # git's hash, used for small files


@contextmanager
def serving(repositories: Repositories) -> Iterator[FakeHub]:
    hub = FakeHub(repositories)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()
