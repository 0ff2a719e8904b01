#!/bin/sh
# Makes Azurite available, an emulator of Azure Blob: install_azurite.sh FOLDER. Needs node 18 or later, and npm.
set -eu
[ -f "$1/node_modules/azurite/dist/src/blob/main.js" ] && exit 0
folder=$(dirname "$0")
"$folder/install_debian.sh" node nodejs
"$folder/install_debian.sh" npm
mkdir -p "$1"
npm install --prefix "$1" --no-audit --no-fund --loglevel=error azurite@3.35.0
