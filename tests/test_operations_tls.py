"""TLS as clients meet it: certificates, HTTP/2, and those that speak neither."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h2.connection
import h2.events
import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from server.http.app import create_app
from server.http.listen import ListenError, check_tls
from server.logs import configure_logs
from server.settings import Settings

from .fake_engine import WAIT_S, FakeEngine, byte_tokenizer, scripted
from .http_server import LiveServer, live_server

MODEL = "models/tiny"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
AUTHORITY = trustme.CA()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings with a certificate for localhost, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    made = AUTHORITY.issue_cert("localhost", "127.0.0.1")
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    made.private_key_pem.write_to_path(key)
    return Settings(grace_s=0.0, tls_cert=str(cert), tls_key=str(key))


@pytest.fixture
def server(files: Settings) -> Iterator[LiveServer]:
    """Answers `yes`."""
    with (
        scripted("yes") as engine,
        live_server(create_app(engine, engine.tokenizer, MODEL, files), files) as server,
    ):
        yield server


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    return context


def client_of(server: LiveServer, *, http2: bool) -> httpx.Client:
    url = f"https://localhost:{server.port}"
    return httpx.Client(base_url=url, verify=trusting(), http2=http2, timeout=WAIT_S)


@pytest.mark.parametrize(("http2", "version"), [(False, "HTTP/1.1"), (True, "HTTP/2")])
def test_a_client_that_trusts_the_certificate_is_served(
    server: LiveServer, http2: bool, version: str
) -> None:
    with client_of(server, http2=http2) as client:
        response = client.post("/v1/chat/completions", json=CHAT)
        assert (response.status_code, response.http_version) == (200, version)
        assert response.json()["choices"][0]["message"]["content"] == "yes"
        with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events[:-1]]
        assert "".join(delta.get("content", "") for delta in deltas) == "yes"


def test_a_body_that_is_too_large_is_refused_over_http2_too(server: LiveServer) -> None:
    with client_of(server, http2=True) as client:
        body = b"x" * (9 * 2**20)
        response = client.post("/v1/chat/completions", content=body)
        assert (response.status_code, response.http_version) == (413, "HTTP/2")
        assert client.get("/health").status_code == 200


def test_a_client_that_leaves_an_http2_stream_causes_one_cancel(files: Settings) -> None:
    left = threading.Event()

    def script(_: object) -> Iterator[int]:
        yield from b"once"
        assert left.wait(WAIT_S)

    with FakeEngine(byte_tokenizer(), script) as engine:
        app = create_app(engine, engine.tokenizer, MODEL, files)
        with live_server(app, files) as server, raw_http2(server) as (connection, secure):
            body = json.dumps(CHAT | {"stream": True}).encode()
            head = {":method": "POST", ":path": "/v1/chat/completions", ":scheme": "https"}
            connection.send_headers(1, [*head.items(), (":authority", "localhost")])
            connection.send_data(1, body, end_stream=True)
            secure.sendall(connection.data_to_send())
            seen = b""
            while b'"content":"o"' not in seen:
                events = connection.receive_data(secure.recv(65536))
                seen += b"".join(it.data for it in events if isinstance(it, h2.events.DataReceived))
            connection.reset_stream(1)
            secure.sendall(connection.data_to_send())
            assert engine.cancelled.get(timeout=WAIT_S) == 0
            left.set()
        assert engine.cancels_so_far() == []


@contextmanager
def raw_http2(server: LiveServer) -> Iterator[tuple[h2.connection.H2Connection, ssl.SSLSocket]]:
    """A connection whose frames a test makes itself: httpx resets no stream, it just stops."""
    context = trusting()
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((server.host, server.port), timeout=WAIT_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        connection = h2.connection.H2Connection()
        connection.initiate_connection()
        yield connection, secure


def test_a_client_that_does_not_trust_or_speak_tls_is_left_alone_quietly(
    files: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logs()
    with (
        scripted("yes") as engine,
        live_server(create_app(engine, engine.tokenizer, MODEL, files), files) as server,
    ):
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://localhost:{server.port}/health")
        with socket.create_connection((server.host, server.port), timeout=WAIT_S) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            while plain.recv(1000):
                pass
        with client_of(server, http2=False) as client:
            assert client.get("/ready").status_code == 200
    assert capsys.readouterr().err == ""


# What cannot be used


def test_files_that_cannot_be_used_are_one_sentence_each(files: Settings, tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    other = tmp_path / "other.pem"
    AUTHORITY.issue_cert("other").private_key_pem.write_to_path(other)
    locked = tmp_path / "locked.pem"
    locked.write_bytes(_with_passphrase(Path(str(files.tls_key)).read_bytes()))
    cert, key = files.tls_cert, files.tls_key
    check_tls(files)
    for pair, sentence in [
        (("none.pem", key), r"tls_cert none.pem cannot be read: No such file or directory"),
        ((cert, "none.pem"), r"tls_key none.pem cannot be read: No such file or directory"),
        ((str(junk), key), r"tls_cert .*junk.pem and tls_key .* cannot be used: .*both as PEM"),
        ((cert, str(other)), r"cannot be used: KEY_VALUES_MISMATCH; give a certificate and its"),
        ((cert, str(locked)), r"tls_key has a passphrase: give a key without one"),
    ]:
        with pytest.raises(ListenError, match=sentence):
            check_tls(Settings(tls_cert=pair[0], tls_key=pair[1]))


def _with_passphrase(key: bytes) -> bytes:
    loaded = serialization.load_pem_private_key(key, None)
    return loaded.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
