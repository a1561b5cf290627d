#!/bin/sh
# Install what the reliability tests use beside Python, where that may be done: strace, and the tools for ext4 and XFS.
# Whatever is missing then, the tests that need it say so.
cd "$(dirname "$0")/.." || exit
PATH=$PATH:/usr/sbin:/sbin
command -v strace >/dev/null || scripts/apt-install.sh strace
command -v mkfs.xfs >/dev/null || scripts/apt-install.sh xfsprogs
command -v rsync >/dev/null || scripts/apt-install.sh rsync
command -v ip >/dev/null || scripts/apt-install.sh iproute2
command -v mkfs.ext4 >/dev/null || scripts/apt-install.sh e2fsprogs
exit 0
