#!/bin/sh
# Print the home of a Java that Spark can run on (17 or newer), or nothing where there is none.
# Usage: java-home.sh [--install]   With --install, a missing Java is installed where that is allowed; where it is not,
# one line on standard error says what to install. The exit status is 0 either way: only Spark needs Java.
set -u

major_version() { # java -version says `version "17.0.15"`, or "1.8.0_402" for Java 8
    "$1/bin/java" -version 2>&1 | sed -n 's/.* version "\([0-9]*\).*/\1/p' | head -n 1
}

find_java() {
    on_path=$(command -v java) && on_path=$(readlink -f "$on_path" 2>/dev/null) && on_path=${on_path%/bin/java}
    for home in \
        "${JAVA_HOME:-}" \
        "${on_path:-}" \
        /usr/lib/jvm/* \
        /Library/Java/JavaVirtualMachines/*/Contents/Home \
        /opt/homebrew/opt/openjdk*/libexec/openjdk.jdk/Contents/Home \
        /usr/local/opt/openjdk*/libexec/openjdk.jdk/Contents/Home; do
        [ -n "$home" ] && [ -x "$home/bin/java" ] || continue
        version=$(major_version "$home")
        [ "${version:-0}" -ge 17 ] && echo "$home" && return
    done
    return 1
}

find_java && exit 0
[ "${1:-}" = --install ] || exit 0
if "$(dirname "$0")/apt-install.sh" openjdk-17-jre-headless openjdk-21-jre-headless openjdk-25-jre-headless default-jre-headless; then
    find_java && exit 0
fi
echo "setup: no Java 17 or newer, so Spark is left out; to have it: apt-get install openjdk-17-jre-headless (Debian, Ubuntu) or brew install openjdk@17 (macOS)" >&2
