"""Finds out within seconds that another process of a run is gone. No JAX.

Process 0 has a TCP connection to every other process. The kernel closes it when a process is killed, and keepalive finds lost
machines. Nothing is sent while a run works, so a process that compiles, reads, holds Python's lock or is suspended is alive.
"""

import contextlib
import math
import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, Self

Sockets = dict[int, socket.socket]
# magic number, number of processes, number of this process
_HELLO = struct.Struct("!4sii")
_MAGIC = b"jgr1"
_PORT = struct.Struct("!i")
# kind of the event, and number of the process
_MESSAGE = struct.Struct("!ci")
_LOST, _FAILED, _ENDED = b"L", b"F", b"E"
_HELLO_SECONDS = 5
_DIAL_SECONDS = 0.1
_SHIELD_SECONDS = 60.0
# From the error of a collective to the news about the process that caused it, and from the news to an error of this process.
_GRACE_SECONDS = 2.0
# A process that ends with its own error may take this long after another one is gone.
_LEAVE_SECONDS = 30.0


class Loss(NamedTuple):
    """A process that has ended before the run."""

    process: int
    # `failed`: it has told so, and prints its error. `lost`: it was killed, or its machine is lost
    how: Literal["failed", "lost"]


def listen(port: int) -> socket.socket:
    """Returns a server on all addresses of this machine. Raises OSError if the port is used."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def accept_all(server: socket.socket, count: int, patience: float) -> Sockets:
    """Returns the connections to processes 1 to `count` - 1, on process 0. Ignores programs that are none of them."""
    deadline = time.monotonic() + patience
    found: Sockets = {}
    while len(found) < count - 1:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            for each in found.values():
                each.close()
            missing = ", ".join(str(process) for process in range(1, count) if process not in found)
            raise TimeoutError(f"no connection from process {missing} after {patience:g} s") from None
        process = _hello(connection, count)
        if process is None or process in found:
            connection.close()
        else:
            found[process] = connection
    return found


def join(address: tuple[str, int], process: int, count: int, patience: float) -> socket.socket:
    """Returns the connection to process 0."""
    connection = _dial(address, patience)
    connection.sendall(_HELLO.pack(_MAGIC, count, process))
    return connection


def _dial(address: tuple[str, int], patience: float) -> socket.socket:
    """Connects to a server that may start later."""
    deadline = time.monotonic() + patience
    error = ""
    while (left := deadline - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(address, timeout=left)
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()  # without a server, a local port that the kernel chooses for both sides connects to itself
        except OSError as e:
            error = f" ({e.strerror or e})"
        time.sleep(min(_DIAL_SECONDS, left))
    raise TimeoutError(f"no connection after {patience:g} s{error}")


def tell_port(sockets: Sockets, port: int) -> None:
    """Tells all processes the port of JAX's service, on process 0."""
    for connection in sockets.values():
        connection.sendall(_PORT.pack(port))


def hear_port(connection: socket.socket, patience: float) -> int:
    """Returns the port of JAX's service. Waits until all processes have connected."""
    connection.settimeout(patience)
    data = _received(connection, _PORT.size)
    if len(data) < _PORT.size:
        raise ConnectionError("process 0 has ended, still waits for others, or has two processes of this number")
    return _PORT.unpack(data)[0]


def keep_alive(connection: socket.socket, seconds: float) -> None:
    """Makes reads fail if the other machine has not answered for `seconds`. Its kernel answers, also for a stopped process."""
    unit = max(1, math.ceil(seconds / 3))
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, unit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, unit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000 * unit)


def shield(address: tuple[str, int]) -> int:
    """Returns a local port that forwards to an address, and that stays open when the other side is gone.

    JAX's client aborts the process, with a stack of C++, as soon as its connection to process 0 closes.
    """
    server = socket.create_server(("localhost", 0))
    # The port of JAX's service is free until the service starts. A shield there would forward to itself without end.
    while server.getsockname()[1] == address[1]:
        server.close()
        server = socket.create_server(("localhost", 0))

    def serve() -> None:
        while True:
            near, _ = server.accept()
            try:
                far = _dial(address, _SHIELD_SECONDS)  # JAX's service starts after its port is told
                far.settimeout(None)
            except OSError:
                near.close()  # JAX tries again
                continue
            threading.Thread(target=_forward, args=(far, near), name="shield", daemon=True).start()
            threading.Thread(target=out, args=(near, far), name="shield", daemon=True).start()

    def out(near: socket.socket, far: socket.socket) -> None:
        with near, far:
            _forward(near, far)
            with contextlib.suppress(OSError):
                far.shutdown(socket.SHUT_RDWR)  # the other thread still reads

    threading.Thread(target=serve, name="shield", daemon=True).start()
    return server.getsockname()[1]


class Peers:
    """Calls `lost` from another thread if another process is gone before the `with` block has ended everywhere.

    `lost` must end this process, which may wait in a collective that never ends. The end of the block waits for the others.
    """

    def __init__(self, process: int, sockets: Mapping[int, socket.socket], lost: Callable[[Loss], object]):
        self._process = process
        # Process 0 has one for every other process, the others have one for process 0.
        self._sockets = sockets
        self._lost = lost
        self._all_ended = threading.Event()
        # another process has failed or is lost; this one ends with an error of its own
        self._is_told = threading.Event()
        self._is_leaving = threading.Event()

    def __enter__(self) -> Self:
        if self._sockets:
            threading.Thread(target=self._watch, name="peers", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(error)
        elif self._sockets:
            if self._process:
                self._tell(_ENDED, self._process)
            self._all_ended.wait()
            if not self._process:
                self._tell(_ENDED, 0)

    def failed(self, error: BaseException | None) -> None:
        """Tells the others that this process ends with an error that it prints. Only the first call counts.

        Does not return if the error comes from a process that is gone: `lost` ends this process.
        """
        if not self._sockets or self._is_leaving.is_set():
            return
        if _is_of_runtime(error) and self._is_told.wait(_GRACE_SECONDS):
            threading.Event().wait()
        self._is_leaving.set()
        self._tell(_FAILED, self._process)

    def _tell(self, what: bytes, process: int) -> None:
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):
                connection.sendall(_MESSAGE.pack(what, process))

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, process)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    self._read(self._sockets[key.data], key.data)
            self._all_ended.set()

    def _read(self, connection: socket.socket, process: int) -> None:
        """Acts on the last message of a process, or on its end without one."""
        data = _received(connection, _MESSAGE.size)
        what, about = _MESSAGE.unpack(data) if len(data) == _MESSAGE.size else (_LOST, process)
        if what == _ENDED:
            return
        if self._process == 0:
            self._tell(what, about)
        self._report(Loss(about, "failed" if what == _FAILED else "lost"))

    def _report(self, loss: Loss) -> None:
        self._is_told.set()
        # All processes may have the same error. Each then prints its own.
        if self._is_leaving.wait(_GRACE_SECONDS if loss.how == "failed" else 0):
            time.sleep(_LEAVE_SECONDS)
        self._lost(loss)


def _is_of_runtime(error: BaseException | None) -> bool:
    """True if an error, or one that has caused it, is that of a program on the devices, such as `INTERNAL: …`."""
    while error is not None:
        if re.match(r"(?!RESOURCE_EXHAUSTED)[A-Z_]+: ", str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _hello(connection: socket.socket, count: int) -> int | None:
    """Returns the number of a process that has connected; None if it is none of this run."""
    connection.settimeout(_HELLO_SECONDS)
    data = _received(connection, _HELLO.size)
    magic, its_count, process = _HELLO.unpack(data) if len(data) == _HELLO.size else (b"", 0, 0)
    return process if (magic, its_count) == (_MAGIC, count) and 0 < process < count else None


def _received(connection: socket.socket, size: int) -> bytes:
    """Returns the next bytes, or fewer if the other side is gone or silent."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < size and (part := connection.recv(size - len(data))):
            data += part
    return data


def _forward(source: socket.socket, sink: socket.socket) -> None:
    """Copies what a socket receives to another, which may be gone."""
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            with contextlib.suppress(OSError):
                sink.sendall(data)
