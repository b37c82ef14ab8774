"""Google Cloud Storage as far as its clients here use it: the XML interface, with conditions on generations.

No package has an emulator with this interface. So this one shows that we send the right requests and take
the answers right, and so does Lance; that Google keeps its promise of conditional writes it cannot show.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from email.utils import formatdate, parsedate_to_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_BUCKET = "lancewal-tests"


class GcsServer:
    """The server's process, on a free port of 127.0.0.1; it ends with the block or with its starter."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.endpoint = ""

    def storage_options(self, endpoint: str) -> dict[str, str]:
        """For pylance and for us alike: a key that asks nobody for a token."""
        key = {"gcs_base_url": endpoint, "disable_oauth": True}
        key |= {"client_email": "", "private_key": "", "private_key_id": ""}
        return {"google_service_account_key": json.dumps(key), "allow_http": "true"}

    def uri(self, prefix: str) -> str:
        return f"gs://{_BUCKET}/{prefix}"

    def __enter__(self) -> GcsServer:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.endpoint = f"http://127.0.0.1:{self._process.stdout.readline().strip()}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class _Object:
    def __init__(self, data: bytes, generation: int) -> None:
        self.data = data
        self.generation = generation
        self.modified = formatdate(usegmt=True)
        self.tag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, _Object]] = {}
    uploads: ClassVar[dict[str, dict[int, bytes]]] = {}
    lock = threading.Lock()
    generation = 0

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        where = urlsplit(self.path)
        _, _, key = unquote(where.path.lstrip("/")).partition("/")
        query = parse_qs(where.query, keep_blank_values=True)
        with self.lock:
            status, headers, data = self._answer(key, query, body)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", headers.get("Content-Length", str(len(data))))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request  # noqa: N815

    def log_message(self, *arguments: object) -> None:
        pass

    def _answer(
        self, key: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if "list-type" in query:
            return 200, {"Content-Type": "application/xml"}, self._list(query)
        if "uploads" in query or "uploadId" in query:
            return self._multipart(key, query, body)
        if self.command == "PUT":
            return self._store(key, body)
        found = self.objects.get(key)
        if found is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        if self.command == "DELETE":
            del self.objects[key]
            return 204, {}, b""
        headers = {"ETag": found.tag, "Last-Modified": found.modified, "x-goog-generation": "1"}
        asked = self.headers.get("range")
        if asked is None or self.command == "HEAD":
            return 200, headers, found.data
        first, last = asked.removeprefix("bytes=").split("-")
        size = len(found.data)
        start = int(first) if first else max(0, size - int(last))
        end = min(int(last) + 1 if first and last else size, size)
        if start >= size:
            return 416, {}, b"<Error><Code>InvalidRange</Code></Error>"
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        return 206, headers, found.data[start:end]

    def _store(self, key: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        there = self.objects.get(key)
        wanted = self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (there.generation if there else 0):
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        source = self.headers.get("x-goog-copy-source")
        if source is not None:
            body = self.objects[unquote(source).lstrip("/").partition("/")[2]].data
        _Handler.generation += 1
        self.objects[key] = made = _Object(body, self.generation)
        return 200, {"ETag": made.tag, "x-goog-generation": str(made.generation)}, b""

    def _multipart(
        self, key: str, query: dict[str, list[str]], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in query:
            _Handler.generation += 1
            self.uploads[str(self.generation)] = {}
            text = f"<InitiateMultipartUploadResult><UploadId>{self.generation}</UploadId>"
            return 200, {}, f"{text}</InitiateMultipartUploadResult>".encode()
        parts = self.uploads[query["uploadId"][0]]
        if self.command == "PUT":
            number = int(query["partNumber"][0])
            parts[number] = body
            return 200, {"ETag": f'"{number}"'}, b""
        if self.command == "DELETE":
            return 204, {}, b""
        status, headers, _ = self._store(key, b"".join(parts[number] for number in sorted(parts)))
        tag = f"<ETag>{escape(headers['ETag'])}</ETag>"
        return (
            status,
            headers,
            f"<CompleteMultipartUploadResult>{tag}</CompleteMultipartUploadResult>".encode(),
        )

    def _list(self, query: dict[str, list[str]]) -> bytes:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        after = query.get("start-after", query.get("continuation-token", [""]))[0]
        keys: list[str] = []
        folders: set[str] = set()
        for key in sorted(self.objects):
            if not key.startswith(prefix) or key <= after:
                continue
            end = key.find(delimiter, len(prefix)) if delimiter else -1
            if end >= 0:
                folders.add(key[: end + 1])
            else:
                keys.append(key)
        text = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{_iso(self.objects[key].modified)}</LastModified>"
            f"<ETag>{escape(self.objects[key].tag)}</ETag><Size>{len(self.objects[key].data)}</Size></Contents>"
            for key in keys
        )
        text += "".join(
            f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>"
            for folder in sorted(folders)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{text}</ListBucketResult>".encode()


def _iso(modified: str) -> str:
    return parsedate_to_datetime(modified).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
