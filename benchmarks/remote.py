"""Measure training from an object store: ours, a plain range reader, and the peers.

    make servers && benchmarks/peers.sh
    python benchmarks/remote.py [--rounds 3] [--scale 0.4] [--peers PYTHON]

A real S3 server on this machine is made distant by a proxy: every request takes 30 ms longer,
and all answers together come at 200 MB/s. All contenders read the same images, of about 70 kB;
those that shuffle by slices read slices of 64. Every figure comes from a fresh process.
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
from typing import Any

from data import SAMPLES, SHARDS, write

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LATENCY_SECONDS = 0.03
BYTES_PER_SECOND = 200e6
BUCKET = "bench"
MARK = "<!-- made by benchmarks/remote.py -->"


def main() -> None:
    """Measure, and write the table into docs/storage.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=0.4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--data", type=Path, default=ROOT / "benchmarks" / "data-made")
    parser.add_argument("--peers", default=str(ROOT / ".venv-peers" / "bin" / "python"))
    parser.add_argument("--only", help="Measure one contender only, and write nothing.")
    arguments = parser.parse_args()
    folder = make_data(arguments.data / "remote", arguments.scale)
    results: dict[str, list[dict[str, Any]]] = {}
    with distant_server(folder) as (port, environment):
        for _ in range(arguments.rounds):
            for name, contender in contenders(port, arguments.peers, folder).items():
                if arguments.only in (None, name):
                    found = run(*contender, seconds=arguments.seconds, environment=environment)
                    results.setdefault(name, []).append(found)
                    sys.stdout.write(f"{name}: {found}\n")
    if arguments.only is None:
        write_table(results)


def make_data(folder: Path, scale: float) -> Path:
    """Write and prepare the images."""
    from energon.prepare.dataset import prepare_dataset

    write(folder, "image", num_samples=int(SAMPLES["image"] * scale), num_shards=SHARDS["image"])
    if not (folder / ".nv-meta").exists():
        prepare_dataset(folder, split_parts=["train:.*"], sample_type="CrudeWebdataset")
    return folder


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
                key = f"images/{path.relative_to(folder)}"
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
            yield (
                port,
                {
                    "AWS_ENDPOINT_URL": url,
                    "AWS_ACCESS_KEY_ID": S3_KEY,
                    "AWS_SECRET_ACCESS_KEY": S3_SECRET,
                    "AWS_REGION": "us-east-1",
                    "MSC_CONFIG": str(config),
                },
            )
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


def contenders(port: int, peers: str, folder: Path) -> dict[str, tuple[str, str, str, int]]:
    """Return interpreter, adapter, address and workers of each contender."""
    last = len(list(folder.glob("*.tar"))) - 1
    shards = f"http://127.0.0.1:{port}/{BUCKET}/images/image-{{00000..{last:05}}}.tar"
    s3 = f"s3://{BUCKET}/images"
    return {
        "plain range reader, 16 threads": (sys.executable, "plain_ranges", s3, 0),
        "energon (this), in-line": (sys.executable, "ours_remote", s3, 0),
        "energon (this), 2 workers": (sys.executable, "ours_remote", s3, 2),
        "webdataset over pipe:curl, in-line": (peers, "web_dataset_curl", shards, 0),
        "webdataset over pipe:curl, 2 workers": (peers, "web_dataset_curl", shards, 2),
        "Megatron-Energon, in-line": (peers, "megatron_energon", "msc://bench/images", 0),
        "Megatron-Energon, 2 workers": (peers, "megatron_energon", "msc://bench/images", 2),
    }


def run(
    python: str,
    adapter: str,
    address: str,
    workers: int,
    *,
    seconds: float,
    environment: dict[str, str],
) -> dict[str, Any]:
    """Measure one contender in a process of its own."""
    command = [python, str(ROOT / "benchmarks/measure.py"), adapter, address]
    command += ["--workers", str(workers), "--seconds", str(seconds)]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
        timeout=300,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_table(results: dict[str, list[dict[str, Any]]]) -> None:
    """Put the medians where the mark is."""
    best = median(r["samples_per_second"] for r in next(iter(results.values())))
    lines = ["| reader | images/s | of the plain reader | first batch |", "|---|---:|---:|---:|"]
    for name, rounds in results.items():
        rate = median(found["samples_per_second"] for found in rounds)
        first = median(found["first_batch_seconds"] for found in rounds)
        lines.append(f"| {name} | {rate:,.0f} | {rate / best:.0%} | {first:.2f} s |")
    page = ROOT / "docs" / "storage.md"
    head, _, rest = page.read_text().partition(MARK)
    tail = rest.partition(f"{MARK}\n")[2]
    page.write_text(f"{head}{MARK}\n\n" + "\n".join(lines) + f"\n\n{MARK}\n{tail}")


if __name__ == "__main__":
    main()
