#!/bin/sh
# Install what the reliability tests use beside Python, where that may be done: strace, and the tools for ext4 and XFS.
# With --browser it is Debian's Chromium instead, which needs 400 MB: only tests that take long open a browser.
# Whatever is missing then, the tests that need it say so.
# Usage: proof-tools.sh [--browser]
cd "$(dirname "$0")/.." || exit
if [ "${1:-}" = --browser ]; then
    command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
        scripts/apt-install.sh chromium
    exit 0
fi
PATH=$PATH:/usr/sbin:/sbin
command -v strace >/dev/null || scripts/apt-install.sh strace
command -v mkfs.xfs >/dev/null || scripts/apt-install.sh xfsprogs
command -v rsync >/dev/null || scripts/apt-install.sh rsync
command -v ip >/dev/null || scripts/apt-install.sh iproute2
command -v mkfs.ext4 >/dev/null || scripts/apt-install.sh e2fsprogs
exit 0
