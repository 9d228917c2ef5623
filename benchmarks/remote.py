"""Measure training from an object store: ours, a plain range reader, and the peers.

    make servers && benchmarks/peers.sh
    .venv/bin/python benchmarks/remote.py [--rounds 5] [--only WORD] [--peers PYTHON]

A real S3 server on this machine is made distant by a proxy: every request and every new
connection takes 30 ms longer, and all answers together come at 200 MB/s. All contenders read the
same images, of about 64 kB; those that shuffle by slices read slices of 64. Every figure comes
from a fresh process. Writes a section of docs/benchmarks.md. Five rounds take eight minutes.
Many requests share the link and end together, so shorter windows would see one burst more or less.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data import write
from results import (
    ROOT,
    Benchmark,
    Case,
    Results,
    in_fresh_process,
    middle,
    ratio,
    rounds_of,
    shown,
    versions_of,
)

sys.path.insert(0, str(ROOT))

LATENCY_SECONDS = 0.03
BYTES_PER_SECOND = 200e6
WARM_SECONDS = 2.0
"""After these, what was read ahead before the first batch is used up."""
IMAGES = 6000
SLICE = 64
LAYOUTS = {"large": 15, "slices": -(-IMAGES // SLICE), "small": -(-IMAGES // (SLICE // 2))}
"""Shards of each layout: of 400 images, of a slice, and of half a slice."""
BUCKET = "bench"
PLAIN = "plain range reader, 16 threads"
OURS, WEBDATASET, MEGATRON = "energon (this)", "webdataset over pipe:curl", "Megatron-Energon"
ADAPTERS = {
    PLAIN: "plain_ranges",
    OURS: "ours_remote",
    WEBDATASET: "web_dataset_curl",
    MEGATRON: "megatron_energon",
}


def main() -> None:
    """Measure, and write the tables."""
    parser = BENCHMARK.parser(__doc__, data="remote")
    parser.add_argument("--seconds", type=float, default=3.0, help="that each is measured for")
    arguments = BENCHMARK.parsed(parser)
    make_data(arguments.data)
    versions = versions_of(sys.executable, energon="energon-loader", obstore="obstore")
    versions |= versions_of(
        arguments.peers, **{"webdataset": "webdataset", MEGATRON: "megatron-energon"}
    )
    with distant_server(arguments.data) as (port, environment):

        def measure(case: Case) -> dict[str, Any]:
            is_peer = case["reader"] in (WEBDATASET, MEGATRON)
            command = [arguments.peers if is_peer else sys.executable]
            command += [str(ROOT / "benchmarks/measure.py"), ADAPTERS[case["reader"]]]
            command += [address(case, port), "--workers", str(case["workers"])]
            command += ["--seconds", str(arguments.seconds), "--warm", str(WARM_SECONDS)]
            return in_fresh_process(command, peer=is_peer, **environment)

        BENCHMARK.run(arguments, cases(), measure, versions, seconds=arguments.seconds)


def cases() -> Iterator[Case]:
    """Yield who reads which layout, the plain reader first."""
    for layout in LAYOUTS:
        for workers in (0,) if layout == "slices" else (0, 2):
            for reader in ADAPTERS:
                # On other layouts, Megatron-Energon waits too long for its first batch.
                is_left_out = reader == MEGATRON and layout != "large"
                if not is_left_out and not (reader == PLAIN and workers):  # it has threads
                    yield {"layout": layout, "reader": reader, "workers": workers}


def address(case: Case, port: int) -> str:
    """Return where a reader finds the shards of a layout."""
    layout = case["layout"]
    curl = (
        f"http://127.0.0.1:{port}/{BUCKET}/{layout}/image-{{00000..{LAYOUTS[layout] - 1:05}}}.tar"
    )
    ways = {WEBDATASET: curl, MEGATRON: f"msc://{BUCKET}/{layout}"}
    return ways.get(case["reader"], f"s3://{BUCKET}/{layout}")


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


def tables(results: Results) -> str:
    """Return a table for each layout."""
    lines = []
    for layout, num_shards in LAYOUTS.items():
        lines += [
            f"Shards of {IMAGES // num_shards} images:",
            "",
            "| reader | images/s | of the plain reader | energon is | first batch |",
            "|---|---:|---:|---:|---:|",
        ]
        plain = rounds_of(results, layout=layout, reader=PLAIN)
        for case in (each for each in cases() if each["layout"] == layout):
            found = rounds_of(results, **case)
            ours = rounds_of(results, **{**case, "reader": OURS})
            name, speed = case["reader"], "samples_per_second"
            if name != PLAIN:
                name += ", 2 workers" if case["workers"] else ", in-line"
            is_other = case["reader"] in (WEBDATASET, MEGATRON)
            ahead = f"{ratio(ours, found, speed):.1f}x" if is_other else ""
            lines.append(
                f"| {name} | {shown(found, speed)} | {ratio(found, plain, speed):.0%} | {ahead} "
                f"| {middle(found, 'first_batch_seconds'):.2f} s |"
            )
        lines.append("")
    return "\n".join(lines).rstrip()


BENCHMARK = Benchmark(
    __file__,
    tables,
    conditions="readers kept nothing of the shards from an earlier run",
    page="benchmarks.md",
)

if __name__ == "__main__":
    main()
