#!/usr/bin/env bash
# The parts of `make release` around its tests and builds. Nothing is uploaded.
#
#     .github/release.sh check     the tree, the tag, CHANGELOG.md and CITATION.cff are ready for the version
#     .github/release.sh finish    writes the SBOM and the tag's message, and prints the commands that release
set -euo pipefail
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' src/flatout/__init__.py)
tag=v$version

reject() {
    echo "release: $1" >&2
    exit 1
}

# The section of this version, without its heading, which must have a date.
section() {
    awk -v heading="^## ${version//./[.]} [(][0-9]+-[0-9]+-[0-9]+[)]$" \
        '/^## / {inside = 0} inside; $0 ~ heading {inside = 1}' CHANGELOG.md
}

check() {
    local changed tagged
    changed=$(git status --porcelain)
    [ -z "$changed" ] || reject "the working tree has changes, so the wheel would be of no commit. Commit or stash them:
$changed"
    # In the workflow that publishes, the tag is there, at this commit.
    if tagged=$(git rev-parse --verify --quiet "refs/tags/$tag^{commit}") && [ "$tagged" != "$(git rev-parse HEAD)" ]; then
        reject "$tag is already the tag of ${tagged:0:12}. Raise __version__ in src/flatout/__init__.py."
    fi
    [ -n "$(section)" ] || reject "CHANGELOG.md has no section for this version. Add '## $version (YYYY-MM-DD)' with what changed."
    grep --quiet --line-regexp --fixed-strings "version: $version" CITATION.cff ||
        reject "CITATION.cff names another version. Write 'version: $version' there."
}

finish() {
    local sbom=build/release/flatout.cdx.json message=build/release/tag.md files
    check # the tests and builds left the tree as it was
    files=$(ls dist/flatout-"$version"-*.whl dist/flatout-"$version".tar.gz site/index.html)
    rm -rf build/release
    # What the wheel brings along, in an environment that has nothing else, not even pip.
    "${PYTHON:-python3}" -m venv --without-pip build/release/wheel
    "${PYTHON:-python3}" -m venv build/release/tools
    build/release/tools/bin/python -m pip install --quiet "cyclonedx-bom>=7,<8"
    build/release/tools/bin/python -m pip --python build/release/wheel/bin/python install --quiet dist/flatout-"$version"-*.whl
    rm build/release/wheel/lib/python*/site-packages/flatout-"$version".dist-info/direct_url.json # a path of this machine
    build/release/tools/bin/cyclonedx-py environment build/release/wheel/bin/python \
        --output-reproducible --output-format JSON --output-file "$sbom"
    { printf 'flatout %s\n' "$version"; section; } > "$message"
    printf '\n%s is ready:\n%s\n%s\n' "$version" "$files" "$sbom"
    printf 'To release it, which the workflow does at the tag:\n'
    printf '  git tag --annotate --cleanup=verbatim --file %s %s\n  git push origin %s\n' "$message" "$tag" "$tag"
}

case ${1-} in
check | finish) "$1" ;;
*) reject "write '.github/release.sh check' or '.github/release.sh finish'; 'make release' runs both." ;;
esac
