"""A server with the part of S3's protocol that the store of pages uses. It can answer wrongly."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

DATE = "Sat, 28 Nov 2026 12:00:00 GMT"
LISTED = 1000  # Keys of one answer, as in S3.


class Request(NamedTuple):
    """A request. The names of its headers are in lower case."""

    method: str
    key: str
    headers: dict[str, str]
    body: bytes
    query: dict[str, str]


class Answer(NamedTuple):
    """An answer. *length* differs from that of the body if the connection drops."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    length: int | None = None


class S3Server:
    """One bucket, named "b".

    Attributes:
        objects: Its objects by key.
        before: Returns an answer instead of that of the server, or None.
        after: Returns an answer for that of the server.
        conditional: Whether the server knows the condition of a request.
        deletes: Whether objects may be deleted.
        requests: The requests so far.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.conditional = self.deletes = True
        self.requests: list[Request] = []
        self.before: Callable[[Request], Answer | None] = lambda _: None
        self.after: Callable[[Request, Answer], Answer] = lambda _, answer: answer
        self.lock = threading.Lock()
        self.url = ""

    def reset(self) -> None:
        """Begin anew with an empty bucket and right answers."""
        vars(self).update(vars(S3Server()) | {"url": self.url})

    def answer(self, request: Request) -> Answer:
        """Return the answer, right or wrong."""
        self.requests.append(request)
        if (broken := self.before(request)) is not None:
            return broken
        with self.lock:
            return self.after(request, self._answer(request))

    def _answer(self, request: Request) -> Answer:
        if "list-type" in request.query:
            return self._list(request.query)
        if "delete" in request.query or request.method == "DELETE":
            return self._delete(request)
        if request.method == "PUT":
            return self._put(request)
        found = self.objects.get(request.key)
        if found is None:
            return Answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        facts = ("ETag", _tag(found)), ("Last-Modified", DATE)
        if part := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", "")):
            some = found[int(part[1]) : int(part[2]) + 1]
            named = f"bytes {part[1]}-{int(part[1]) + len(some) - 1}/{len(found)}"
            return Answer(206, some, (*facts, ("Content-Range", named)))
        return Answer(200, found, facts)

    def _put(self, request: Request) -> Answer:
        key, condition = request.key, request.headers.get("if-none-match")
        if source := request.headers.get("x-amz-copy-source"):
            self.objects[key] = self.objects[unquote(source).lstrip("/").partition("/")[2]]
            text = f"<CopyObjectResult><ETag>{_tag(self.objects[key])}</ETag></CopyObjectResult>"
            return Answer(200, text.encode())
        if key in self.objects and self.conditional and condition == "*":
            return Answer(412)
        self.objects[key] = request.body
        return Answer(200, headers=(("ETag", _tag(request.body)),))

    def _delete(self, request: Request) -> Answer:
        if request.method == "DELETE":  # An older obstore deletes one object so.
            if self.deletes:
                self.objects.pop(request.key, None)
            return Answer(204 if self.deletes else 403)
        keys = [unescape(name) for name in re.findall("<Key>(.*?)</Key>", request.body.decode())]
        results = ""
        for key in keys:
            if self.deletes:
                self.objects.pop(key, None)
                results += f"<Deleted><Key>{escape(key)}</Key></Deleted>"
            else:
                why = "<Code>AccessDenied</Code><Message>No</Message>"
                results += f"<Error><Key>{escape(key)}</Key>{why}</Error>"
        return Answer(200, f"<DeleteResult>{results}</DeleteResult>".encode())

    def _list(self, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        folders, keys = set[str](), list[str]()
        for key in sorted(self.objects):
            if key.startswith(prefix):
                inside, folder, _ = key.removeprefix(prefix).partition(delimiter or "\0")
                if folder:
                    folders.add(prefix + inside + delimiter)
                elif key > query.get("continuation-token", ""):
                    keys.append(key)
        shown = keys[:LISTED]
        token = escape(shown[-1]) if len(keys) > LISTED else ""
        more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            f"<LastModified>2026-11-28T12:00:00.000Z</LastModified>"
            f"<ETag>{_tag(self.objects[key])}</ETag></Contents>"
            for key in shown
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        )
        return Answer(
            200, f"<ListBucketResult>{more}{contents}{common}</ListBucketResult>".encode()
        )


def _tag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


@contextmanager
def running() -> Iterator[S3Server]:
    """Run a server on a port of this machine."""
    bucket = S3Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Otherwise a small answer waits for a packet of the client.
        disable_nagle_algorithm = True
        wbufsize = -1

        def log_message(self, *_: object) -> None:
            pass

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            parts = urlsplit(self.path)
            key = unquote(parts.path).lstrip("/").partition("/")[2]
            query = dict(parse_qsl(parts.query, keep_blank_values=True))
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = bucket.answer(Request(self.command, key, headers, body, query))
            self.send_response(answer.status)
            for name, value in answer.headers:
                self.send_header(name, value)
            length = len(answer.body) if answer.length is None else answer.length
            self.send_header("content-length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body)
            if answer.length is not None:
                self.close_connection = True

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request  # noqa: N815 - names of the library

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, *_: object) -> None:
            """Do nothing: clients go away in the middle of an answer."""

    with Server(("127.0.0.1", 0), Handler) as server:
        bucket.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield bucket
        server.shutdown()
