"""A real S3 server: Ceph's gateway, with one monitor and one storage daemon in memory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.servers.clouds import S3_KEY, S3_SECRET
from tests.servers.process import find_program, free_port, lack, wait_for_port

_CONFIG = """[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{monitor}
mon initial members = a
public addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
keyring = {folder}/keyring
run dir = {folder}/run
admin socket = {folder}/run/$name.asok
log file = /dev/null
pid file = {folder}/$name.pid
mon data = {folder}/mon
mon data avail warn = 1
mon data avail crit = 1
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4G
osd crush update on start = false
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
[client.rgw.a]
# Without nodelay, every answer on a kept connection comes 15 ms late.
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw data = {folder}/rgw
"""


@contextlib.contextmanager
def ceph_gateway() -> Iterator[int]:
    """Run the server; yields its port. It knows one user, S3_KEY."""
    for name in ("ceph-mon", "ceph-osd", "ceph", "radosgw", "radosgw-admin"):
        find_program(name)
    folder = Path(tempfile.mkdtemp(prefix="rgw-"))
    port = free_port()
    try:
        _start(folder, port)
        wait_for_port(port)
        yield port
    finally:
        for path in folder.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, port: int) -> None:
    for name in ("mon", "osd", "rgw", "run"):
        (folder / name).mkdir()
    fsid, monitor, osd = str(uuid.uuid4()), free_port(), str(uuid.uuid4())
    text = _CONFIG.format(folder=folder, fsid=fsid, monitor=monitor, port=port)
    (folder / "ceph.conf").write_text(text)

    def run(command: list[str]) -> None:
        try:
            subprocess.run(
                command,
                check=True,
                timeout=60,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "CEPH_CONF": str(folder / "ceph.conf")},
                text=True,
            )
        except (OSError, subprocess.SubprocessError) as exc:  # a library is missing, or memory
            lack("Ceph", f"{exc} {getattr(exc, 'stderr', None) or ''}")

    keyring, monmap = str(folder / "keyring"), str(folder / "monmap")
    address = f"[v2:127.0.0.1:{monitor}]"
    keys = [f"--access-key={S3_KEY}", f"--secret-key={S3_SECRET}"]
    create = ["ceph-authtool", keyring, "--gen-key", "-n"]
    steps: list[list[str]] = [
        ["ceph-authtool", "--create-keyring", *create[1:], "mon.", *_caps(mon="allow *")],
        [*create, "client.admin", *_caps(mon="allow *", osd="allow *", mgr="allow *")],
        [*create, "client.rgw.a", *_caps(mon="allow rw", osd="allow rwx")],
        [*create, "osd.0", *_caps(mon="allow profile osd", osd="allow *")],
        ["monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monmap],
        ["ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring],
        ["ceph-mon", "-i", "a"],
        ["ceph", "osd", "new", osd],
        ["ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd],
        ["ceph-osd", "-i", "0"],
        ["ceph", "osd", "crush", "add-bucket", "h", "host"],
        ["ceph", "osd", "crush", "move", "h", "root=default"],
        ["ceph", "osd", "crush", "add", "osd.0", "1.0", "host=h"],
        ["radosgw-admin", "user", "create", "--uid=t", "--display-name=t", *keys],
        ["radosgw", "-n", "client.rgw.a"],
    ]
    for step in steps:
        run(step)


def _caps(**caps: str) -> list[str]:
    return [word for name, value in caps.items() for word in ("--cap", name, value)]
