"""What hororun --check-hosts says of hosts."""

from __future__ import annotations

import socket
import sys
from contextlib import closing
from pathlib import Path

from jobs import Hororun, make_remote_shell

from horo import __version__
from horo.runner.network import listen, unreachable


def test_hosts_that_are_well_are_a_line_each(hororun: Hororun) -> None:
    done = hororun.run("--check-hosts", where="localhost,one,two:3")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["localhost", "one", "two"]
    assert all(f": ok: horo {__version__}, Python {sys.version.split()[0]}, " in line for line in lines)


def test_every_host_that_is_not_is_told_why(hororun: Hororun, tmp_path: Path) -> None:
    script = """case "$*" in
        *" two "*) echo 'ssh: connect to host two port 22: No route to host' >&2; exit 255;;
        *" three "*) exec sleep 60;;
    esac"""
    hororun.remote_shell = make_remote_shell(tmp_path, script)
    done = hororun.run("--check-hosts", "--start-timeout", "5", where="one,two,three")
    assert done.returncode == 69
    lines = done.stdout.splitlines()
    assert lines[0].startswith("one: ok: ")
    assert lines[1] == "two: cannot reach host two: ssh: connect to host two port 22: No route to host"
    assert lines[2].startswith("three: no answer within 5 s from three")


def test_a_version_and_a_directory_that_are_not_the_same_are_named(hororun: Hororun, tmp_path: Path) -> None:
    python = tmp_path / "python"
    run = "import runpy; runpy.run_module('horo.runner.agent', run_name='__main__', alter_sys=True)"
    python.write_text(f"#!{sys.executable}\nimport horo.version; horo.version.__version__ = '9.9'\n{run}\n")
    python.chmod(0o755)
    done = hororun.run("--check-hosts", "--remote-python", str(python), where="localhost,one")
    assert done.returncode == 78
    assert "one: host one has horo 9.9 but this host has" in done.stdout
    python.write_text(f"#!{sys.executable}\nimport pathlib; pathlib.Path.is_dir = lambda _: False\n{run}\n")
    done = hororun.run("--check-hosts", "--remote-python", str(python), where="localhost,one", cwd=tmp_path)
    assert done.returncode == 78
    assert f"one: there is no directory {tmp_path}, in which ranks would start\n" in done.stdout


def test_an_interface_that_is_not_there_is_named(hororun: Hororun) -> None:
    done = hororun.run("--check-hosts", "--network-interfaces", "nosuch0", where="localhost,one")
    assert done.returncode == 69
    assert done.stdout.count("--network-interfaces nosuch0: none of them has an address") == 2


def test_peers_that_do_not_answer_are_told_apart() -> None:
    with closing(listen()) as listener, socket.socket() as closed:
        port = listener.getsockname()[1]
        closed.bind(("127.0.0.1", 0))  # bound, but not listening: nobody else gets the port
        shut = closed.getsockname()[1]
        peers = {
            "a": [("127.0.0.1", port)],
            "b": [("127.0.0.1", shut)],
            "c": [("127.0.0.1", shut), ("127.0.0.1", port)],
        }
        assert unreachable(peers, 20) == {"b": f"127.0.0.1 port {shut}: Connection refused"}
