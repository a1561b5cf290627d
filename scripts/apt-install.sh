#!/bin/sh
# Install the first of the named Debian packages that the system knows; needs root or a sudo that asks for no password.
# Usage: apt-install.sh PACKAGE...   Exit status 1, without a word, where this is not Debian or may not be done.
# LOGLIB_INSTALL=no keeps it from installing anything.
set -u

if [ "${LOGLIB_INSTALL:-}" = no ]; then
    echo "setup: not installing the system package $1, since LOGLIB_INSTALL=no" >&2
    exit 1
fi
command -v apt-get >/dev/null || exit 1
if [ "$(id -u)" = 0 ]; then
    as_root="env"
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    as_root="sudo -n env"
else
    exit 1
fi

$as_root DEBIAN_FRONTEND=noninteractive apt-get update -qq >/dev/null 2>&1 # a stale list is still worth a try
for package in "$@"; do
    echo "setup: installing the system package $package, by apt-get (LOGLIB_INSTALL=no keeps it from that)" >&2
    $as_root DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1 && exit 0
done
exit 1
