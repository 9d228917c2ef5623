"""A trainer that is killed, and kills: the program of the soak, see `test_soak`.

It delivers the batches of one endless order, whatever happens to it and its workers. It writes
down what it gets, saves its state now and then, and tells how much it holds.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset

LANES = 6
MEASURE_STEPS = 40
"""Steps between two measurements."""


class Encoder(DefaultTaskEncoder):
    """Batches with an array that goes through shared memory, and random numbers of the sample."""

    def encode_sample(self, sample):
        noise = self.current_rng.integers(0, 255, 30_000, dtype=np.uint8)
        return {"key": sample["__key__"], "noise": noise}

    def batch(self, samples):
        return {
            "keys": [sample["key"] for sample in samples],
            "noise": np.stack([sample["noise"] for sample in samples]),
        }


def make_loader(path, *, workers, kind="process", state=None):
    """A loader over the blend at `path`, at the beginning or where `state` was saved."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers, lanes=LANES, seed_offset=5)
    dataset = get_train_dataset(
        path,
        worker_config=config,
        task_encoder=Encoder(),
        batch_size=3,
        shuffle_buffer_size=20,
        max_samples_per_sequence=7,
    )
    loader = get_savable_loader(dataset, workers=kind)
    if state is not None:
        loader.restore_state_rank(state)
    return loader


def digest(batch):
    """What tells a batch from every other."""
    return f"{','.join(batch['keys'])}:{int(batch['noise'].astype(np.int64).sum())}"


def holdings():
    """What this process holds: descriptors, threads, memory of its own, shared memory."""
    gc.collect()
    names = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{name}"))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(names),
        "shared": sum("/memfd:energon" in name for name in names) + maps.count("/memfd:energon"),
        "threads": int(status["Threads"]),
        "memory_mb": int(status["RssAnon"].split()[0]) / 1024,
    }


def kill_somebody(loader, rng):
    """Kill a worker, or the process that starts them."""
    pids = [pid for worker in loader._workers if (pid := getattr(worker, "pid", None))]
    if not pids:
        return
    victim = rng.choice(pids)
    with suppress(OSError):
        if rng.random() < 0.1:
            parent = int(Path(f"/proc/{victim}/stat").read_text().rpartition(")")[2].split()[1])
            if b"fork_server" in Path(f"/proc/{parent}/cmdline").read_bytes():
                victim = parent
        os.kill(victim, signal.SIGKILL)


def save(loader, step, path):
    """Save the state as training programs do: whole or not at all."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps({"step": step, "state": loader.save_state_rank()}))
    os.replace(temporary, path)


def main(path, folder, seed, seconds, measurements):
    """Train until `seconds` have passed and so many measurements are made, or until killed."""
    folder, rng = Path(folder), random.Random(seed)
    end = time.monotonic() + float(seconds)
    state_path = folder / "state.json"
    saved = json.loads(state_path.read_text()) if state_path.exists() else {"step": 0}
    step, state = saved["step"], saved.get("state")
    kind = rng.choice(["process", "process", "process", "thread"])
    workers = rng.randint(1, 3)
    with open(folder / "steps", "a") as steps, open(folder / "holdings", "a") as held:
        loader = make_loader(path, workers=workers, kind=kind, state=state)
        kept, left, kills = [], int(measurements), 0
        while left > 0 or time.monotonic() < end:
            for batch in loader:
                steps.write(f"{step} {digest(batch)}\n")
                steps.flush()
                step += 1
                kept = [*kept[-rng.randint(0, 5) :], batch]
                if rng.random() < 0.03:
                    save(loader, step, state_path)
                if rng.random() < 0.01:
                    kill_somebody(loader, rng)
                    kills += 1
                if step % MEASURE_STEPS == 0:
                    left -= 1
                    about = {"pid": os.getpid(), "kind": kind, "kills": kills, "step": step}
                    held.write(json.dumps({**about, **holdings()}) + "\n")
                    held.flush()
                over = left <= 0 and time.monotonic() > end
                if over or rng.random() < 0.003:
                    break
            state = json.loads(json.dumps(loader.save_state_rank()))
            kept.clear()
            loader.close()
            loader = make_loader(path, workers=workers, kind=kind, state=state)
        save(loader, step, state_path)
        loader.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
