"""safetensors: weights saved and loaded through Forebay with s3fs.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay: the only change, s3fs reads it
python examples/safetensors_s3fs.py s3://bucket/examples
"""

from __future__ import annotations

import sys
import uuid

import numpy
import s3fs
from safetensors.numpy import load, save

folder = f"{sys.argv[1].rstrip('/')}/model-{uuid.uuid4().hex[:8]}"  # whatever else lies there
path = f"{folder}/model.safetensors"
s3 = s3fs.S3FileSystem()
weights = {"embedding": numpy.random.default_rng(1).random((100, 300), dtype=numpy.float32)}

s3.pipe_file(path, save(weights))
for _ in range(2):
    loaded = load(s3.cat_file(path))
    assert numpy.array_equal(loaded["embedding"], weights["embedding"])
print("ok: 1 tensor")
