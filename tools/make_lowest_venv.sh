#!/bin/sh
# Makes a virtual environment with the lowest versions that pyproject.toml allows: make_lowest_venv.sh FOLDER BIN
# The test tools may be new. aiobotocore decides about botocore, and so about boto3.
set -eu
export UV_SYSTEM_CERTS=1 UV_NATIVE_TLS=1 # the system's certificates, as pip takes them
folder=$1 bin=$2
"$bin/uv" venv -q --clear --python "$bin/python" "$folder"
"$bin/uv" pip compile -q --resolution lowest-direct --python "$bin/python" pyproject.toml -o "$folder/lowest.txt"
"$bin/uv" pip install -q --python "$folder/bin/python" -c "$folder/lowest.txt" -e . --group test
