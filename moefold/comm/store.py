"""A rendezvous store that only processes with a common secret can use.

PyTorch's ``TCPStore`` answers whoever reaches its port, and lists its keys, so that no name of a
key is a secret. Here a connection begins with a proof by either side that it knows the secret,
which itself is never sent: each answers the other's random challenge with a keyed digest
(HMAC-SHA256). Before that no request is read. What follows is neither encrypted nor signed: whoever
can read or alter the network's packets can read or alter keys.

Messages are lists of bytes with their lengths; nothing that is received is executed or unpickled.
"""

import asyncio
import hmac
import secrets
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

CHALLENGE_BYTES = 32
PROOF_BYTES = 32
HANDSHAKE_S = 10.0
"""Most seconds that a connection may take to prove that it knows the secret."""
MAX_MESSAGE_BYTES = 64 * 2**20
RETRY_S = 0.1
"""Seconds between attempts to connect to a store that does not answer yet."""
LENGTH = struct.Struct("!I")
NUMBER = struct.Struct("!q")
OK = b"ok"
TIMED_OUT = b"timed out"

# torch has these without exporting them in its type stubs.
Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
StoreError = dist.DistStoreError  # pyright: ignore[reportPrivateImportUsage]
NetworkError = dist.DistNetworkError  # pyright: ignore[reportPrivateImportUsage]


class SecretRefused(ValueError):
    """The process at the store's address does not know this rank's secret."""


def pack(fields: list[bytes]) -> bytes:
    """Return a message: its length, then each field after its length."""
    body = b"".join(LENGTH.pack(len(field)) + field for field in fields)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    """Return the fields of a message without its length.

    Raises:
        ValueError: if the lengths do not add up.
    """
    fields = list[bytes]()
    at = 0
    while at < len(body):
        if at + LENGTH.size > len(body):
            raise ValueError("a message ends in a length")
        (size,) = LENGTH.unpack_from(body, at)
        at += LENGTH.size
        if at + size > len(body):
            raise ValueError("a field is longer than its message")
        fields.append(body[at : at + size])
        at += size
    return fields


def prove(secret: bytes, side: bytes, server_challenge: bytes, client_challenge: bytes) -> bytes:
    """Return the proof that ``side``, ``server`` or ``client``, knows the secret."""
    return hmac.digest(secret, side + server_challenge + client_challenge, "sha256")


class StoreServer:
    """Serves a store from a thread of this process until :meth:`close`.

    Args:
        secret: what clients must know.
        host: address to listen on; empty for all of this machine.
        port: port to listen on; 0 picks a free one.

    Attributes:
        port: the port.

    Raises:
        OSError: if the port is in use.
    """

    def __init__(self, secret: bytes, host: str, port: int = 0) -> None:
        self._secret = secret
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, list[asyncio.Future[None]]] = defaultdict(list)
        self._socket = listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections and the port."""
        with suppress(RuntimeError):  # It is closed already.
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        starting = asyncio.start_server(self._answer_connection, sock=self._socket)
        server = self._loop.run_until_complete(starting)
        self._loop.run_forever()
        server.close()
        self._loop.run_until_complete(self._hang_up())
        self._loop.close()

    async def _hang_up(self) -> None:
        """Close all connections."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _answer_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if await self._is_known(reader, writer):
                while True:
                    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                    if size > MAX_MESSAGE_BYTES:
                        break
                    name, *fields = unpack(await reader.readexactly(size))
                    writer.write(pack(await self._requests[name](self, *fields)))
                    await writer.drain()
        except (OSError, EOFError, ValueError, KeyError, TypeError, struct.error):
            pass  # The connection is closed, or sends what is no request.
        except asyncio.CancelledError:
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    async def _is_known(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether the client proves that it knows the secret; if so, prove it to it."""
        ours = secrets.token_bytes(CHALLENGE_BYTES)
        writer.write(ours)
        try:
            reading = reader.readexactly(CHALLENGE_BYTES + PROOF_BYTES)
            answer = await asyncio.wait_for(reading, HANDSHAKE_S)
        except TimeoutError:
            return False
        theirs = answer[:CHALLENGE_BYTES]
        proof = answer[CHALLENGE_BYTES:]
        if not hmac.compare_digest(proof, prove(self._secret, b"client", ours, theirs)):
            return False
        writer.write(prove(self._secret, b"server", ours, theirs))
        return True

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for waiting in self._waiting.pop(key, ()):
            if not waiting.done():
                waiting.set_result(None)

    async def _set(self, key: bytes, value: bytes) -> list[bytes]:
        self._put(key, value)
        return [OK]

    async def _add(self, key: bytes, amount: bytes) -> list[bytes]:
        total = int(self._values.get(key, b"0")) + NUMBER.unpack(amount)[0]
        self._put(key, b"%d" % total)
        return [OK, NUMBER.pack(total)]

    async def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self._put(key, desired)
            return [OK, desired]
        return [OK, expected if present is None else present]

    async def _check(self, *keys: bytes) -> list[bytes]:
        return [OK, b"1" if all(key in self._values for key in keys) else b""]

    async def _delete(self, key: bytes) -> list[bytes]:
        return [OK, b"1" if self._values.pop(key, None) is not None else b""]

    async def _count(self) -> list[bytes]:
        return [OK, NUMBER.pack(len(self._values))]

    async def _get(self, milliseconds: bytes, *keys: bytes) -> list[bytes]:
        """Wait until all keys are there; return their values."""
        until = self._loop.time() + NUMBER.unpack(milliseconds)[0] / 1e3
        for key in keys:
            while key not in self._values:
                waiting = self._loop.create_future()
                self._waiting[key].append(waiting)
                try:
                    await asyncio.wait_for(waiting, until - self._loop.time())
                except TimeoutError:
                    return [TIMED_OUT, key]
        return [OK, *(self._values[key] for key in keys)]

    _requests: dict[bytes, Callable[..., Awaitable[list[bytes]]]] = {
        b"set": _set,
        b"add": _add,
        b"compare": _compare_set,
        b"check": _check,
        b"delete": _delete,
        b"count": _count,
        b"get": _get,
    }


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address, or on all of this machine."""
    if host or not socket.has_dualstack_ipv6():
        return socket.create_server((host, port), backlog=1024)
    family = socket.AF_INET6
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=True)


class SecretStore(Store):
    """A client of :class:`StoreServer`, for PyTorch's process groups and for prefixes of keys.

    Args:
        host, port: the server's address.
        secret: what the server must know.
        time_out_s: time-out for the server to answer, and of operations that wait for a key.

    Raises:
        SecretRefused: if the server does not know the secret.
        RuntimeError: if there is no server in time.
    """

    def __init__(self, host: str, port: int, secret: bytes, time_out_s: float) -> None:
        super().__init__()
        self._arguments = host, port, secret, time_out_s
        self._time_out_s = time_out_s
        self._lock = threading.Lock()
        where = f"{host}:{port}"
        self._socket = _connect(host, port, time_out_s)
        try:
            ours = secrets.token_bytes(CHALLENGE_BYTES)
            theirs = self._receive(CHALLENGE_BYTES)
            self._socket.sendall(ours + prove(secret, b"client", theirs, ours))
            proof = self._receive(PROOF_BYTES)
        except OSError as error:
            self._socket.close()
            raise SecretRefused(
                f"the store at {where} does not take this rank's secret: {error or 'it hung up'}"
            ) from error
        if not hmac.compare_digest(proof, prove(secret, b"server", theirs, ours)):
            self._socket.close()
            raise SecretRefused(f"what answers at {where} does not know this rank's secret")

    def __del__(self) -> None:
        """Close the connection; at the interpreter's end too, when this module's names are gone."""
        connection = getattr(self, "_socket", None)
        if connection is not None:
            connection.close()

    def clone(self) -> "SecretStore":
        """Return another connection."""
        return SecretStore(*self._arguments)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key's value."""
        self._ask(b"set", key.encode(), _to_bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value, once it has one."""
        return self._get([key], self._time_out_s)[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys, once all have one."""
        return self._get(keys, self._time_out_s)

    def add(self, key: str, amount: int) -> int:
        """Add to the number under a key, 0 at first; return the sum."""
        return NUMBER.unpack(self._ask(b"add", key.encode(), NUMBER.pack(amount))[0])[0]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key's value if it is ``expected``, or empty for none; return what it then is."""
        return self._ask(b"compare", key.encode(), _to_bytes(expected), _to_bytes(desired))[0]

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        return bool(self._ask(b"check", *(key.encode() for key in keys))[0])

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it had a value."""
        return bool(self._ask(b"delete", key.encode())[0])

    def num_keys(self) -> int:
        """Return the number of keys."""
        return NUMBER.unpack(self._ask(b"count")[0])[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have values."""
        self._get(keys, self._time_out_s if timeout is None else timeout.total_seconds())

    def _get(self, keys: list[str], time_out_s: float) -> list[bytes]:
        limit = NUMBER.pack(int(1e3 * time_out_s))
        return self._ask(b"get", limit, *(key.encode() for key in keys), wait_s=time_out_s)

    def _ask(self, name: bytes, *fields: bytes, wait_s: float = 0.0) -> list[bytes]:
        """Send a request; return the fields of its answer."""
        with self._lock, _as_store_errors():
            self._socket.settimeout(wait_s + self._time_out_s)
            self._socket.sendall(pack([name, *fields]))
            (size,) = LENGTH.unpack(self._receive(LENGTH.size))
            state, *answer = unpack(self._receive(size))
        if state == TIMED_OUT:
            raise StoreError(f"no value of {answer[0].decode()} within {wait_s:g} s")
        return answer

    def _receive(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(size - len(parts))
            if not part:
                raise ConnectionResetError("the store closed the connection")
            parts += part
        return bytes(parts)


@contextmanager
def _as_store_errors() -> Iterator[None]:
    """Raise errors of the network as those of PyTorch's stores."""
    try:
        yield
    except OSError as error:
        raise NetworkError(f"the store does not answer: {error}") from error


def _connect(host: str, port: int, time_out_s: float) -> socket.socket:
    until = time.monotonic() + time_out_s
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=time_out_s)
        except OSError as error:
            if time.monotonic() > until:
                raise NetworkError(
                    f"no store at {host}:{port} within {time_out_s:g} s: {error}"
                ) from error
            time.sleep(RETRY_S)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
