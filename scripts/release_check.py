"""Is everything ready for a release? Run by CI, and with --release by the release workflow.

    python scripts/release_check.py                     consistency; placeholders are listed and do not fail
    python scripts/release_check.py --release v1.0.0    the tag fits, and placeholders fail

Placeholders are for maintainers: the address for private reports, the address of the repository, the hash of the sdist
in the conda recipe (which only exists after the upload, so it never fails), and the date in the changelog.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDERS = {
    "SECURITY.md": (r"SECURITY-CONTACT-NOT-SET\S*", "address for private reports"),
    "pyproject.toml": (r"https://example\.org/cloister[^\s\"]*", "address of the repository"),
    "CITATION.cff": (r"https://example\.org/cloister[^\s\"]*", "address of the repository"),
    "codemeta.json": (r"https://example\.org/cloister[^\s\"]*", "address of the repository"),
    ".github/ISSUE_TEMPLATE/config.yml": (r"https://example\.org/cloister[^\s\"]*", "address for private reports"),
    "conda/recipe.yaml": (
        r"FILL-IN-[A-Z0-9-]+|https://example\.org/cloister[^\s\"]*",
        "conda recipe, after the upload",
    ),
}
AFTERWARDS = ("conda/recipe.yaml",)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def version() -> str:
    return re.search(r'"(.+)"', text_of("src/cloister/_version.py"))[1]  # type: ignore[index]


def placeholders() -> list[tuple[str, str, str]]:
    """File, text and meaning of everything that a maintainer has to fill in."""
    found = []
    for name, (pattern, what) in PLACEHOLDERS.items():
        found += [(name, text, what) for text in dict.fromkeys(re.findall(pattern, text_of(name)))]
    return found


def inconsistencies() -> list[str]:
    """What contradicts the version or the metadata in pyproject.toml."""
    wrong, now = [], version()
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    versions = {
        "CITATION.cff": re.search(r"^version: (\S+)$", text_of("CITATION.cff"), re.MULTILINE),
        "conda/recipe.yaml": re.search(r'^  version: "(\S+)"$', text_of("conda/recipe.yaml"), re.MULTILINE),
    }
    for name, found in versions.items():
        if found is None or found[1] != now:
            wrong.append(f"{name}: expected version {now}, found {found and found[1]}")
    if not re.search(r"^Write to \S*(@|CONTACT-NOT-SET)", text_of("SECURITY.md"), re.MULTILINE):
        wrong.append("SECURITY.md: expected 'Write to' and an address for private reports, or its placeholder")
    meta = json.loads(text_of("codemeta.json"))
    if meta["version"] != now or meta["description"] != project["description"]:
        wrong.append(f"codemeta.json: expected version {now} and the description of pyproject.toml")
    if not re.search(rf"^## {re.escape(now)} \(", text_of("CHANGELOG.md"), re.MULTILINE):
        wrong.append(f"CHANGELOG.md: expected a section '## {now} (…)'")
    recipe = set(re.findall(r"^    - ([a-z0-9-]+) >=", text_of("conda/recipe.yaml"), re.MULTILINE))
    names = {re.split(r"[<>=]", text)[0] for text in project["dependencies"]}
    if missing := sorted(names - recipe):
        wrong.append(f"conda/recipe.yaml: dependencies that it lacks: {', '.join(missing)}")
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        for uses in re.findall(r"uses: (\S+)", path.read_text(encoding="utf-8")):
            if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", uses):
                wrong.append(f"{path.name}: {uses} is not pinned to a commit")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", metavar="TAG")
    args = parser.parse_args()
    wrong, open_ = inconsistencies(), placeholders()
    for name, text, what in open_:
        print(f"to be filled in: {name}: {text} ({what})")
    if args.release:
        if args.release != f"v{version()}":
            wrong.append(f"the tag {args.release} is not v{version()}")
        if re.search(rf"^## {re.escape(version())} \(unreleased\)", text_of("CHANGELOG.md"), re.MULTILINE):
            wrong.append("CHANGELOG.md: expected a date instead of 'unreleased'")
        wrong += [f"{name}: {text} is a placeholder ({what})" for name, text, what in open_ if name not in AFTERWARDS]
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
