"""The parsers in Python that see bytes of others: whatever comes, they refuse it in their own words or understand it.

Mutants of valid bytes, the same in every run: handshakes and advertisements before anything is proven, frames and
requests of the store, peer info and agents' frames after it. The core's parser replays its corpus under sanitizers.
"""

import json
import os
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import fuzz_build
import make_corpus
import pytest
from skips import no_compiler

from horo.bootstrap.auth.frames import Opener, Sealer, pack_fields, unpack_fields
from horo.bootstrap.auth.handshake import _HELLO, Acceptor, HandshakeError
from horo.bootstrap.host.identity import read_identity
from horo.bootstrap.launchers import slurm_store
from horo.bootstrap.launchers.variables import Launch
from horo.bootstrap.net.addresses import Endpoint, parse_endpoints
from horo.bootstrap.peer_info import PeerInfo, check_agreement
from horo.config.table import Config
from horo.errors import HoroError
from horo.runner.agent.protocol import MAGIC, Kind, MessageError, MessageReader, encode, encode_json

SECRET = bytes(range(32))
MUTANTS = 400
ODD = (b"[", b"{", b'"', b"\0", b"-1", b"1e999", b"null", b"70000", b"9" * 30, b"9" * 6000, b"[" * 100_000)
PLACE = ("10.0.0.1", 4711)
HELLO = _HELLO.pack(
    b"HORO", 3, 4, 0, 1, 0, 1, 0, bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1]), PLACE[1], bytes(range(32))
)
PEER_INFO = PeerInfo.of(Launch("none", 0, 2, "host"), Config(), read_identity("label"), "10.0.0.1", "1+abi1").encode()


def mutants(data: bytes) -> Iterator[bytes]:
    """Cut, changed, enlarged, put together: one to four damages each; and each number by itself, as something else."""
    for found in re.finditer(rb"-?\d+", data):
        for other in ODD:
            yield data[: found.start()] + other + data[found.end() :]
    rng = random.Random(5)
    for _ in range(MUTANTS):
        mutant = bytearray(data)
        for _ in range(rng.randrange(1, 5)):
            start = rng.randrange(len(mutant) + 1)
            count = rng.randrange(1, 9)
            damage = rng.randrange(6)
            if damage == 0:
                del mutant[start:]
            elif damage == 1:
                mutant[start : start + count] = rng.randbytes(count)
            elif damage == 2:
                mutant[start : start + 4] = b"\xff" * 4
            elif damage == 3:
                del mutant[start : start + count]
            elif damage == 4:
                mutant[start:start] = mutant[: start + count]
            else:
                mutant[start:start] = rng.choice(ODD)
        yield bytes(mutant)


def handshake(data: bytes) -> None:
    acceptor = Acceptor(SECRET, PLACE)
    while data and acceptor.result is None:
        data, part = data[acceptor.missing_bytes :], data[: acceptor.missing_bytes]
        acceptor.feed(part)
    assert acceptor.result is None, "somebody without the secret was let in"


def advertisement(data: bytes) -> None:
    info = slurm_store._decode(data, "7.0/1")
    if info is not None:
        assert info.name == "7.0/1"
        assert all(0 < endpoint.port < 65536 for endpoint in info.endpoints)


def store_frames(data: bytes) -> None:
    for payload in Opener(SECRET).feed(data):
        assert payload == b"payload", "a frame without a MAC was accepted"


def fields(data: bytes) -> None:
    assert pack_fields(unpack_fields(data)) == data


def peer_info(data: bytes) -> None:
    check_agreement([PEER_INFO, data], lambda rank, host: f"rank {rank} ({host})")


def agent_frames(data: bytes) -> None:
    for frame in MessageReader(magic=True).feed(data):
        frame.json()


def endpoints(data: bytes) -> None:
    parse_endpoints(data.decode("utf-8", "replace"))


PARSERS: dict[str, tuple[Callable[[bytes], None], bytes, tuple[type[Exception], ...]]] = {
    "handshake": (handshake, HELLO + bytes(32), (HandshakeError,)),
    "advertisement": (advertisement, slurm_store._StoreInfo("7.0/1", [Endpoint(*PLACE)], SECRET).encode(), ()),
    "store frames": (store_frames, Sealer(SECRET).seal(b"payload"), (HandshakeError,)),
    "fields": (fields, pack_fields([b"key", b"", b"value"]), (ValueError,)),
    "peer info": (peer_info, PEER_INFO, (HoroError, ValueError, KeyError, TypeError, AttributeError, RecursionError)),
    "agent frames": (
        agent_frames,
        MAGIC + encode_json(Kind.HOST_INFO, {"hostname": "h", "cpus": [0, 1]}) + encode(Kind.STDOUT, 3, b"text"),
        (MessageError,),
    ),
    "endpoints": (endpoints, b"10.0.0.1:4711,[fd00::1]:80", (HoroError,)),
}


@pytest.mark.parametrize("name", PARSERS)
def test_mutants_are_refused_or_understood(name: str) -> None:
    parse, valid, refusals = PARSERS[name]
    refused = 0
    for data in mutants(valid):
        try:
            parse(data)
        except refusals:
            refused += 1
    assert refused > 0 or not refusals


def test_an_advertisement_is_read_only_if_it_is_whole() -> None:
    whole = slurm_store._StoreInfo("7.0/1", [Endpoint(*PLACE)], SECRET).encode()
    assert slurm_store._decode(whole, "7.0/1") is not None
    assert json.loads(whole)["secret"] == SECRET.hex()
    assert all(slurm_store._decode(whole[:length], "7.0/1") is None for length in range(len(whole)))


ENVIRONMENT = {**os.environ, "ASAN_OPTIONS": "detect_leaks=1", "LD_PRELOAD": ""}
needs_compiler = pytest.mark.skipif(bool(no_compiler()), reason=no_compiler())
PROBE = """
#include <stdlib.h>
#include <stdint.h>
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    return data[size] == 1;
}
"""


def run(program: Path, files: list[Path]) -> subprocess.CompletedProcess[str]:
    command = [str(program), *map(str, files)]
    return subprocess.run(command, env=ENVIRONMENT, check=False, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := no_compiler():
        pytest.skip(reason)
    program = tmp_path_factory.mktemp("fuzz") / "replay"
    fuzz_build.build("replay", program)
    return program


def test_the_whole_corpus_replays_clean(replay: Path) -> None:
    files = sorted(make_corpus.FOLDER.iterdir())
    result = run(replay, files)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout == f"{len(files)} files\n"


def test_the_generated_corpus_is_the_one_that_the_script_writes() -> None:
    kept = {p.name: p.read_bytes() for p in make_corpus.FOLDER.iterdir() if not p.name.startswith("found-")}
    assert kept == make_corpus.corpus()


@needs_compiler
def test_the_replay_sees_a_read_past_the_end_of_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, program, data = tmp_path / "probe.c", tmp_path / "probe", tmp_path / "input"
    source.write_text(PROBE)
    data.write_bytes(b"abc")
    monkeypatch.setattr(fuzz_build, "SOURCES", [source])
    fuzz_build.build("replay", program)
    result = run(program, [data])
    assert result.returncode != 0
    assert "heap-buffer-overflow" in result.stderr
