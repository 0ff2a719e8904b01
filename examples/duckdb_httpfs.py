"""DuckDB: SQL over Parquet in a bucket, by its extension httpfs, through Forebay.

export AWS_ENDPOINT_URL=http://127.0.0.1:9000
python examples/duckdb_httpfs.py s3://bucket/examples
"""

from __future__ import annotations

import os
import sys
import uuid
from urllib.parse import urlsplit

import duckdb

gateway = urlsplit(os.environ["AWS_ENDPOINT_URL"])
sql = duckdb.connect()
extension = os.environ.get("HTTPFS_FILE")  # where there is no way to extensions.duckdb.org
if extension is None:
    sql.install_extension("httpfs")
sql.load_extension(extension or "httpfs")
options = {
    "KEY_ID": os.environ["AWS_ACCESS_KEY_ID"],
    "SECRET": os.environ["AWS_SECRET_ACCESS_KEY"],
    "REGION": os.environ.get("AWS_REGION", "us-east-1"),
    "ENDPOINT": gateway.netloc,  # Forebay: DuckDB does not read AWS_ENDPOINT_URL
    "URL_STYLE": "path",  # Forebay: the bucket stands in the path, unless base_domains are set
}
given = ", ".join(f"{name} '{value}'" for name, value in options.items())
use_ssl = str(gateway.scheme == "https").lower()  # Forebay: plain HTTP on this node
sql.execute(f"CREATE SECRET (TYPE s3, {given}, USE_SSL {use_ssl})")

folder = f"{sys.argv[1].rstrip('/')}/duckdb-{uuid.uuid4().hex[:8]}"  # whatever else lies there
file = f"{folder}/part-0.parquet"
sql.execute(f"COPY (SELECT range AS id, range % 10 AS label FROM range(100000)) TO '{file}' (FORMAT parquet)")
for _ in range(2):
    assert sql.execute(f"SELECT count(*) FROM '{file}' WHERE label = 3").fetchall() == [(10_000,)]
print("ok: 10000 rows")
