"""Continuations of held-out prompts through transformers, and what can be counted on them alone.

Knows token ids and text, not the model's inside: copy accuracy, n-gram drafting, free samples.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch

PAD = 0
ENDS = (2, 0)  # <|im_end|>, <|endoftext|>
TEXT_SOURCES = ("pydoc", "stdlib", "literature", "jargon")
COPY_TASKS = ("snippet", "copy", "rename", "replace", "comment", "docqa", "recall", "tool", "chat")


@dataclass(slots=True, frozen=True)
class Sample:
    """Token ids of a prompt, its greedy continuation and, for chat items, the expected answer."""

    kind: str
    prompt: list[int]
    output: list[int]
    gold: list[int]


def ngram_draft(context: list[int], size: int, longest: int = 4, shortest: int = 2) -> list[int]:
    """What followed the latest earlier occurrence of the longest repeated suffix."""
    for n in range(longest, shortest - 1, -1):
        suffix = context[-n:]
        for start in range(len(context) - n - 1, -1, -1):
            if context[start : start + n] == suffix:
                return context[start + n : start + n + size]
    return []


def ngram_tokens_per_step(samples: list[Sample], size: int = 4) -> float:
    steps = tokens = 0
    for sample in samples:
        done = 0
        while done < len(sample.output):
            guesses = ngram_draft(sample.prompt + sample.output[:done], size)
            accepted = 0
            for guess, token in zip(guesses, sample.output[done:], strict=False):
                if guess != token:
                    break
                accepted += 1
            gained = min(accepted + 1, len(sample.output) - done)
            done, tokens, steps = done + gained, tokens + gained, steps + 1
    return round(tokens / max(steps, 1), 3)


def gold_match(samples: list[Sample]) -> dict[str, float]:
    """Share of gold tokens produced at their place, and share of answers that are exact."""
    right = count = exact = 0
    for sample in samples:
        pairs = zip(sample.output, sample.gold, strict=False)
        right += sum(a == b for a, b in pairs)
        count += len(sample.gold)
        exact += sample.output[: len(sample.gold)] == sample.gold
    return {
        "token_match": round(right / max(count, 1), 3),
        "exact": round(exact / max(len(samples), 1), 3),
        "items": len(samples),
    }


class Generator:
    """Greedy or sampled continuations through transformers."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def continue_all(
        self, prompts: list[list[int]], tokens: int, temperature: float = 0.0
    ) -> list[list[int]]:
        """Continuations up to and with the end token; shorter prompts are padded on the left."""
        if not prompts:
            return []
        size = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (size - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (size - len(p)) + [1] * len(p) for p in prompts])
        sampling: dict[str, object] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_p": 0.9, "top_k": 0}
        out = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, eos_token_id=list(ENDS),
            pad_token_id=PAD, **sampling,
        )  # fmt: skip
        return [until_end(row) for row in out[:, size:].tolist()]


def until_end(tokens: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in ENDS]
    return tokens[: ends[0] + 1] if ends else tokens


def chat_samples(
    generator: Generator, items: list[dict[str, str]], per_task: int, longest: int
) -> dict[str, list[Sample]]:
    """The first held-out items of each task whose prompt and answer fit `longest` tokens."""
    chosen: dict[str, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for item in items:
        task = item["task"]
        if task not in COPY_TASKS or len(chosen[task]) >= per_task:
            continue
        prompt = generator.encode(item["prompt"])
        gold = generator.encode(item["answer"].removesuffix("\n<|endoftext|>"))
        if len(prompt) <= longest and len(gold) <= longest // 2:
            chosen[task].append((prompt, gold))
    samples = {}
    for task, pairs in chosen.items():
        tokens = max((len(gold) for _, gold in pairs), default=0) + 8
        outputs = generator.continue_all([prompt for prompt, _ in pairs], tokens)
        samples[task] = [
            Sample(task, prompt, output, gold)
            for (prompt, gold), output in zip(pairs, outputs, strict=True)
        ]
    return samples


def text_samples(
    generator: Generator, texts: list[dict[str, str]], per_source: int, tokens: int
) -> dict[str, list[Sample]]:
    samples = {}
    for source in TEXT_SOURCES:
        long = [t["text"] for t in texts if t["source"] == source and len(t["text"]) > 1500]
        prompts = [generator.encode(text[:700]) for text in long[:per_source]]
        outputs = generator.continue_all(prompts, tokens)
        pairs = zip(prompts, outputs, strict=True)
        samples[source] = [Sample(source, prompt, output, []) for prompt, output in pairs]
    return samples


def free_samples(generator: Generator, data: Path, count: int, tokens: int) -> list[dict[str, str]]:
    """The first held-out text of each source and the first items: unpicked, temperature 0.7."""
    torch.manual_seed(0)
    texts = json.loads((data / "val-texts.json").read_text())
    items = json.loads((data / "val-items.json").read_text())
    first = [next(t for t in texts if t["source"] == source) for source in TEXT_SOURCES]
    prompts = [(text["source"], text["text"][:400]) for text in first]
    prompts += [(item["task"], item["prompt"]) for item in items[: count - len(prompts)]]
    ids = [generator.encode(prompt) for _, prompt in prompts]
    outputs = generator.continue_all(ids, tokens, temperature=0.7)
    return [
        {"kind": kind, "prompt": prompt, "output": generator.tokenizer.decode(output)}
        for (kind, prompt), output in zip(prompts, outputs, strict=True)
    ]
