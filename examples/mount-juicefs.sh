#!/bin/sh
# JuiceFS: a POSIX file system whose data is in the bucket, in JuiceFS's own format, and whose names are in a database.
#
#     export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay
#     sh examples/mount-juicefs.sh s3://bucket/volume /mnt/files sqlite3:///var/lib/volume.db
#     umount /mnt/files
#
# Below s3://bucket/volume/ are JuiceFS's objects. The database is as precious as they are: without it they are no files.
# SQLite is for one node; Redis, PostgreSQL or MySQL (redis://…) for several.
set -eu
path="${1#s3://}" mountpoint="$2" database="$3"
path="${path%/}"
bucket="${path%%/*}" volume="${path#*/}"       # the volume's name: letters, digits, '-'
case "$database" in
  sqlite3://*\?*) ;;
  sqlite3://*) database="$database?_synchronous=FULL" ;;   # without it, fsync does not sync the names in SQLite
esac
export ACCESS_KEY="$AWS_ACCESS_KEY_ID" SECRET_KEY="$AWS_SECRET_ACCESS_KEY"

# Forebay: the bucket's URL. Formatting a volume that is there changes nothing.
juicefs format --storage s3 --bucket "$AWS_ENDPOINT_URL/$bucket" "$database" "$volume" --no-update

# --cache-size 0: Forebay is the cache. Without --writeback, fsync waits until Forebay has acknowledged.
juicefs mount "$database" "$mountpoint" --background --cache-size 0 --no-usage-report --log "$mountpoint.log"
echo "ok: $1 is mounted at $mountpoint"
