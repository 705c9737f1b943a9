"""How we write, as far as a program can check it: option help, modes, commands, pages (CONTRIBUTING, Words)."""

import dataclasses
import re
from pathlib import Path

import pytest

from cloister import workflows

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
LONGEST = 30  # words of a sentence in pages and help texts

BANNED = {  # what a reader would have to look up or read twice → what to write
    r"(?:goes|went|go|going) round": "wraps (modulo Q)",
    r"liars?": "malicious party",
    r"(?:is|are|was|were) told|tells?|told|hears?|heard": "learns, receives, prints, reports",
    r"asks|asking|asked": "queries, requests",
    r"its word": "unverified input",
    r"crowds?": "smallest group size",
    r"(?:a|the|its) (?:graphics )?card": "GPU; or: model metadata",
    r"so many|as many(?! as)|of 1": "the name of the number",
    r"(?:is|are|was|were) gone|who left": "dropped out",
    r"dear": "expensive",
    r"(?:of|for|to|than|by|at|with|from|that) who(?:ever)?(?! learns)": "a party that ...",
    r"(?<!there )(?<!There )(?:is|are) no (?!longer|more|less|fewer|larger|smaller)\w+": "is not a ...",
}
WORD = {re.compile(rf"\b(?:{pattern})\b"): instead for pattern, instead in BANNED.items()}


def prose(text):
    """Sentences of a page outside code, tables, comments and headings; of a list item its own."""
    text = re.sub(r"^(```|~~~).*?^\1$", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |\|))", text):
        if block.lstrip().startswith(("|", "#")):
            continue
        plain = re.sub(r"`[^`]*`", "x", " ".join(block.split()).lstrip("-*> "))
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z*\"(x])", plain)


def faults(sentence):
    return [f"'{m[0]}' in '{sentence[:70]}': {WORD[p]}" for p in WORD for m in p.finditer(sentence)]


def helps():
    for name in workflows.SHIPPED:
        for f in dataclasses.fields(workflows.get(name).options):
            yield f"{name}: {f.name}", f.metadata["help"]


@pytest.mark.parametrize(("where", "text"), list(helps()))
def test_option_help_is_one_short_phrase(where, text):
    assert len(text.split()) <= LONGEST, where
    assert not text.endswith("."), where
    assert not re.match(r"(?:of|that|how|what|with|by|so|in which) ", text), f"{where}: begin with a noun or a verb"
    assert not faults(text), where


def test_modes_say_who_learns_what_in_the_field_s_words():
    found = [
        f"{name}, {mode}, {who}: {fault}"
        for name in workflows.SHIPPED
        for mode in workflows.get(name).modes
        for who, what in workflows.learns(name, mode)
        for fault in faults(what)
    ]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_pages_have_short_sentences_and_no_dialect(page):
    sentences = list(prose(page.read_text(encoding="utf-8")))
    long = [f"{len(s.split())} words: {s[:90]}" for s in sentences if len(s.split()) > LONGEST]
    assert not long + [fault for s in sentences for fault in faults(s)]


def test_a_sentence_of_dialect_is_found():
    assert faults("A liar that is told the sum goes round.")
    assert not faults("There is no open port, and a malicious party learns the sum.")


def commands():
    from typer.main import get_command

    from cloister.cli.main import app

    group = get_command(app)
    for name, command in group.commands.items():
        yield f"{name}: its help", (command.help or "").partition("\n")[0]
        for p in command.params:
            if getattr(p, "help", None):
                yield f"{name}: {p.name}", p.help


@pytest.mark.parametrize(("where", "text"), list(commands()))
def test_help_of_the_command_line_is_short_and_plain(where, text):
    assert text
    assert len(text.split()) <= LONGEST, where
    assert not re.match(r"(?:Of|Their|Its|Who|Which|Where|What|How|Or|The) ", text), (
        f"{where}: begin with a noun or a verb"
    )
    assert not faults(text), where
