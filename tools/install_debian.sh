#!/bin/sh
# Makes a program of Debian's available: install_debian.sh PROGRAM [PACKAGE [FILE FOLDER]]
# With FILE, only that file of the package is copied to FOLDER, and nothing is installed.
set -eu
program=$1 package=${2:-$1}
command -v "$program" >/dev/null && exit 0
if [ $# -eq 4 ] && [ -x "$4/$program" ]; then exit 0; fi
fail() { echo "$program is needed; on Debian: apt-get install $package" >&2; exit 1; }
if [ "$(id -u)" -eq 0 ]; then apt-get update -qq || fail; fi
if [ $# -eq 4 ]; then
  folder=$(mktemp -d) && chmod 755 "$folder"
  trap 'rm -rf "$folder"' EXIT
  { (cd "$folder" && apt-get download -qq "$package") && dpkg -x "$folder/$package"_*.deb "$folder" && cp "$folder/$3" "$4"; } || fail
else
  { [ "$(id -u)" -eq 0 ] && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package"; } || fail
fi
