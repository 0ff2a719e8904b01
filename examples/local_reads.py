"""A data set whose samples are read from the gateway's files, without HTTP, a batch at a time; and fsspec's forebay://.

    python examples/local_reads.py s3://BUCKET/PREFIX

The gateway needs `server.local_socket`; FOREBAY_LOCAL_SOCKET names it, unless it is /run/forebay/read.sock. Without it,
all is read by HTTP, with a warning. With PyTorch, a DataLoader with two workers reads the data set.
"""

from __future__ import annotations

import hashlib
import os
import sys
import uuid
from collections.abc import Sequence

import fsspec

from forebay.local import Reader

SAMPLES, SIZE_BYTES, BATCH = 96, 100 * 1024, 16


class Samples:
    """A map-style data set of objects (`torch.utils.data.Dataset` asks for no base class)."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.keys = keys
        self.reader = Reader()  # Forebay: instead of a client of S3. Each worker of a DataLoader gets a connection

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, number: int) -> bytes:
        return bytes(self.reader.read(self.keys[number]))

    def __getitems__(self, numbers: Sequence[int]) -> list[bytes]:
        """Return a whole batch: PyTorch calls this, where it is there, once instead of once a sample."""
        return [bytes(one) for one in self.reader.read_many([self.keys[number] for number in numbers])]


def digests(samples: Sequence[bytes]) -> list[str]:
    return [hashlib.sha256(sample).hexdigest() for sample in samples]


def read_by_torch(samples: Samples) -> list[str] | None:
    """Return the digests of all samples, read by the workers of a DataLoader; None without PyTorch."""
    try:
        from torch.utils.data import DataLoader
    except ImportError:
        return None
    loader = DataLoader(samples, batch_size=BATCH, num_workers=2, collate_fn=digests)
    return [digest for batch in loader for digest in batch]


def main() -> None:
    bucket, _, prefix = sys.argv[1].removeprefix("s3://").rstrip("/").partition("/")
    folder = "/".join(part for part in (bucket, prefix, f"local-{uuid.uuid4().hex[:8]}") if part)
    # Forebay: forebay:// reads local files; writes and listings go through the gateway by s3fs.
    filesystem = fsspec.filesystem("forebay")
    bodies = {f"{folder}/{number:05d}.bin": os.urandom(SIZE_BYTES) for number in range(SAMPLES)}
    for key, body in bodies.items():
        filesystem.pipe_file(key, body)
    keys = sorted(f"{one}" for one in filesystem.ls(folder, detail=False))
    assert keys == sorted(bodies)
    samples = Samples(keys)
    for _ in range(2):
        for begin in range(0, SAMPLES, BATCH):
            numbers = range(begin, begin + BATCH)
            assert samples.__getitems__(numbers) == [bodies[keys[number]] for number in numbers]
    assert read_by_torch(samples) in (None, digests([bodies[key] for key in keys]))
    with fsspec.open(f"forebay://{keys[0]}") as file:
        file.seek(1000)
        assert file.read(500) == bodies[keys[0]][1000:1500]
    print(f"ok: {2 * SAMPLES} samples, {samples.reader.local_reads} of them from the gateway's files")


if __name__ == "__main__":
    main()
