#!/bin/sh
# AWS CLI: copy a folder to the bucket through Forebay, and copy it back.
#
#     export AWS_ENDPOINT_URL=http://127.0.0.1:9000      # Forebay: the only change
#     sh examples/aws_cli.sh s3://bucket/examples
set -eu
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
folder="${1%/}/aws-cli-$(basename "$work")"      # whatever else lies there
mkdir "$work/source"
for name in a b c; do echo "content of $name" > "$work/source/$name.txt"; done

aws s3 sync --only-show-errors "$work/source" "$folder"
aws s3 ls "$folder/"
aws s3 sync --only-show-errors "$folder" "$work/target"
diff -r "$work/source" "$work/target"
echo "ok: 3 objects"
