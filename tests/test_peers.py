"""Processes find out that another one is gone. Sockets and threads of one process, without JAX."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from jgraph import peers
from jgraph.errors import ConfigError
from jgraph.peers import Loss, Peers


class Run:
    """Three processes as objects of this one. `news` has the losses that each has found."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(peers, "_GRACE_SECONDS", 0.2)
        monkeypatch.setattr(peers, "_LEAVE_SECONDS", 0.2)
        pairs = {process: socket.socketpair() for process in (1, 2)}
        self.sockets = [{p: pair[0] for p, pair in pairs.items()}, *({0: pair[1]} for pair in pairs.values())]
        self.news: list[list[Loss]] = [[], [], []]
        self.all = [Peers(p, self.sockets[p], self.news[p].append) for p in range(3)]
        for each in self.all:
            each.__enter__()

    def kill(self, process: int) -> None:
        """Closes the connections of a process, as the kernel does. Its thread, which still runs here, must not tell."""
        self.all[process]._tell = lambda what, about: None
        for each in self.sockets[process].values():
            each.shutdown(socket.SHUT_RDWR)

    def end(self, process: int, error: BaseException | None = None) -> threading.Thread:
        thread = threading.Thread(target=self.all[process].__exit__, args=(None, error, None), daemon=True)
        thread.start()
        return thread

    def expect(self, news: dict[int, Loss]) -> None:
        deadline = time.monotonic() + 60
        while not all(self.news[process] for process in news) and time.monotonic() < deadline:
            time.sleep(0.01)
        # Here a process continues after the first loss.
        assert {process: self.news[process][:1] for process in news} == {process: [loss] for process, loss in news.items()}


@pytest.fixture
def run(monkeypatch):
    run = Run(monkeypatch)
    yield run
    for each in (each for sockets in run.sockets for each in sockets.values()):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)  # ends the thread that reads
        each.close()


@pytest.mark.parametrize("killed", [0, 1, 2])
def test_all_others_are_told_which_process_was_killed(run, killed):
    run.kill(killed)
    run.expect({process: Loss(killed, "lost") for process in range(3) if process != killed})


@pytest.mark.parametrize("process", [0, 1])
def test_all_others_are_told_which_process_ends_with_an_error(run, process):
    run.end(process, ValueError("mine")).join(60)
    run.expect({other: Loss(process, "failed") for other in range(3) if other != process})


def test_processes_that_end_in_order_wait_for_each_other_and_find_no_loss(run):
    threads = [run.end(1), run.end(0)]
    threads[0].join(0.2)
    assert all(thread.is_alive() for thread in threads)
    for thread in (*threads, run.end(2)):
        thread.join(60)
    for process in range(3):
        run.kill(process)
    time.sleep(0.1)
    assert run.news == [[], [], []]


def test_a_process_that_is_killed_while_others_wait_for_its_end_is_lost(run):
    run.end(0)
    run.end(1)
    run.kill(2)
    run.expect({0: Loss(2, "lost"), 1: Loss(2, "lost")})


def test_an_error_of_a_collective_waits_for_the_process_that_caused_it(run):
    error = ConfigError("a checkpoint cannot be written", field="")
    error.__cause__ = ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")
    thread = run.end(2, error)
    run.kill(1)
    run.expect({0: Loss(1, "lost"), 2: Loss(1, "lost")})
    assert thread.is_alive()


@pytest.mark.parametrize("error", [ValueError("INTERNAL: mine"), ConfigError("JAX_PLATFORMS is a: must be b", field="")])
def test_an_error_of_its_own_is_raised(run, error):
    run.end(2, error).join(60)
    assert run.news[2] == []
    run.expect({0: Loss(2, "failed"), 1: Loss(2, "failed")})


def test_processes_with_the_same_error_have_time_to_print_their_own(run, monkeypatch):
    monkeypatch.setattr(peers, "_LEAVE_SECONDS", 60)
    for process in (1, 2, 0):
        run.all[process].failed(ConfigError("a", field=""))
    time.sleep(0.5)
    assert run.news == [[], [], []]


def test_a_process_that_cannot_end_after_its_own_error_is_ended(run):
    for process in (1, 2):
        run.all[process].failed(ConfigError("a", field=""))
    run.expect({2: Loss(1, "failed")})


def test_a_process_alone_has_no_thread_and_does_not_wait():
    before = threading.active_count()
    with Peers(0, {}, print) as alone:
        assert threading.active_count() == before
        alone.failed(ValueError("INTERNAL: mine"))


def test_only_processes_of_the_run_are_accepted():
    with peers.listen(0) as server:
        address = ("localhost", server.getsockname()[1])
        strangers = [socket.create_connection(address) for _ in range(3)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].close()
        strangers[2].sendall(peers._HELLO.pack(b"jgr1", 4, 1))
        joined = [peers.join(address, process, 3, 60) for process in (2, 1)]
        twice = peers.join(address, 2, 3, 60)
        found = peers.accept_all(server, 3, 60)
    peers.tell_port(found, 1234)
    assert [peers.hear_port(connection, 60) for connection in joined] == [1234, 1234]
    assert sorted(found) == [1, 2]
    with pytest.raises(ConnectionError):
        peers.hear_port(twice, 60)
    for each in (*strangers, *joined, *found.values(), twice):
        each.close()


def test_missing_processes_are_named():
    with peers.listen(0) as server:
        with peers.join(("localhost", server.getsockname()[1]), 2, 4, 60), pytest.raises(TimeoutError) as error:
            peers.accept_all(server, 4, 0.3)
        address = ("localhost", server.getsockname()[1])
    assert str(error.value) == "no connection from process 1, 3 after 0.3 s"
    with pytest.raises(TimeoutError, match=r"no connection after 0\.3 s \(Connection refused\)"):
        peers.join(address, 1, 4, 0.3)


def test_a_machine_without_both_families_of_addresses_listens_on_one(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with peers.listen(0) as server:
        assert (server.family, server.getsockname()[0]) == (socket.AF_INET, "0.0.0.0")


def test_a_connection_to_itself_is_closed_and_tried_again(monkeypatch):
    monkeypatch.setattr(peers, "_DIAL_SECONDS", 0)
    itself = socket.socket()
    itself.bind(("localhost", 0))
    itself.connect(itself.getsockname())
    create = socket.create_connection
    connections = iter([itself])
    monkeypatch.setattr(
        socket, "create_connection", lambda *args, **options: next(connections, None) or create(*args, **options)
    )
    with peers.listen(0) as server:
        address = ("localhost", server.getsockname()[1])
        with peers.join(address, 1, 2, 60) as joined:
            assert joined.getpeername()[1] == address[1]
    assert itself.fileno() == -1


def test_a_shield_closes_a_connection_that_it_cannot_forward_and_takes_the_next(monkeypatch):
    monkeypatch.setattr(peers, "_SHIELD_SECONDS", 0.01)
    with peers.listen(0) as server:
        address = ("localhost", server.getsockname()[1])
    shield = ("localhost", peers.shield(address))
    for _ in range(2):
        with socket.create_connection(shield, timeout=5) as near:
            assert near.recv(100) == b""


def test_a_shield_never_has_the_port_that_it_forwards_to(monkeypatch):
    create = socket.create_server
    first = create(("localhost", 0))
    ports = iter([first])
    monkeypatch.setattr(socket, "create_server", lambda address: next(ports, None) or create(address))
    taken = first.getsockname()[1]
    assert peers.shield(("localhost", taken)) != taken


def test_a_shield_forwards_and_stays_open_when_the_other_side_is_gone():
    with peers.listen(0) as server:
        near = socket.create_connection(("localhost", peers.shield(("localhost", server.getsockname()[1]))))
        far, _ = server.accept()
    with near, far:
        near.sendall(b"question")
        assert far.recv(100) == b"question"
        far.sendall(b"answer")
        assert near.recv(100) == b"answer"
        far.shutdown(socket.SHUT_RDWR)
        near.sendall(b"still there")
        near.sendall(b"still there")
        near.settimeout(0.3)
        with pytest.raises(TimeoutError):
            near.recv(100)


STOPPED = """if True:
    import sys, time
    from jgraph import peers
    connection = peers.join(("localhost", int(sys.argv[1])), 1, 2, 60)
    peers.keep_alive(connection, 1)
    time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.once
def test_a_stopped_process_is_not_lost_and_a_killed_one_is():
    news: list[Loss] = []
    found = threading.Event()
    with peers.listen(0) as server:
        process = subprocess.Popen([sys.executable, "-c", STOPPED, str(server.getsockname()[1])])
        sockets = peers.accept_all(server, 2, 60)
    peers.keep_alive(sockets[1], 1)
    Peers(0, sockets, lambda loss: (news.append(loss), found.set())).__enter__()
    process.send_signal(signal.SIGSTOP)
    assert not found.wait(5)
    process.kill()
    process.wait()
    assert found.wait(60)
    assert news == [Loss(1, "lost")]
    sockets[1].close()
