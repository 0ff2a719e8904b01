#!/bin/sh
# Makes a virtual environment, or leaves one that works as it is: make_venv.sh FOLDER [PYTHON]
set -eu
folder=$1
if [ -e "$folder" ] && ! "$folder/bin/python" -c '' 2>/dev/null; then
  echo "$folder is broken (its Python is gone); making it anew"
  rm -rf "$folder"
fi
found=
for candidate in ${2:-python3 python3.13 python3.12 python3.11}; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$candidate; break; fi
done
if [ -z "$found" ]; then
  echo "Forebay needs Python 3.11 or newer; found: $("${2:-python3}" --version 2>&1 | head -n 1)" >&2
  echo "Install one (Debian 12 and later: apt-get install python3 python3-venv), or: make PYTHON=/path/to/python3.11 …" >&2
  exit 1
fi
if ! "$found" -c 'import ensurepip, venv' >/dev/null 2>&1; then
  echo "$found cannot make virtual environments: its modules venv and ensurepip are missing." >&2
  echo "On Debian and Ubuntu: apt-get install python3-venv" >&2
  exit 1
fi
echo "making $folder with $("$found" --version)"
"$found" -m venv "$folder"
