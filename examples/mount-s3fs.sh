#!/bin/sh
# s3fs: mount a prefix of a bucket through Forebay. Each file is an object of its own, which s3fs sends when it is closed.
#
#     export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay
#     sh examples/mount-s3fs.sh s3://bucket/files /mnt/files
#     umount /mnt/files                                  # or, without root: fusermount3 -u /mnt/files
set -eu
path="${1#s3://}" mountpoint="$2"
path="${path%/}"
case "$path" in */*) source="${path%%/*}:/${path#*/}" ;; *) source="$path" ;; esac

# Forebay: `url` and path style. notsup_compat_dir leaves out questions about directories as other tools mark them.
s3fs "$source" "$mountpoint" \
  -o "url=$AWS_ENDPOINT_URL" -o use_path_request_style -o "endpoint=${AWS_REGION:-us-east-1}" -o sigv4 -o listobjectsv2 \
  -o complement_stat -o notsup_compat_dir -o connect_timeout=10 -o retries=2
echo "ok: $1 is mounted at $mountpoint"
