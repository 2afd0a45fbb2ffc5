"""What the chat tasks are made of, found in corpus text: functions, documented names, jargon."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

FUNCTION = re.compile(r"^((?:    )?)def (\w+)\((.*?)\).*?:\n(?:\1    .*\n|\n)+", re.MULTILINE)
DIRECTIVE = re.compile(
    r"^\.\. (function|method|class|attribute|data|exception|option|envvar|opcode|decorator)"
    r":: (.+)\n((?:   .*\n|\n)+)",
    re.MULTILINE,
)
JARGON_ENTRY = re.compile(r"^(\S[^\n]{1,30})\n [^\n]*\n\n((?:    .*\n)+)", re.MULTILINE)


@dataclass(slots=True, frozen=True)
class Function:
    name: str
    args: str
    code: str


@dataclass(slots=True, frozen=True)
class Entry:
    """One documented name: kind ("method"), bare name, signature and first paragraph."""

    kind: str
    name: str
    signature: str
    text: str


@dataclass(slots=True, frozen=True)
class Material:
    functions: list[Function]
    entries: list[Entry]
    paragraphs: list[str]
    lines: list[str]
    jargon: list[tuple[str, str]]
    words: list[str]


def find_functions(text: str) -> Iterator[Function]:
    for match in FUNCTION.finditer(text):
        indent, code = match.group(1), match.group(0).rstrip()
        code = "\n".join(line.removeprefix(indent) for line in code.split("\n"))
        if 60 < len(code) < 1100:
            yield Function(match.group(2), match.group(3), code)


def find_entries(text: str) -> Iterator[Entry]:
    for match in DIRECTIVE.finditer(text):
        body = "\n".join(line[3:] for line in match.group(3).split("\n")).strip()
        paragraph = body.split("\n\n")[0].replace("\n", " ")
        if paragraph.startswith("..") or not 30 < len(paragraph) < 420:
            continue
        signature = match.group(2).strip()
        name = re.split(r"[\s(]", signature)[0]
        paragraph = re.sub(r":\w+:`[~!]?([^`]*)`", r"`\1`", paragraph)
        if name:
            yield Entry(match.group(1), name, signature, paragraph)


def find_jargon(text: str) -> Iterator[tuple[str, str]]:
    for match in JARGON_ENTRY.finditer(text):
        body = " ".join(match.group(2).split())
        if 40 < len(body) < 500:
            yield match.group(1).strip(), body
