"""Tunnels and witnesses over the loopback interface, with real processes as ranks."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from recover_megatron.hosts import agent, rank, relay, witness
from recover_megatron.hosts.addresses import address_towards, own_addresses
from recover_megatron.hosts.folder import HostFolder
from recover_megatron.hosts.links import loop
from recover_megatron.hosts.tunnel import Tunnel
from recover_megatron.hosts.witness import Witness

pytestmark = pytest.mark.timed
HERE = "127.0.0.1"


def until(condition, seconds: float = 10) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.fixture
def server():
    with socket.create_server((HERE, 0)) as listening:
        listening.settimeout(10)
        yield listening


def open_tunnel(server, protect: str, **settings) -> Tunnel:
    settings.setdefault("fenced", lambda: False)
    return Tunnel(HERE, server.getsockname(), protect, **settings)


@pytest.mark.parametrize("protect", ["target", "client"])
def test_the_protected_end_does_not_see_the_other_go_and_can_go_on_writing(server, protect):
    tunnel = open_tunnel(server, protect)
    with socket.create_connection((HERE, tunnel.port)) as client:
        target, _ = server.accept()
        with target:
            client.sendall(b"there")
            assert target.recv(10) == b"there"
            target.sendall(b"back")
            assert client.recv(10) == b"back"
            near, far = (target, client) if protect == "target" else (client, target)
            far.close()
            until(tunnel.far_lost.is_set)
            near.settimeout(0.2)
            with pytest.raises(TimeoutError):
                near.recv(1)
            near.sendall(b"x" * 100_000)
            assert not tunnel.ended.is_set()
            near.close()
            until(tunnel.ended.is_set)


def test_what_a_fenced_far_end_sends_is_dropped(server):
    fenced = False
    tunnel = open_tunnel(server, "target", fenced=lambda: fenced)
    with socket.create_connection((HERE, tunnel.port)) as client:
        target, _ = server.accept()
        with target:
            client.sendall(b"1")
            assert target.recv(10) == b"1"
            fenced = True
            client.sendall(b"2")
            target.settimeout(0.2)
            with pytest.raises(TimeoutError):
                target.recv(10)
            target.sendall(b"3")
            assert client.recv(10) == b"3"


def test_a_tunnel_admits_only_who_knows_the_password(server):
    inner = open_tunnel(server, "target", admit="secret")
    with socket.create_connection((HERE, inner.port)) as stranger:
        stranger.sendall(b"secreT\n")
        assert stranger.recv(10) == b""
    inner_server = ((HERE, inner.port), "client", lambda: False)
    outer = Tunnel(HERE, *inner_server, present="secret")
    with socket.create_connection((HERE, outer.port)) as client:
        client.sendall(b"hello")
        target, _ = server.accept()
        with target:
            assert target.recv(10) == b"hello"  # the password is not passed on


@pytest.fixture
def hosts(tmp_path):
    """Witnesses a (the launcher's), b and c."""
    made = {}
    for name in "abc":
        (tmp_path / name).mkdir()
        made[name] = Witness(name, HERE, HostFolder(tmp_path / name), "secret")
        made[name].start((HERE, made["a"].port) if name != "a" else None)
        until(lambda: all(len(w.peers) == len(made) - 1 for w in made.values()))
    yield made
    for each in made.values():
        each.stop()


def close_links(one: Witness) -> None:
    """As its kernel does when its process ends."""
    for peer in one.peers.values():
        loop().call_soon_threadsafe(peer.link.close)


def a_rank(folder: HostFolder) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder.write(f"ranks/{process.pid}")
    return process


def test_the_end_of_a_rank_is_proven_everywhere_and_when_all_have_ended_it_is_over(hosts):
    assert not hosts["a"].over
    one, other = a_rank(hosts["b"].folder), a_rank(hosts["c"].folder)
    until(lambda: hosts["a"].peers["b"].left == hosts["a"].peers["c"].left == 1)
    one.kill()
    one.wait()
    for each in hosts.values():
        until(lambda each=each: each.folder.lines("dead") == {f"b {one.pid}"})
    assert not hosts["a"].over
    other.kill()
    other.wait()
    until(lambda: hosts["a"].over)


def test_the_end_of_a_witness_proves_its_host_dead_and_silence_proves_nothing(hosts, monkeypatch):
    monkeypatch.setattr(witness, "SILENT_S", 0.5)
    monkeypatch.setattr(witness, "_BEAT_S", 0.1)
    time.sleep(0.3)  # beats at the new pace
    hosts["b"].stop()  # says no more, but its connections stay
    until(lambda: hosts["a"].folder.lines("silent") == {"b"})
    until(lambda: hosts["c"].folder.lines("silent") == {"b"})
    assert hosts["a"].folder.lines("dead") == frozenset()
    close_links(hosts["b"])
    until(lambda: hosts["a"].folder.lines("dead") == {"b"})
    until(lambda: hosts["c"].folder.lines("dead") == {"b"})


def test_the_exit_code_reaches_every_host_and_later_ends_prove_nothing(hosts):
    hosts["c"].folder.write("done", "3\n")
    for name in "ab":
        until(lambda name=name: hosts[name].folder.lines("done") == {"3"})
    hosts["c"].stop()
    close_links(hosts["c"])
    until(lambda: hosts["a"].peers["c"].gone)
    assert hosts["a"].folder.lines("dead") == frozenset()


def test_a_line_that_is_cut_short_by_a_kill_is_not_heard(hosts):
    with socket.create_connection((HERE, hosts["a"].port)) as link:
        link.sendall(b"secret\nhost d 127.0.0.1 1\nleft 3\ndead 12")  # of 123
        until(lambda: "d" in hosts["a"].peers and hosts["a"].peers["d"].left == 3)
    until(lambda: hosts["a"].folder.lines("dead") == {"d"})


def test_a_peer_that_cannot_be_reached_at_first_is_tried_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(witness, "_RETRY_EVERY_S", 0.05)
    with socket.create_server((HERE, 0)) as taken:
        port = taken.getsockname()[1]
    late = Witness("b", HERE, HostFolder(tmp_path), "secret")
    late.start((HERE, port))  # nobody listens there yet
    said = ""

    def was_said() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return f"no link to {HERE}:{port}" in said

    until(was_said)
    with socket.create_server((HERE, port)) as listening:
        listening.settimeout(10)
        link, _ = listening.accept()
        with link, link.makefile("rb") as lines:
            assert lines.readline() == b"secret\n"
            assert lines.readline().startswith(b"host b ")
    late.stop()


def test_a_stranger_is_not_heard(hosts):
    with socket.create_connection((HERE, hosts["a"].port)) as stranger:
        stranger.sendall(b"wrong!\n")
        assert stranger.recv(10) == b""
    assert "d" not in hosts["a"].peers


def test_cutting_off_a_host_ends_this_process_connections_with_it(server):
    with socket.create_connection(server.getsockname()) as client:
        there, _ = server.accept()
        with there:
            rank.cut_off(frozenset({"192.0.2.77"}))
            client.sendall(b"still")
            assert there.recv(10) == b"still"
            rank.cut_off(frozenset({HERE}))
            assert client.recv(10) == b""


def test_a_rank_leaves_with_its_witness_and_where_it_is_no_majority(tmp_path, monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as process:
        settings = {"FOLDER": str(tmp_path), "HOST": "a", "WITNESS_PID": str(process.pid)}
        for name, value in settings.items():
            monkeypatch.setenv(getattr(rank, name), value)
        on_host = rank.RankOnHost.if_any()
        assert on_host is not None
        look = rank.HostWatch(on_host, lambda hosts: "b" not in hosts)
        assert look() is None
        on_host.folder.write_lines("silent", ["b"])
        assert "no sign of life from b" in look()
        assert on_host.folder.has("no_quorum")
        process.kill()
    assert look() == "its host's witness has ended"


def test_another_host_keeps_its_temporary_files_where_the_launcher_would(tmp_path, monkeypatch):
    """Not in the folder that mpirun is given, which goes with the launcher: srun hands all on."""
    for before in ({}, {"TMPDIR": "/scratch"}):
        monkeypatch.setenv("TMPDIR", "/tmp/recover-x/tmp")
        settings = {
            "python": "python",
            "remote_shell": ["sh", "-c", "cat >/dev/null; echo ${TMPDIR-none}"],
            "directory": str(tmp_path),
            "temporary": before,
        }
        with (tmp_path / "log").open("wb") as log:
            assert agent.start_remote(settings, "b", {}, log).wait() == 0
        assert (tmp_path / "log").read_text() == before.get("TMPDIR", "none") + "\n"


def test_without_a_witness_there_is_nothing_to_do():
    assert rank.RankOnHost.if_any() is None


def test_addresses_of_this_host():
    assert address_towards("localhost") == HERE
    assert HERE not in own_addresses()


@pytest.mark.parametrize(
    ("ranks", "cut", "no_quorum", "left"),
    [
        (None, True, False, False),  # they have not begun
        (2, True, True, False),
        (0, False, False, False),  # mpirun will end the daemon
        (0, True, False, True),
        (0, False, True, True),
    ],
)
def test_when_the_daemon_waits_for_orders_that_will_not_come(ranks, cut, no_quorum, left):
    assert relay.nothing_is_left(ranks, cut, no_quorum) == left


def test_what_a_host_does_in_the_lost_launchers_place():
    orphaned = {"": ["scancel", "7"], "5": ["scontrol", "requeue", "7"]}
    assert relay.duty(orphaned, "0", no_quorum=False) == ["scancel", "7"]
    assert relay.duty(orphaned, "5", no_quorum=False) == ["scontrol", "requeue", "7"]
    assert relay.duty(orphaned, "5", no_quorum=True) is None
    assert relay.duty(orphaned, "", no_quorum=False) is None
    assert relay.duty({}, "0", no_quorum=False) is None
