#!/bin/sh
# rclone: mount a prefix of a bucket through Forebay. Each file is an object of its own. rclone keeps what is written in a
# cache of its own (~/.cache/rclone), sends it a second after the file is closed, and neither fsync nor umount waits for
# that: before you unmount, wait until its queue is empty, or files are lost.
#
#     export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay
#     sh examples/mount-rclone.sh s3://bucket/files /mnt/files
#     rclone rc --unix-socket ~/.cache/rclone-files.sock vfs/stats    # uploadsInProgress and uploadsQueued must be 0
#     umount /mnt/files                                               # or, without root: fusermount3 -u /mnt/files
set -eu
export RCLONE_CONFIG_FOREBAY_TYPE=s3 RCLONE_CONFIG_FOREBAY_PROVIDER=Other RCLONE_CONFIG_FOREBAY_ENV_AUTH=true
export RCLONE_CONFIG_FOREBAY_ENDPOINT="$AWS_ENDPOINT_URL" RCLONE_CONFIG_FOREBAY_REGION="${AWS_REGION:-us-east-1}"

socket="$HOME/.cache/rclone-$(basename "$2").sock"
mkdir -p ~/.cache && rm -f "$socket"      # one is left where rclone was killed
# --vfs-links keeps symbolic links, in objects whose names end in .rclonelink.
rclone mount "forebay:${1#s3://}" "$2" --daemon --daemon-wait 20s \
  --vfs-cache-mode writes --vfs-write-back 1s --vfs-links --dir-cache-time 10s \
  --rc --rc-addr "unix://$socket"
echo "ok: $1 is mounted at $2"
