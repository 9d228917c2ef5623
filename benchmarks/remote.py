"""Measure training from an object store: ours, a plain range reader, and the peers.

    make servers && benchmarks/peers.sh
    .venv/bin/python benchmarks/remote.py [--rounds 3] [--peers PYTHON]

A real S3 server on this machine is made distant by a proxy: every request and every new
connection takes 30 ms longer, and all answers together come at 200 MB/s. All contenders read the
same images, of about 64 kB; those that shuffle by slices read slices of 64. Every figure comes
from a fresh process; a round takes six minutes. Writes docs/benchmarks_remote.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from data import write

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LATENCY_SECONDS = 0.03
BYTES_PER_SECOND = 200e6
WARM_SECONDS = 4.0
IMAGES = 6000
SLICE = 64
LAYOUTS = {"large": 15, "slices": -(-IMAGES // SLICE), "small": -(-IMAGES // (SLICE // 2))}
"""Shards of each layout: of 400 images, of a slice, and of half a slice."""
BUCKET = "bench"
PAGE = ROOT / "docs" / "benchmarks_remote.md"
MARK = "<!-- made by benchmarks/remote.py -->"
PLAIN = "plain range reader, 16 threads"


class Contender(NamedTuple):
    """What is measured: an adapter in an interpreter, reading an address with some workers."""

    python: str
    adapter: str
    address: str
    workers: int


def main() -> None:
    """Measure, and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0, help="That each is measured for.")
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks" / "data-made" / "remote")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--only", help="Measure those with this in their name; write nothing.")
    arguments = parser.parse_args()
    make_data(arguments.data)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {layout: {} for layout in LAYOUTS}
    with distant_server(arguments.data) as (port, environment):
        for _ in range(arguments.rounds):
            for layout, num_shards in LAYOUTS.items():
                everyone = contenders(layout, num_shards, port, arguments.peers)
                for name, contender in everyone.items():
                    if arguments.only is None or arguments.only in name:
                        result = run(contender, arguments.seconds, environment)
                        found[layout].setdefault(name, []).append(result)
                        sys.stdout.write(f"{layout} shards, {name}: {result}\n")
    if arguments.only is None:
        write_tables(found)


def make_data(folder: Path) -> None:
    """Write and prepare the images, once in each layout."""
    from energon.prepare.dataset import prepare_dataset

    for layout, num_shards in LAYOUTS.items():
        write(folder / layout, "image", num_samples=IMAGES, num_shards=num_shards)
        if not (folder / layout / ".nv-meta").exists():
            prepare_dataset(
                folder / layout, split_parts=["train:.*"], sample_type="CrudeWebdataset"
            )


@contextmanager
def distant_server(folder: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Run an S3 server that holds `folder`; yields the port of its proxy and the environment."""
    import boto3

    from tests.servers.ceph import ceph_gateway
    from tests.servers.clouds import S3_KEY, S3_SECRET, make_bucket

    with ceph_gateway() as upstream, tempfile.TemporaryDirectory() as configs:
        make_bucket(upstream, BUCKET)
        keys = {"aws_access_key_id": S3_KEY, "aws_secret_access_key": S3_SECRET}
        client = boto3.client(
            "s3", endpoint_url=f"http://127.0.0.1:{upstream}", region_name="us-east-1", **keys
        )
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = str(path.relative_to(folder))
                client.upload_file(str(path), BUCKET, key, ExtraArgs={"ACL": "public-read"})
        command = [sys.executable, "-m", "tests.servers.proxy", str(upstream)]
        command += [str(LATENCY_SECONDS), str(BYTES_PER_SECOND)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as proxy:
            assert proxy.stdout is not None
            port = int(proxy.stdout.readline())
            url = f"http://127.0.0.1:{port}"
            config = Path(configs) / "msc.json"
            config.write_text(json.dumps(msc_config(url, S3_KEY, S3_SECRET)))
            environment = {
                "AWS_ENDPOINT_URL": url,
                "AWS_ACCESS_KEY_ID": S3_KEY,
                "AWS_SECRET_ACCESS_KEY": S3_SECRET,
                "AWS_REGION": "us-east-1",
                "MSC_CONFIG": str(config),
                # Nothing is known of the shards from an earlier run.
                "ENERGON_STORAGE_CACHE_DIR": str(Path(configs) / "cache"),
            }
            yield port, environment
            proxy.terminate()


def msc_config(url: str, key: str, secret: str) -> dict[str, Any]:
    """Return the configuration of Megatron-Energon's storage client."""
    provider = {"base_path": BUCKET, "endpoint_url": url, "region_name": "us-east-1"}
    credentials = {"access_key": key, "secret_key": secret}
    return {
        "profiles": {
            "bench": {
                "storage_provider": {"type": "s3", "options": provider},
                "credentials_provider": {"type": "S3Credentials", "options": credentials},
            }
        }
    }


def contenders(layout: str, num_shards: int, port: int, peers: str) -> dict[str, Contender]:
    """Return who is measured on a layout, the plain reader first."""
    curl = f"http://127.0.0.1:{port}/{BUCKET}/{layout}/image-{{00000..{num_shards - 1:05}}}.tar"
    s3, msc = f"s3://{BUCKET}/{layout}", f"msc://{BUCKET}/{layout}"
    chosen = {
        PLAIN: Contender(sys.executable, "plain_ranges", s3, 0),
        "energon (this), in-line": Contender(sys.executable, "ours_remote", s3, 0),
        "webdataset over pipe:curl, in-line": Contender(peers, "web_dataset_curl", curl, 0),
    }
    if layout != "slices":
        chosen |= {
            "energon (this), 2 workers": Contender(sys.executable, "ours_remote", s3, 2),
            "webdataset over pipe:curl, 2 workers": Contender(peers, "web_dataset_curl", curl, 2),
            "Megatron-Energon, in-line": Contender(peers, "megatron_energon", msc, 0),
            "Megatron-Energon, 2 workers": Contender(peers, "megatron_energon", msc, 2),
        }
    return chosen


def run(contender: Contender, seconds: float, environment: dict[str, str]) -> dict[str, Any]:
    """Measure one contender in a process of its own."""
    command = [contender.python, str(ROOT / "benchmarks/measure.py")]
    command += [contender.adapter, contender.address, "--workers", str(contender.workers)]
    # After the warm time, what was read ahead before the first batch is used up.
    command += ["--seconds", str(seconds), "--warm", str(WARM_SECONDS)]
    # Peers must not find our `megatron.energon`.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, env={**inherited, **environment}, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise SystemExit(f"{contender.adapter} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_tables(found: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    """Put the medians between the marks of the page."""
    tables = []
    for layout, results in found.items():
        rates = {name: _median(rounds, "samples_per_second") for name, rounds in results.items()}
        size = IMAGES // LAYOUTS[layout]
        tables.append(f"Shards of {size} images:\n")
        tables.append("| reader | images/s | of the plain reader | energon is | first batch |")
        tables.append("|---|---:|---:|---:|---:|")
        for name, rounds in results.items():
            first = _median(rounds, "first_batch_seconds")
            # Each is compared with ours of as many workers.
            mine = next((n for n in rates if n.startswith("energon") and n[-9:] == name[-9:]), "")
            ahead = f"{rates[mine] / rates[name]:.1f}x" if mine not in ("", name) else ""
            lines = f"| {name} | {rates[name]:,.0f} | {rates[name] / rates[PLAIN]:.0%} "
            tables.append(f"{lines}| {ahead} | {first:.2f} s |")
        tables.append("")
    head, _, rest = PAGE.read_text().partition(MARK)
    tail = rest.partition(f"{MARK}\n")[2]
    PAGE.write_text(f"{head}{MARK}\n\n" + "\n".join(tables) + f"\n{MARK}\n{tail}")


def _median(rounds: list[dict[str, Any]], name: str) -> float:
    return float(median(found[name] for found in rounds))


if __name__ == "__main__":
    main()
