# Sourced by .ci/*: the browser that the page is tested in. Where it is missing and cannot be installed, those tests skip.

if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium, for the tests of the page"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium fonts-noto-cjk fonts-dejavu; } \
        >/dev/null || echo "chromium could not be installed: the tests of the page will skip" >&2
fi
