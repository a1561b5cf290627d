#!/bin/sh
# Run a stage of the proof, and note the commit on which it has passed. A stage that has passed on these files before is
# not run again, so a proof that was stopped continues.
# Usage: prove.sh STAGE   STAGE is a target of the Makefile. A note is a line of tests/reliability/proved: STAGE COMMIT.
# Nothing is noted if files differ from the commit, or with LOGLIB_SOAK.
set -u
cd "$(dirname "$0")/.." || exit
stage=$1
notes=tests/reliability/proved

is_same() { # the notes themselves do not count
    git diff --quiet "$@" -- . ":(exclude)$notes" 2>/dev/null
}

commit=$(git rev-parse HEAD 2>/dev/null)
[ -z "${LOGLIB_SOAK:-}" ] && is_same HEAD || commit=
passed_on=$(sed -n "s/^$stage //p" "$notes")
if [ -n "$commit" ] && [ -n "$passed_on" ] && is_same "$passed_on" HEAD; then
    echo "== $stage: passed on these files before"
    exit 0
fi
"${MAKE:-make}" --no-print-directory "$stage" || exit
if [ -n "$commit" ] && is_same "$commit"; then
    { grep -v "^$stage " "$notes"; echo "$stage $commit"; } | sort >"$notes.new" && mv "$notes.new" "$notes"
    echo "== $stage: passed; commit the file $notes"
fi
