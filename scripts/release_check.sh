#!/usr/bin/env bash
# Builds the wheel and the sdist, and uses each as a user would, in an empty environment of every Python that is here:
# init, train, evaluate, and push to the Hub of the tests. Ends with what a maintainer still has to press.
# PYTHONS: the interpreters, by default each of 3.11 to 3.13 on PATH or of pyenv.   PACKAGES: by default the wheel and the sdist.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1 TRL_MULTIAGENT_CACHE=$work/cache OMP_NUM_THREADS=1

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
grep -q "__version__ = \"$version\"" trl_multiagent/__init__.py
grep -q "^version: $version" CITATION.cff
grep -q "^## $version " CHANGELOG.md

find_pythons() {
	for minor in 11 12 13; do
		{ ls -d "$HOME"/.pyenv/versions/3.$minor.*/bin/python "$(command -v python3.$minor)" || true; } 2>/dev/null | head -n 1
	done
}
PYTHONS=${PYTHONS:-$(find_pythons)}
git archive --format=tar --prefix=source/ HEAD | tar -x -C "$work" # what is committed, and nothing else
"$(echo $PYTHONS | cut -d' ' -f1)" -m venv "$work/build"
"$work/build/bin/pip" install build
"$work/build/bin/python" -m build --outdir "$work/dist" "$work/source" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }

PACKAGES=${PACKAGES:-$work/dist/*.whl $work/dist/*.tar.gz}
for python in $PYTHONS; do
	for package in $PACKAGES; do
		rm -rf "$work/venv" "$work/try"
		"$python" -m venv "$work/venv"
		"$work/venv/bin/pip" install "$(grep '^torch==' constraints.txt)"
		"$work/venv/bin/pip" install "$package"
		mkdir "$work/try"
		"$work/venv/bin/python" scripts/release_try.py "$work/try" "$version"
		echo "$("$python" -V), $(basename "$package"): init, train, evaluate and push work."
	done
done
echo "Still to press: CONTRIBUTING.md, Releasing, from the workflow \`release\` on: its approval, the tag v$version, the release's text."
